"""Exchange between ranks that hold the same layers or parameters: gradients, and values that one updates for all."""
