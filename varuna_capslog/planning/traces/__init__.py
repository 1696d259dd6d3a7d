"""A trace of preemptions, played: what to run on any number of devices, and what that trains against the clock."""
