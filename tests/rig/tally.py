"""The numbers of a chaos run by fault class, as a table for people and as a line of a results file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varuna_capslog.base.failures import losses_by_cause

__all__ = ["Hit", "by_class", "causes_found", "quantile"]


@dataclass
class Hit:
    """A fault that happened.

    Attributes:
        time: seconds since the epoch, of the first signal, entry or cut.
        victims: members that it hit; `note` has its other effects.
        recovered: seconds until the next finished step of a generation without the victims; where the membership did
            not change, until the next step after the end of the fault.
        gap: the longest time without a finished step from the last one before it until then.
        causes: by victim, the name of `base/failures.CAUSES` that the run should find if it loses the victim.
    """

    number: int
    kind: str
    time: float
    victims: tuple[str, ...] = ()
    note: str = ""
    generation: int = 0
    recovered: float | None = None
    gap: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)


def causes_found(
    hits: Iterable[Hit], events: Sequence[Mapping[str, Any]], lost_at: Mapping[str, float]
) -> tuple[int, list[str]]:
    """Count the lost victims for which the run reports the injected cause; return a sentence for each of the others.

    A member that survives one fault may be lost by another: the last fault that hit it before its loss counts.

    Args:
        events: lines of events.jsonl; the clocks of the hosts that wrote them may have jumped.
        lost_at: time when the loss of each member was seen, by the clock of the hits.
    """
    causes = losses_by_cause(events)
    injected: dict[str, Hit] = {}
    for hit in sorted(hits, key=lambda hit: hit.time):
        for member in hit.causes:
            if member in causes and hit.time <= lost_at.get(member, 0.0):
                injected[member] = hit
    right, wrong = 0, []
    for member, hit in injected.items():
        cause = hit.causes[member]
        if causes[member] == cause:
            right += 1
        else:
            wrong.append(f"{member} ({hit.kind}): {cause}, found {causes[member]}")
    return right, wrong


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so great a share does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def by_class(hits: Iterable[Hit]) -> list[dict[str, Any]]:
    """Return a row for each fault class: number of faults, and the distribution of both times in seconds."""
    rows = []
    kinds: dict[str, list[Hit]] = {}
    for hit in hits:
        kinds.setdefault(hit.kind, []).append(hit)
    for kind in sorted(kinds):
        recovered = [hit for hit in kinds[kind] if hit.recovered is not None]
        row: dict[str, Any] = {"kind": kind, "count": len(kinds[kind]), "recovered": len(recovered)}
        for name in ("recovered", "gap"):
            values = [getattr(hit, name) for hit in recovered if getattr(hit, name) is not None]
            if values:
                row[f"{name}_seconds"] = {
                    "p50": round(statistics.median(values), 4),
                    "p90": round(quantile(values, 0.9), 4),
                    "max": round(max(values), 4),
                }
        rows.append(row)
    return rows
