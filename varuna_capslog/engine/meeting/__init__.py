"""Rendezvous of the ranks of an ordinary run, and the values that they send each other beside a step's tensors."""
