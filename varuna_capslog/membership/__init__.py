"""Who takes part in a run, from which step boundary, what must move, and who holds which copies.

Pure functions on plain data without torch. `varuna_capslog.elastic` carries their answers out.
"""
