"""Runs a step of a plan on `torch.distributed`: stages, messages and exact sums; and the protocol of any engine.

The training loop and the profilers drive it; it knows plans, never planners. Nothing is imported here, so that naming a
part costs no more than that part.
"""
