"""Layers of a chain split into parts that may run on different ranks; see `splitter`."""
