"""The host tier, and what waits there: what stages offload between forward and backward, moments between updates."""
