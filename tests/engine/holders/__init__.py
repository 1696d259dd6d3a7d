"""Tests of layers that several ranks hold."""
