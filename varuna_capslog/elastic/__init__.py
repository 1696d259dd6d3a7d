"""Membership that changes while a run goes on: generations, the protocol that founds them, recovery and copies.

Importing it imports no torch: decisions are functions on data. Only functions for a program's own code are exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varuna_capslog.elastic.host.hooks import request_morph
    from varuna_capslog.elastic.notices.gather import on_notice

__all__ = ["on_notice", "request_morph"]


def __getattr__(name: str) -> Any:
    """Load a hook at its first use: most importers of this package need neither."""
    if name == "on_notice":
        from varuna_capslog.elastic.notices.gather import on_notice

        return on_notice
    if name == "request_morph":
        from varuna_capslog.elastic.host.hooks import request_morph

        return request_morph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
