"""What ranks that hold the same layers or parameters send each other: gradients, and what one updates for all."""
