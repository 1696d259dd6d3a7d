"""Other ways to compute a layer: a registry, and one file for each kind of variant.

`model.workload` applies what a config's `variants` chooses to the layers of a chain. This room knows modules only.
"""
