"""The protocol's values as JSON: what travels in a round, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from varuna_capslog.membership.generation import Stamp
from varuna_capslog.membership.messages import Change, Contribution, Value, Vote

__all__ = ["decode", "encode"]


def encode(value: Value) -> bytes:
    """A value of a round as JSON; a plain vote (finite, no wishes) is empty."""
    if isinstance(value, Vote):
        if value == Vote():
            return b""
        data: dict[str, Any] = {
            "finite": value.finite,
            "changes": sorted(value.changes),
            "prepared": sorted(value.prepared),
            "urgent": value.urgent,
            "hints": sorted(value.hints),
            "save": value.save,
        }
    else:
        data = {
            "held": [[layer, *stamp] for layer, stamp in sorted(value.held)],
            "host": value.host,
            "capacity": value.capacity,
            "checkpoint": list(value.checkpoint),
            "voted": [value.voted[0], *value.voted[1]],
        }
    return json.dumps(data, separators=(",", ":")).encode()


def decode(text: bytes) -> Value:
    """The value that `encode` made this of."""
    if not text:
        return Vote()
    data = json.loads(text)
    if "finite" in data:
        changes, prepared, hints = (_changes(data[key]) for key in ("changes", "prepared", "hints"))
        return Vote(data["finite"], changes, prepared, data["urgent"], hints, data["save"])
    return Contribution(
        frozenset((layer, Stamp(step, generation)) for layer, step, generation in data["held"]),
        data["host"],
        data["capacity"],
        Stamp(*data["checkpoint"]),
        (data["voted"][0], Stamp(*data["voted"][1:])),
    )


def _changes(rows: list[list[str]]) -> frozenset[Change]:
    return frozenset((kind, member) for kind, member in rows)
