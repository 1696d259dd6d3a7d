"""Membership that changes while a run goes on: generations, the protocol that founds them, recovery and copies.

Importing it imports no torch: the decisions are functions on data. What a program may call from its own code is here;
all else is found in its module.
"""

from varuna_capslog.elastic.host.hooks import request_morph
from varuna_capslog.elastic.notices.callback import on_notice

__all__ = ["on_notice", "request_morph"]
