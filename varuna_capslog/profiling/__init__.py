"""Fills profiles: by trimmed real runs (`measure`), or by the same runs on fake tensors (`estimate`).

Both run the engine's own step, so that what is profiled is what will be trained.
"""
