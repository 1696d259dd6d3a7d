"""Elastic runs: hosts, members, the store and notices, which carry out what `membership/` decides.

Importing this package imports no torch. It exports only the functions that a user's program may call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varuna_capslog.elastic.host.hooks import request_morph
    from varuna_capslog.elastic.notices.gather import on_notice

__all__ = ["on_notice", "request_morph"]


def __getattr__(name: str) -> Any:
    """Import an exported function at its first use: most importers of this package need none."""
    if name == "on_notice":
        from varuna_capslog.elastic.notices.gather import on_notice

        return on_notice
    if name == "request_morph":
        from varuna_capslog.elastic.host.hooks import request_morph

        return request_morph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
