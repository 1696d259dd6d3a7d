"""torch.compile of layers one by one: `forward` is one compiled layer, `ahead` compiles a rank's before a step."""
