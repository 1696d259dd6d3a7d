"""Placement of copies of each layer's state in other ranks' memory, and the bytes that they take there.

`redundancy: k` requires that the run survives any k simultaneous host losses without a checkpoint, and that a layer is
not held by two neighbours of a pipeline alone. Pure arithmetic on names and bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.membership.generation import Member, MemberLayout

__all__ = ["Copies", "Reserve", "place_copies", "reserves"]


@dataclass(frozen=True)
class Copies:
    """Placement of the copies. kept: member -> layers of others that it keeps, rising; only members that keep some.

    survives: number of simultaneous host losses that every layer survives, at most the required one.
    problem: a sentence with the numbers where not all copies can be placed; the placement is then the best found.
    """

    kept: Mapping[Member, tuple[int, ...]]
    survives: int
    problem: str | None = None


def place_copies(
    pipelines: Sequence[Sequence[tuple[Member, Sequence[int]]]],
    hosts: Mapping[Member, str],
    redundancy: int,
    layer_bytes: Sequence[int],
    spare: Sequence[Member] = (),
    room_bytes: Mapping[Member, int] | None = None,
    links: Iterable[tuple[Member, Member]] | None = None,
) -> Copies:
    """Place copies so that every layer has holders on redundancy + 1 hosts, and not only on two neighbours.

    With too few hosts a layer still has redundancy + 1 holders if there are enough members, so that any `redundancy`
    workers may be lost. Every owner counts as a holder, in all replicas. Layers with the same owners (a stage) share
    their holders, so that a member sends its copies to few others. Stages are placed by size, the largest first, each
    at the member with the fewest bytes so far. Greedy is enough: without `room_bytes` stages do not compete.

    Args:
        pipelines: each way through the stages, as (member, layers) in order; members and stages may occur repeatedly.
        hosts: of all members, `spare` included; members of one host are lost together.
        layer_bytes: bytes of a copy of each layer. spare: members without a stage, which may hold copies, too.
        room_bytes: bytes for copies at each member; None: no limit.
        links: pairs of neighbours; None: members of consecutive stages in a way.

    Raises:
        CapslogError: redundancy is negative, or a layer has no owner.
    """
    if redundancy < 0:
        raise CapslogError(f"redundancy is {redundancy}; it counts host losses, so give 0 or more")
    owners: dict[int, tuple[Member, ...]] = {}
    if links is None:
        links = [pair for stages in pipelines for pair in pairwise(member for member, _ in stages)]
    neighbours = {frozenset(pair) for pair in links if pair[0] != pair[1]}
    for stages in pipelines:
        for member, layers in stages:
            for layer in layers:
                if member not in owners.get(layer, ()):  # a stage may serve several pipelines
                    owners[layer] = (*owners.get(layer, ()), member)
    if sorted(owners) != list(range(len(layer_bytes))):
        missing = sorted(set(range(len(layer_bytes))) ^ set(owners))
        raise CapslogError(f"layers {missing[:8]} of {len(layer_bytes)} have no owner or no size; each needs both")
    groups: dict[tuple[Member, ...], list[int]] = {}
    for layer in sorted(owners):
        groups.setdefault(owners[layer], []).append(layer)

    members = tuple(dict.fromkeys([*(member for stages in pipelines for member, _ in stages), *spare]))
    load = dict.fromkeys(members, 0)
    for layer, group in owners.items():
        for member in group:
            load[member] += layer_bytes[layer]
    rank_of = {member: rank for rank, member in enumerate(members)}
    by_load = [(load[member], rank_of[member], member) for member in members]
    heapq.heapify(by_load)
    room = None if room_bytes is None else dict(room_bytes)
    kept: dict[Member, list[int]] = {}
    survives = redundancy
    unplaced: list[int] = []
    paired: list[int] = []
    sizes = {group: sum(layer_bytes[layer] for layer in layers) for group, layers in groups.items()}
    for group in sorted(groups, key=lambda group: -sizes[group]):
        holders = list(group)
        while redundancy and (short := _short(holders, hosts, redundancy)) + _paired(holders, neighbours):
            chosen = _lightest(by_load, holders, hosts, neighbours, short, room, sizes[group])
            if chosen is None and len(set(holders)) <= redundancy:  # too few hosts: protect from lost workers
                chosen = _lightest(by_load, holders, hosts, neighbours, 0, room, sizes[group])
            if chosen is None:
                break
            holders.append(chosen)
            kept.setdefault(chosen, []).extend(groups[group])
            load[chosen] += sizes[group]
            heapq.heappush(by_load, (load[chosen], rank_of[chosen], chosen))
            if room is not None:
                room[chosen] = room.get(chosen, 0) - sizes[group]
        if short := _short(holders, hosts, redundancy):
            survives = min(survives, redundancy - short)
            unplaced += groups[group]
        elif redundancy and _paired(holders, neighbours):
            paired += groups[group]
    problem = _problem(redundancy, survives, unplaced, paired, [hosts[member] for member in members], room_bytes)
    return Copies({member: tuple(sorted(layers)) for member, layers in kept.items()}, survives, problem)


def _short(holders: Sequence[Member], hosts: Mapping[Member, str], redundancy: int) -> int:
    """Number of further hosts needed, so that a holder is left after the loss of any `redundancy` hosts."""
    return max(0, redundancy + 1 - len({hosts[member] for member in holders}))


def _paired(holders: Sequence[Member], neighbours: Collection[frozenset[Member]]) -> bool:
    """True where the only holders are two neighbours."""
    return len(set(holders)) == 2 and frozenset(holders) in neighbours


def _lightest(
    by_load: list[tuple[int, int, Member]],
    holders: Sequence[Member],
    hosts: Mapping[Member, str],
    neighbours: Collection[frozenset[Member]],
    short: int,
    room: Mapping[Member, int] | None,
    size: int,
) -> Member | None:
    """Remove and return the next holder, with the fewest bytes: on a new host if `short`, best no owner's neighbour."""
    taken = {hosts[member] for member in holders}
    passed, lightest, second = [], None, None
    while by_load and lightest is None:
        entry = heapq.heappop(by_load)
        member = entry[2]
        fits = member not in holders and (room is None or room.get(member, 0) >= size)
        if not fits or (short and hosts[member] in taken):
            passed.append(entry)
        elif _paired([*holders, member], neighbours):
            second = second or entry
            passed.append(entry)
        else:
            lightest = entry
    if lightest is None and second is not None:
        lightest = second
        passed.remove(second)
    for entry in passed:
        heapq.heappush(by_load, entry)
    return None if lightest is None else lightest[2]


def _problem(
    redundancy: int,
    survives: int,
    unplaced: Sequence[int],
    paired: Sequence[int],
    hosts: Sequence[str],
    room_bytes: Mapping[Member, int] | None,
) -> str | None:
    count = len(set(hosts))
    if unplaced and count <= redundancy:
        return (
            f"redundancy {redundancy} needs every layer on {redundancy + 1} hosts, but there are {count}: the loss of "
            f"{survives + 1} of them is not survived without a checkpoint; add {redundancy + 1 - count} host(s), or "
            f"set redundancy to {survives}"
        )
    if unplaced:
        room = format_bytes(max((room_bytes or {}).values(), default=0))
        return (
            f"redundancy {redundancy} finds no room for copies of layers {_some(unplaced)}: the members have at most "
            f"{room} each for copies; the loss of {survives + 1} host(s) may not be survived without a checkpoint; "
            "give more host memory, or lower redundancy"
        )
    if paired:
        return (
            f"layers {_some(paired)} are held by two neighbours of the pipeline only, since there are {len(hosts)} "
            "device(s) with room: losing both needs the checkpoint; add a device"
        )
    return None


def _some(layers: Sequence[int]) -> str:
    rising = sorted(layers)
    return ", ".join(map(str, rising[:6])) + (f" and {len(rising) - 6} more" if len(rising) > 6 else "")


class Reserve(NamedTuple):
    """Bytes that protection takes on one rank's device beside training.

    snapshot: own layers at the previous boundary. copies: layers of others, at the two boundaries that may be needed.
    updates: gradients of others for the step under way, applied when its vote succeeds (`sync` only).
    """

    snapshot: int
    copies: int
    updates: int


def reserves(
    layout: MemberLayout, sync: bool, layer_bytes: Sequence[int], gradient_bytes: Sequence[int]
) -> dict[Member, Reserve]:
    """Return the bytes that protection takes on each rank. A copy exists twice: at the boundary before the step and,
    from the vote (`sync`) or the arrival (`async`) on, at the next one. Own layers are trained anyway, so only their
    previous boundary counts. gradient_bytes: of each layer, as they are sent.
    """
    reserve_of = {}
    for member in dict.fromkeys([*layout.owned, *layout.copied]):
        mine, theirs = (sum(layer_bytes[layer] for layer in of.get(member, ())) for of in (layout.owned, layout.copied))
        updates = sum(gradient_bytes[layer] for layer in layout.copied.get(member, ())) if sync else 0
        reserve_of[member] = Reserve(mine, 2 * theirs, updates)
    return reserve_of
