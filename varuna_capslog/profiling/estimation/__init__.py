"""The estimator's models of a device (allocator, workspaces of kernels, launch times) and its runs on fake tensors."""
