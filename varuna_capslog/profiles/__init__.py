"""Costs of each layer of a chain: the record, and the list of runs that fill it. Imports no torch."""
