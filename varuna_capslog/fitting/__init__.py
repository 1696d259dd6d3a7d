"""Trains a module within a number of bytes on one device, in the user's own training loop."""

from varuna_capslog.fitting.module import FittedModule, fit

__all__ = ["FittedModule", "fit"]
