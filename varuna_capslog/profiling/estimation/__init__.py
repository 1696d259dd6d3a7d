"""What the estimator knows of a device: allocator, workspaces of kernels, launch times; and the run on fake tensors."""
