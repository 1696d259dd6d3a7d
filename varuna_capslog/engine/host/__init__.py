"""The host tier, and its users: tensors that stages offload between forward and backward, moments between updates."""
