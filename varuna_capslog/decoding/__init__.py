"""Greedy decoding with one model on several ranks, which divide the key-value cache by positions or by heads."""
