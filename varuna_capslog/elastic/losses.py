"""Causes for which the workers of a run were lost, from the hosts' entries in events.jsonl.

A silent host counts as gone; if it comes back, it reports itself whether it was cut off or stood still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from varuna_capslog.base.failures import CAUSES

__all__ = ["losses_by_cause", "losses_in_words"]


def losses_by_cause(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return {member: a name of `base/failures.CAUSES`} for all lost members; "failed" where no cause was reported.

    events: lines of events.jsonl in their order.
    """
    causes: dict[str, str] = {}
    silent: dict[str, list[str]] = {}
    for event in events:
        cause = str(event.get("cause"))
        if event.get("kind") == "lost":
            member = str(event.get("member"))
            causes[member] = cause if cause in CAUSES else "failed"
            if cause == "host":
                silent.setdefault(str(event.get("host")), []).append(member)
        elif event.get("kind") == "cause" and cause in CAUSES:
            for member in silent.pop(str(event.get("host")), ()):
                causes[member] = cause
    return causes


def losses_in_words(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Number of workers lost for each cause, the commonest first; None where none was lost."""
    counted = Counter(losses_by_cause(events).values())
    return ", ".join(f"{count} {CAUSES[cause]}" for cause, count in counted.most_common()) or None
