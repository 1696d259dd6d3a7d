"""What proves the membership protocol: a model of the world that checks every rule, an explorer of all interleavings,
and a generator of random histories. Usable with any `Job`; no part of a training run.
"""
