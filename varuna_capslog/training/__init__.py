"""The training loop, layer states and their followers, checkpoints, the order of data, and metrics."""
