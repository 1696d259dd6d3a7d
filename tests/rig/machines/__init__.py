"""The machines of a chaos run: their supervisors, network and store, and what can be seen of their members."""
