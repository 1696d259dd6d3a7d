"""Greedy decoding of one model over several ranks, whose key-value cache is divided by positions or by heads.

`traffic` and `choice` reckon what either way costs, without torch; `decoder` runs both on models of transformers.
"""
