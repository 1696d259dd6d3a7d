"""A model as an ordered chain of layers, the tensors that cross each cut, and the workload: chain, data and loss.

`capture` makes a chain from an ordinary module; `interop` gives a chain's stages to other pipeline runtimes.
"""
