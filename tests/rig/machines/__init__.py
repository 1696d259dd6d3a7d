"""The machines of a chaos run: their supervisors, network and store, and the records of their members."""
