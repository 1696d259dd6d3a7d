"""Profiles measured through Varuna's own pipeline, stage by stage."""
