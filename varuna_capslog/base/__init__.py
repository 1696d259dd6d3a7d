"""Errors, units, checked fields, files, processes and their failures: what every other room may use.

Nothing here knows what a model or a plan is, and nothing imports torch.
"""
