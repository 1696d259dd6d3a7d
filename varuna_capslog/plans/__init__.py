"""The plan file: layers of each stage, ranks of the stages, and predicted costs. Plain data; imports no torch."""
