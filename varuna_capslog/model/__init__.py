"""A model as an ordered chain of layers, what crosses each cut, and the workload that gives chain, data and loss.

`capture` makes a chain from an ordinary module; `interop` gives a chain's stages to other pipeline runtimes.
"""
