"""Errors, units, checked fields, files, processes and their failures. No module here imports torch or uses plans."""
