"""Splits a model with Varuna's cut points at any list of cuts."""
