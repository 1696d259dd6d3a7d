"""Trains a module within a number of bytes on one device, in a loop of its user's own."""

from varuna_capslog.fitting.module import FittedModule, fit

__all__ = ["FittedModule", "fit"]
