"""How a model with Varuna's cut points is split at any list of cuts."""
