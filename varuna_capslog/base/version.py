"""Version of this package, read by setup.py, the command and reports."""

__all__ = ["__version__"]

__version__ = "0.1.0"
