"""Simulates, compares and judges plans before a run. Built on the planners; imports no torch."""
