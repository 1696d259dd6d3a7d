"""Tests of the host tier."""
