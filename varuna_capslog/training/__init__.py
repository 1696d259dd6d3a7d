"""One loop over steps, and what it keeps: the state of each layer, checkpoints, the order of data, metrics."""
