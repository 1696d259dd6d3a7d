"""What members tell each other in a round, and its JSON form: what each one holds, and each one's vote on a step.

Data only. The protocol makes and reads these values; the runtime carries them from member to member.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from varuna_capslog.membership.generation import INITIAL, Held, Member, Stamp

__all__ = ["Change", "Contribution", "Proof", "Value", "Vote", "decode", "encode"]

Change = tuple[str, Member]
"""A wished change: ("leave", member) or ("join", member)."""


class Proof(NamedTuple):
    """The digest of a layer's state at a boundary, computed by a member that holds it.

    Attributes:
        owner: the member trained the layer; False: it holds a copy that was made ahead of a planned change.
    """

    layer: int
    stamp: Stamp
    owner: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """Cast in round 0 of a generation: what a participant brings.

    Attributes:
        held: everything of the training state that it can send.
        host: members of one host are lost together.
        capacity: bytes of its device, for the planner; 0 where the run has no capacities.
        checkpoint: the newest complete checkpoint that it knows of.
        voted: its last vote on a step: in which generation, and from which boundary. Where all voters of that
            generation voted from there, the boundary is settled, whether or not anybody has seen the outcome.
        proofs: digests of the copies that it holds ahead of a change, and of the layers that it trained and of which
            such copies were made.
    """

    held: Held
    host: str
    capacity: int = 0
    checkpoint: Stamp = INITIAL
    voted: tuple[int, Stamp] = (0, INITIAL)
    proofs: frozenset[Proof] = frozenset()


@dataclass(frozen=True, slots=True)
class Vote:
    """Cast in round s: this member's share of step s is final.

    Attributes:
        finite: loss and gradients are finite.
        changes: changes of the membership that this member knows to be wished.
        prepared: the set of changes for which everything that must move here has been copied ahead.
        urgent: its deadline leaves no time for preparation.
        hints: changes that may be wished later.
        save: one of `changes` may be cut off on its way: a checkpoint is to be written before it begins.
    """

    finite: bool = True
    changes: frozenset[Change] = frozenset()
    prepared: frozenset[Change] = frozenset()
    urgent: bool = False
    hints: frozenset[Change] = frozenset()
    save: bool = False


Value = Contribution | Vote


def encode(value: Value) -> bytes:
    """A value of a round as JSON; a plain vote (finite, no wishes) is empty."""
    if isinstance(value, Vote):
        if value == Vote():
            return b""
        data: dict[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        data = {
            "held": [[layer, *stamp] for layer, stamp in sorted(value.held)],
            "host": value.host,
            "capacity": value.capacity,
            "checkpoint": list(value.checkpoint),
            "voted": [value.voted[0], *value.voted[1]],
            "proofs": value.proofs,
        }
    return json.dumps(data, separators=(",", ":"), default=sorted).encode()


def decode(text: bytes) -> Value:
    """The value that `encode` made this of."""
    if not text:
        return Vote()
    data = json.loads(text)
    if "finite" in data:
        changes = {key: frozenset(map(tuple, data[key])) for key in ("changes", "prepared", "hints")}
        return Vote(**{**data, **changes})
    return Contribution(
        frozenset((layer, Stamp(step, generation)) for layer, step, generation in data["held"]),
        data["host"],
        data["capacity"],
        Stamp(*data["checkpoint"]),
        (data["voted"][0], Stamp(*data["voted"][1:])),
        frozenset(Proof(layer, Stamp(*stamp), owner, digest) for layer, stamp, owner, digest in data["proofs"]),
    )
