"""Decodes greedily with one model over several ranks, whose key-value cache is divided by positions or by heads.

`choice` computes what either way costs, without torch; `decoder` runs both on models of transformers.
"""
