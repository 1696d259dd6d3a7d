"""Membership of a run: voters, boundaries, layers that must move, holders of copies. Pure functions without torch."""
