"""Recovery from what the survivors hold: the newest boundary, the owners of the layers, and the layers that move.

All participants call `decide` with the same contributions and get the same decision, so there is no leader. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from varuna_capslog.membership.generation import INITIAL, Generation, Member, MemberLayout, Stamp
from varuna_capslog.membership.messages import Contribution, Proof
from varuna_capslog.plans.plan import Plan

__all__ = [
    "CHECKPOINT",
    "Boundary",
    "Decision",
    "Move",
    "Place",
    "Seat",
    "decide",
    "distrusted",
    "list_moves",
    "newest_boundary",
    "speeds_of",
    "without",
]

CHECKPOINT = None
"""Source of a layer that is read from the checkpoint."""

_FOLLOW = (
    "copies of the layers that the lost members held follow beside the training; until then further losses count as if "
    "they had come at once"
)


class Seat(NamedTuple):
    """A member as the planner sees it. capacity: bytes of its device; 0: unknown. speed: of its device relative to the
    fastest, above 0, at most 1; perhaps known only to the member that proposes a plan.
    """

    member: Member
    host: str
    capacity: int
    speed: float = 1.0


def speeds_of(seats: Sequence[Seat]) -> tuple[float, ...] | None:
    """Device speeds of these seats, by rank; None where all are equal."""
    speeds = tuple(seat.speed for seat in seats)
    return speeds if len(set(speeds)) > 1 else None


class Place(Protocol):
    """Function from seats, by rank, to the layout of owners and copies, or to a sentence on what the run waits for."""

    def __call__(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """plan: from the generation's record; None: the seats alone decide."""


class Move(NamedTuple):
    """A layer that must go to a new owner. source: a member, or CHECKPOINT."""

    layer: int
    source: Member | None
    target: Member
    bytes: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Boundary at which the survivors can resume: the newest at which every layer is available.

    holders: members that hold each layer there, in the order of the contributions.
    on_disk: the checkpoint is of this boundary, so that layers without a holder come from it.
    passed_over: newer boundaries, newest first, and the layers that no survivor holds there.
    """

    stamp: Stamp
    holders: tuple[tuple[Member, ...], ...]
    on_disk: bool
    passed_over: tuple[tuple[Stamp, tuple[int, ...]], ...] = ()

    def loses_settled(self, reached: int, voted: int = 0) -> bool:
        """True where settled steps would be lost, as far as the survivors can tell.

        A member that applied step s saw its vote succeed, so all voters held boundary s-1: it was settled. Where layers
        come from the checkpoint, even the newest boundary may have been settled: its holders can all be lost.

        Args:
            reached: newest step that an earlier founder is known to have applied.
            voted: newest boundary from which all survivors of the last vote voted; perhaps the lost members, too.
        """
        newest = max(reached, self.passed_over[0][0].step if self.passed_over else 0)
        lost = self.stamp.step < newest - 1 or (self.stamp.step < newest and not all(self.holders))
        return lost or self.stamp.step < voted


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of every participant after the first round. Either `layout` is set, and the generation continues from
    `boundary` after `moves`; or it waits, and `waiting` says why: for devices, or (`for_holders`) for members with
    settled layers that no participant holds.
    """

    boundary: Boundary
    layout: MemberLayout | None
    moves: tuple[Move, ...]
    waiting: str | None = None
    checkpoint: Stamp = INITIAL
    for_holders: bool = False


def newest_boundary(
    num_layers: int,
    held: Mapping[Member, Collection[tuple[int, Stamp]]],
    valid: Callable[[Stamp], bool],
    checkpoint: Stamp,
) -> Boundary:
    """Return the newest boundary at which every layer is held by a survivor or lies in the checkpoint.

    Args:
        held: by survivor; the order of members decides the order of holders.
        valid: True for stamps on the lineage; others are ignored.
        checkpoint: a complete one on the lineage, taken if no newer boundary is; it has all layers.
    """
    holders: dict[Stamp, dict[int, list[Member]]] = {checkpoint: {}}
    verdicts: dict[Stamp, bool] = {checkpoint: True}
    for member, entries in held.items():
        for layer, stamp in entries:
            if stamp not in verdicts:
                verdicts[stamp] = valid(stamp)
            if verdicts[stamp]:
                holders.setdefault(stamp, {}).setdefault(layer, []).append(member)
    passed: list[tuple[Stamp, tuple[int, ...]]] = []
    for stamp in sorted(holders, reverse=True):
        holders_of = holders[stamp]
        if stamp == checkpoint or len(holders_of) == num_layers:
            by_layer = tuple(tuple(holders_of.get(layer, ())) for layer in range(num_layers))
            return Boundary(stamp, by_layer, stamp == checkpoint, tuple(passed))
        passed.append((stamp, tuple(layer for layer in range(num_layers) if layer not in holders_of)))
    raise AssertionError("the checkpoint is a boundary")  # it is among the stamps


def list_moves(
    boundary: Boundary, owned: Mapping[Member, Iterable[int]], layer_bytes: Sequence[int]
) -> tuple[Move, ...]:
    """List the layers that must move, each once per owner that lacks it. The source is the holder that sends the fewest
    bytes so far (the first on a tie), or the checkpoint where there is no holder. layer_bytes: parameters, buffers and
    moments of each layer.
    """
    sent: dict[Member, int] = {}
    moves = []
    for target, layers in owned.items():
        for layer in layers:
            sources = boundary.holders[layer]
            if target in sources:
                continue
            assert sources or boundary.on_disk
            source = min(sources, key=lambda member: sent.get(member, 0), default=CHECKPOINT)
            if source is not None:
                sent[source] = sent.get(source, 0) + layer_bytes[layer]
            moves.append(Move(layer, source, target, layer_bytes[layer]))
    return tuple(moves)


def decide(
    record: Generation,
    contributions: Mapping[Member, Contribution],
    layer_bytes: Sequence[int],
    place: Place,
) -> Decision:
    """Decide how a generation continues after its first round. contributions: of all participants, also of leaving
    members, which may have to send. place: called with the members' seats and the record's plan.
    """
    checkpoints = [value.checkpoint for value in contributions.values()]
    checkpoint = max((stamp for stamp in checkpoints if record.continues(stamp)), default=record.checkpoint)
    checkpoint = max(checkpoint, record.checkpoint)
    held = {member: contributions[member].held for member in record.participants}
    boundary = newest_boundary(len(layer_bytes), held, record.continues, checkpoint)
    votes = [value.voted for value in contributions.values() if record.continues(value.voted[1])]
    last = max((generation for generation, _ in votes), default=0)
    voted = min((stamp.step for generation, stamp in votes if generation == last), default=0)
    if boundary.loses_settled(record.reached, voted) and not record.regress:
        return Decision(boundary, None, (), _lack_sentence(boundary, record, checkpoint), checkpoint, for_holders=True)
    if not record.members:
        return Decision(boundary, None, (), "no device is left", checkpoint)
    seats = [Seat(member, contributions[member].host, contributions[member].capacity) for member in record.members]
    layout = place(seats, record.plan)
    if isinstance(layout, str):
        return Decision(boundary, None, (), layout, checkpoint)
    if record.copies is not None:
        layout = layout.with_copies(record.copies, _FOLLOW)
    owned = {member: layout.owned.get(member, ()) for member in record.members}
    return Decision(boundary, layout, list_moves(boundary, owned, layer_bytes), None, checkpoint)


def _lack_sentence(boundary: Boundary, record: Generation, checkpoint: Stamp) -> str:
    newest, missing = record.reached, tuple(range(len(boundary.holders)))
    if boundary.passed_over:
        newest, missing = boundary.passed_over[0][0].step, boundary.passed_over[0][1]
    return (
        f"nobody of {len(record.participants)} member(s) holds layers {', '.join(map(str, missing))} at step {newest}; "
        f"waiting for one that does, or to go back to the checkpoint of step {checkpoint.step}"
    )


# -- copies made ahead of a change: each is compared with its owner before a generation relies on it -------------------


def distrusted(
    values: Mapping[Member, Contribution], valid: Callable[[Stamp], bool] = lambda stamp: True
) -> frozenset[tuple[Member, int]]:
    """Return (member, layer) of the copies that must not be used, at any boundary.

    A copy is left out where an owner at the same boundary has another digest. It is also left out where the only owners
    to compare with are one step before or after it, because one of the two missed the last vote: nothing is lost, since
    such an owner holds the newest boundary that all members are known to have reached. Without an owner among the
    participants the copy cannot be judged, and is used. valid: True for stamps on the lineage; other proofs are
    ignored.
    """
    owners: dict[int, list[Proof]] = {}
    for value in values.values():
        for proof in value.proofs:
            if proof.owner and valid(proof.stamp):
                owners.setdefault(proof.layer, []).append(proof)
    return frozenset(
        (member, proof.layer)
        for member, value in values.items()
        for proof in value.proofs
        if not proof.owner and not _is_trusted(proof, owners.get(proof.layer, []))
    )


def _is_trusted(copy: Proof, owners: Collection[Proof]) -> bool:
    alike = [owner.digest == copy.digest for owner in owners if owner.stamp == copy.stamp]
    return all(alike) if alike else not any(abs(owner.stamp.step - copy.stamp.step) == 1 for owner in owners)


def without(
    values: Mapping[Member, Contribution], left_out: Collection[tuple[Member, int]]
) -> dict[Member, Contribution]:
    """Return the values without these copies, in the same order."""
    if not left_out:
        return dict(values)
    return {
        member: replace(value, held=frozenset(entry for entry in value.held if (member, entry[0]) not in left_out))
        for member, value in values.items()
    }
