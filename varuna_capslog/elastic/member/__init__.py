"""A member of an elastic run: passes events to the membership protocol and executes the effects that it returns."""
