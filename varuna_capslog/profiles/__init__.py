"""What each layer of a chain costs: the record, and the list of runs that fill it. Imports no torch."""
