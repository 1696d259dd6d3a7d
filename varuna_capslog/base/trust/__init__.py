"""Authentication of a run's connections: its secret, connections that prove it, and the listener that checks them."""
