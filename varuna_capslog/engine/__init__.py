"""Runs a step of a plan on `torch.distributed`: stages, messages and exact sums; and the protocol of any engine.

It knows plans, never planners. Nothing is imported here, so that importing a part costs no more than that part.
"""
