"""Errors, units, checked fields, files, processes and their failures. Nothing here imports torch or knows plans."""
