"""The version of this package; setup.py, the command and reports read it here."""

__all__ = ["__version__"]

__version__ = "0.1.0"
