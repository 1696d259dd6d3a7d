"""The estimator's models of a device (allocator, kernels' workspaces, speed), and its runs on fake tensors."""
