"""Variants, other ways to compute a layer: a registry, and a file for each kind. This package knows only modules."""
