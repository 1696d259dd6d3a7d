"""Runs a plan on `torch.distributed`: stages, messages, exact sums, checkpoints, and the process of one rank.

The worker is the way in (`python -m varuna_capslog.start.worker RUN_DIR`); the engine knows plans, never planners.
Nothing is imported here, so that naming a part costs no more than that part.
"""
