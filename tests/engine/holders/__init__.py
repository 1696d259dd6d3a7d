"""Tests of what waits in the host tier."""
