"""One member of an elastic run: what it hears goes into the membership protocol, and the answers are carried out."""
