"""Variants, other ways to compute a layer: a registry, and one file for each kind of variant.

`model.workload` applies the `variants` of a config to the layers of a chain. This package knows only modules.
"""
