"""From a config to a profile, a plan, a run folder and running workers.

This room names both engines (ours and Varuna's) and hands them to the training loop; rooms below know neither.
"""
