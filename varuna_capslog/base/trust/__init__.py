"""Who may speak to a run: its secret, connections that prove it, and the door that lets nobody else in."""
