"""Decides where to cut a deep network into pipeline stages, proves it before the run, and trains with it.

Importing this package imports no torch; the rooms that need it do.
"""

__version__ = "0.1.0"
