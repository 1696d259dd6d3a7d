"""A model of the world around the membership protocol, searched over all orders of events or at random."""
