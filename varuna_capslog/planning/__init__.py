"""Simulates, compares and judges plans before a run. Calls the planners; imports no torch."""
