"""Preparation of a planned change: the layers that will move, and the members that get copies while training goes on.

Every member computes the same by itself, from the present layout and the wishes that a vote told all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from varuna_capslog.membership.generation import INITIAL, Generation, Member, MemberLayout
from varuna_capslog.membership.messages import Change
from varuna_capslog.membership.recovery import Place, Seat, list_moves, newest_boundary

__all__ = ["Ahead", "find_ahead", "first_owner", "stay_with"]


@dataclass
class Ahead:
    """A change under way at one member.

    Attributes:
        targets: layer -> members that will own or copy it and do not hold it, for those layers that this member sends.
        mine: layers that come here.
        sent: layer -> members that were sent a copy in this generation, for whatever change; they get every update.
        began: the copies of this change have been sent.
        hinted: it may never be made; no vote waits for it.
        layout: owners and copies after the change; None where the next generation will wait.
    """

    changes: frozenset[Change]
    targets: Mapping[int, tuple[Member, ...]]
    mine: frozenset[int]
    sent: dict[int, tuple[Member, ...]] = field(default_factory=dict)
    began: bool = False
    hinted: bool = False
    layout: MemberLayout | None = None

    def due(self) -> list[tuple[int, tuple[Member, ...]]]:
        """Return what is to be sent now, each copy once: layers and the members that have not got them."""
        self.began = True
        due = []
        for layer, members in self.targets.items():
            fresh = tuple(member for member in members if member not in self.sent.get(layer, ()))
            if fresh:
                self.sent[layer] = (*self.sent.get(layer, ()), *fresh)
                due.append((layer, fresh))
        return due


def first_owner(layer: int, layout: MemberLayout, members: Sequence[Member]) -> Member | None:
    """Return the member that sends a layer, of several replicas that own it; None where none does."""
    return next((member for member in members if layer in layout.owned.get(member, ())), None)


def stay_with(record: Generation, changes: Collection[Change]) -> list[Member]:
    """The members of the generation that these changes lead to, by rank, if nothing else happens."""
    leave = {member for kind, member in changes if kind == "leave"}
    join = sorted(member for kind, member in changes if kind == "join")
    stay = [member for member in record.members if member not in leave]
    return stay + [member for member in join if member not in record.members and member not in leave]


def find_ahead(
    me: Member,
    record: Generation,
    layout: MemberLayout,
    changes: frozenset[Change],
    seats: Mapping[Member, Seat],
    place: Place,
    layer_bytes: Sequence[int],
) -> Ahead:
    """Find the layers that move for these changes. Joining members get none ahead: they are not in this generation.

    Args:
        seats: of all members, and of those that asked to be let in; the same everywhere, or the members disagree.
    """
    stay = stay_with(record, changes)
    wanted = place([seats[member] for member in stay]) if stay else "no device is left"
    if isinstance(wanted, str):  # the next generation will wait, and say for what
        return Ahead(changes, {}, frozenset())
    held = {member: [(layer, INITIAL) for layer in layout.holds(member)] for member in record.members}
    boundary = newest_boundary(len(layer_bytes), held, lambda stamp: True, INITIAL)
    # copies, too: the first vote of the next generation waits for them
    roles = {member: wanted.holds(member) for member in stay if member in record.members}
    targets: dict[int, list[Member]] = {}
    mine: set[int] = set()
    for move in list_moves(boundary, roles, layer_bytes):
        if move.target == me:
            mine.add(move.layer)
        elif first_owner(move.layer, layout, record.members) == me:
            targets.setdefault(move.layer, []).append(move.target)
    sent = {layer: tuple(members) for layer, members in targets.items()}
    return Ahead(changes, sent, frozenset(mine), layout=wanted)
