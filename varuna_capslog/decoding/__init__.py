"""Decodes greedily with one model over several ranks, whose key-value cache is divided by positions or by heads.

`traffic` and `choice` compute what either way costs, without torch; `decoder` runs both on models of transformers.
"""
