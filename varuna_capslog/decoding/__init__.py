"""Decodes greedily with one model over several ranks, whose key-value cache is divided by positions or by heads."""
