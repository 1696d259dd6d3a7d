"""Errors, units, checked fields, files, processes and their failures, for use by every other room.

Nothing here knows what a model or a plan is, and nothing imports torch.
"""
