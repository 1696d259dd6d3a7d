"""The loop over steps, and its records: the state of each layer, checkpoints, the order of data, metrics."""
