"""Choice after a loss: new cuts at once, or the lost layers reassigned now and new cuts while training continues.

With new cuts the members wait for the layers that change owner, and the first vote for the copies. In a small motion
all members keep their layers: those with copies of the lost layers train them, no new copy is made, and often nothing
moves. Steps are longer until the new cuts and the missing copies are made beside training. The choice compares the
seconds of training that each way is expected to lose:

    new cuts        waiting for layers and copies
    small motion    waiting for the layers that must still move; the longer steps until the new cuts are there; a
                    second, planned change

The next change may come before that, after H seconds in the mean: with probability exp(-t / H) none comes within t
seconds. Until the copies are there, some layers have a single holder: if it is lost, the run goes back to its last
checkpoint, and the training since then is lost as well. Pure; no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.membership.changes import State
from varuna_capslog.membership.generation import INITIAL, Generation, Member, MemberLayout
from varuna_capslog.membership.layout_candidates import NO_LIMIT
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Move, Seat, list_moves, newest_boundary
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planning.playing import play
from varuna_capslog.planning.verdict import judge_by_fold
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import with_beside

__all__ = [
    "BESIDE",
    "FOLLOW_STEPS",
    "LINK",
    "SECOND_PAUSE",
    "USUAL_GAP",
    "Loss",
    "SmallMotion",
    "Weighed",
    "among",
    "bare",
    "expected_loss",
    "follows_a_loss",
    "give_stage",
    "kept_copies",
    "share_of_sole_holders",
    "traffic_of",
    "ways_to_give",
]


# -- Plans of a small motion: the stages of lost members go to the remaining ones, which keep their own layers.
#
# A stage goes whole to one member, or in two parts to two members. There it becomes a further stage, or joins a stage
# with adjacent layers. Pure; no torch.


Part = tuple[int, int, int]
"""(first, end, rank): layers [first, end) of a stage, and the rank that gets them. A stage of several ranges of layers
goes whole, from its first layer to its last one.
"""


def follows_a_loss(state: State, record: Generation) -> bool:
    """True where `record` may be founded as a small motion: losses are the only change, and this member has applied a
    step of the generation that lost them, so that all copies of that generation exist.
    """
    members, remaining = state.record.members, record.members
    lost = (
        remaining != members
        and remaining == tuple(member for member in members if member in remaining)
        and not record.leaving
    )
    return lost and state.at.generation == state.record.number


def bare(plan: Plan) -> Plan | None:
    """Return the plan without predictions and devices, so that its stages can be given away; None where it has action
    lists, which hold only for its ranks, or a stage on several ranks.
    """
    if plan.actions is not None or any(len(stage.ranks) != 1 for stage in plan.stages):
        return None
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    return Plan(plan.num_layers, stages, plan.units, plan.schedule, routes=plan.routes, variants=plan.variants)


def ways_to_give(plan: Plan, number: int, ranks: Sequence[int]) -> Iterator[tuple[Part, ...]]:
    """Yield every way to give stage `number` to one of these ranks, or its first layers to one and its last to another.
    A rank that already has some of these layers, for other blocks, takes them only if they are exactly its stage.
    """
    stage = plan.stages[number]
    held: dict[int, list[PlanStage]] = {}
    for at, kept in enumerate(plan.stages):
        if at != number:
            held.setdefault(kept.rank, []).append(kept)

    @cache
    def takes(rank: int, first: int, end: int) -> bool:
        part = {layer for layer in stage.numbers if first <= layer < end}
        return all(part.isdisjoint(kept.numbers) or part == set(kept.numbers) for kept in held.get(rank, ()))

    for rank in ranks:
        if takes(rank, stage.first, stage.end):
            yield ((stage.first, stage.end, rank),)
    if len(stage.layers) == 1 and plan.routes == "relay":
        for cut in range(stage.first + 1, stage.end):
            first = [rank for rank in ranks if takes(rank, stage.first, cut)]
            last = [rank for rank in ranks if takes(rank, cut, stage.end)]
            yield from (
                ((stage.first, cut, rank), (cut, stage.end, following))
                for rank in first
                for following in last
                if rank != following
            )


def give_stage(plan: Plan, number: int, parts: Sequence[Part]) -> Plan | None:
    """Return the plan with stage `number` given away in these parts; None where a rank would hold a layer twice."""
    stages = list(plan.stages)
    given_stage = stages.pop(number)
    for part in reversed(parts):
        stages.insert(number, _part(given_stage, part))
    for first, end, rank in parts:
        place = next(
            at for at, stage in enumerate(stages) if stage.rank == rank and (stage.first, stage.end) == (first, end)
        )
        for at, stage in enumerate(stages):
            if (
                at != place
                and stage.rank == rank
                and (joined := _joined(stages[place], stage, plan.routes)) is not None
            ):
                stages[min(place, at)] = joined
                del stages[max(place, at)]
                break
    try:
        return dataclasses.replace(plan, stages=tuple(stages))
    except CapslogError:
        return None


def among(plan: Plan, places: Mapping[int, int]) -> Plan:
    """Return the plan with new numbers for the ranks. places: old number -> new number."""
    stages = [dataclasses.replace(stage, ranks=(places[stage.rank],)) for stage in plan.stages]
    return dataclasses.replace(plan, stages=tuple(stages))


def _part(stage: PlanStage, part: Part) -> PlanStage:
    first, end, rank = part
    if (first, end) == (stage.first, stage.end):
        return dataclasses.replace(stage, ranks=(rank,))
    memory = None if stage.memory is None else _within(stage.memory, first, end)
    moments = _within(stage.moments, first, end)
    return dataclasses.replace(stage, layers=((first, end),), ranks=(rank,), memory=memory, moments=moments)


def _within(intervals: Sequence[MemoryInterval], first: int, end: int) -> tuple[MemoryInterval, ...]:
    """Parts of these intervals within the layers [first, end)."""
    return tuple(
        dataclasses.replace(interval, first=max(first, interval.first), end=min(end, interval.end))
        for interval in intervals
        if max(first, interval.first) < min(end, interval.end)
    )


def _joined(stage: PlanStage, joining: PlanStage, routes: str) -> PlanStage | None:
    """Join two stages of one rank: equal layers for more blocks, or adjacent layers for equal blocks; None: neither."""
    if stage.grain != joining.grain or (stage.memory is None) != (joining.memory is None):
        return None
    limits = (stage.in_flight, joining.in_flight)
    in_flight = None if None in limits else max(limit for limit in limits if limit is not None)
    treated = (stage.memory, stage.moments) == (joining.memory, joining.moments)
    if stage.layers == joining.layers and treated and stage.blocks is not None and joining.blocks is not None:
        return dataclasses.replace(stage, blocks=tuple(sorted({*stage.blocks, *joining.blocks})), in_flight=in_flight)
    before, after = (stage, joining) if stage.first < joining.first else (joining, stage)
    single = len(stage.layers) == len(joining.layers) == 1 and routes == "relay"
    if not single or before.end != after.first or stage.blocks != joining.blocks:
        return None
    return dataclasses.replace(
        before,
        layers=((before.first, after.end),),
        memory=None if before.memory is None or after.memory is None else (*before.memory, *after.memory),
        moments=(*before.moments, *after.moments),
        in_flight=in_flight,
    )


# -- the motions after a loss


LINK = 100e6
"""Bytes per second of state transfer where none were measured or configured: a network of 1 Gbit/s."""
SECOND_PAUSE = 0.1
"""Seconds that training pauses for the planned change to the new cuts (`benchmarks/morph/planned`)."""
BESIDE = 1.5
"""Factor by which transfers take longer beside training."""
FOLLOW_STEPS = 3
"""Steps until the new cuts even if nothing moves: for the wish, the preparation and the vote."""
USUAL_GAP = 600.0
"""Assumed seconds between two changes, before a run has a history."""
_PLAYED = 4
"""Most small motions that fit and whose step is simulated, the most promising ones (`_in_order`)."""
_BUILT = 64
"""Most ways to give a stage away that become plans, the most promising ones (`_in_order`)."""


@dataclass(frozen=True)
class Loss:
    """Loss of members, as the founder of the next generation knows it.

    Attributes:
        before, members: layout of the generation that broke, and its members by rank.
        seats: of the remaining members, in the same order. proposed: their plan by `Placer.propose`.
        rate: bytes per second of state transfer; None: not measured.
        step_seconds: measured over the last steps; 0: unknown. gap_seconds: expected until the next change.
        back_seconds: seconds of training since the last checkpoint.
    """

    before: MemberLayout
    members: tuple[Member, ...]
    seats: Sequence[Seat]
    proposed: Plan | None
    rate: float | None = None
    step_seconds: float = 0.0
    gap_seconds: float = USUAL_GAP
    back_seconds: float = 0.0

    @property
    def remaining(self) -> list[Member]:
        """Remaining members."""
        return [seat.member for seat in self.seats]


@dataclass(frozen=True)
class Weighed:
    """Outcome of the choice. plan, copies: for the record; None: new cuts. event_fields: for `events.jsonl`."""

    plan: Plan | None
    copies: Mapping[Member, tuple[int, ...]] | None
    event_fields: dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """Transfers that the first step waits for: layers to owners before its computation, copies before its vote."""

    moves: tuple[Move, ...]
    copies: tuple[Move, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all moves and copies."""
        return sum(move.bytes for move in (*self.moves, *self.copies))

    def seconds(self, rate: float) -> float:
        """Seconds that the busiest member sends or receives: the moves, then the copies."""
        return (_busiest(self.moves) + _busiest(self.copies)) / rate


def _busiest(moves: Sequence[Move]) -> int:
    load: dict[tuple[str, Member | None], int] = {}
    for move in moves:
        for key in (("out", move.source), ("in", move.target)):
            load[key] = load.get(key, 0) + move.bytes
    return max(load.values(), default=0)


def traffic_of(
    before: MemberLayout, after: MemberLayout, members: Sequence[Member], layer_bytes: Sequence[int]
) -> Traffic:
    """Return the transfers between these members, which together hold every layer, from one layout to another."""
    held = {member: [(layer, INITIAL) for layer in before.holds(member)] for member in members}
    boundary = newest_boundary(len(layer_bytes), held, lambda stamp: True, INITIAL)
    moves = list_moves(boundary, {member: after.owned.get(member, ()) for member in members}, layer_bytes)
    first = {layer: member for member in reversed(members) for layer in after.owned.get(member, ())}
    copies = tuple(
        Move(layer, first[layer], member, layer_bytes[layer])
        for member in members
        for layer in after.copied.get(member, ())
        if layer not in before.holds(member)
    )
    return Traffic(moves, copies)


def kept_copies(
    before: MemberLayout, owned: Mapping[Member, Collection[int]], members: Sequence[Member]
) -> dict[Member, tuple[int, ...]]:
    """Return the layers that each of these members held before and does not own now: they stay as copies."""
    kept = {member: tuple(sorted(set(before.holds(member)) - set(owned.get(member, ())))) for member in members}
    return {member: layers for member, layers in kept.items() if layers}


def expected_loss(pause: float, slow: float, ratio: float, second: float, gap: float, back: float = 0.0) -> float:
    """Expected seconds of training lost by `pause`, then `slow` seconds at `ratio` of the full speed, then `second`.

    gap: mean seconds to the next change. back: mean seconds lost as well if that comes before the slow time ends.
    """
    reached = math.exp(-pause / gap)
    slowed = (1 - ratio) * gap * reached * -math.expm1(-slow / gap)
    second *= math.exp(-(pause + slow) / gap)
    return -gap * math.expm1(-pause / gap) + slowed + second - back * math.expm1(-(pause + slow) / gap)


def share_of_sole_holders(layout: MemberLayout, before: MemberLayout, members: Sequence[Member]) -> float:
    """Fraction of these members that alone hold some layer, counting the layers of both layouts."""
    holders: dict[int, set[Member]] = {}
    for member in members:
        for layer in {*before.holds(member), *layout.owned.get(member, ())}:
            holders.setdefault(layer, set()).add(member)
    sole_holders = {member for keepers in holders.values() if len(keepers) == 1 for member in keepers}
    return len(sole_holders) / len(members)


@dataclass(frozen=True)
class _Costed:
    layout: MemberLayout
    traffic: Traffic
    step_seconds: float | None
    lost_seconds: float | None = None

    @property
    def event_fields(self) -> dict[str, Any]:
        moves, copies = (sum(move.bytes for move in row) for row in (self.traffic.moves, self.traffic.copies))
        return {
            "moved_bytes": moves,
            "copied_bytes": copies,
            "step_seconds": self.step_seconds,
            "lost_seconds": self.lost_seconds,
        }


class SmallMotion:
    """Chooses between new cuts and small motions in one run. setting: `elastic.small_motion`."""

    def __init__(self, placer: Placer, setting: str = "auto") -> None:
        self._placer, self._setting = placer, setting
        self._profile = placer.candidates.profile if placer.candidates.timed else None

    def weigh(self, loss: Loss) -> Weighed | None:
        """Choose the way in which the remaining members continue; None where there is no choice."""
        remaining, sizes = loss.remaining, self._placer.layer_bytes
        plan = loss.before.plan
        if self._setting == "never" or plan is None or not remaining or not loss.before.covers(remaining):
            return None
        layout = self._placer(loss.seats, loss.proposed)
        if isinstance(layout, str):
            return None
        rate = loss.rate or self._placer.candidates.link.bandwidth or LINK
        cuts = self._way(loss, layout, None)
        pause = cuts.traffic.seconds(rate)
        if self._setting == "auto" and pause <= SECOND_PAUSE:  # decided without a simulation
            why = f"they move {format_bytes(cuts.traffic.bytes)} in about {pause:.2f} s"
            event_fields = {**cuts.event_fields, "pause_seconds": pause}
            return Weighed(None, None, {"chosen": "new cuts", "why": why, "new_cuts": event_fields})
        scale = 1.0
        if loss.step_seconds and (planned := self._simulated_seconds(plan)):
            scale = loss.step_seconds / planned
        cuts = self._way(loss, layout, self.step_seconds(layout), scale)
        small = self._best_motion(loss, plan, cuts, rate, scale)
        back = share_of_sole_holders(layout, loss.before, remaining) * loss.back_seconds
        lost = expected_loss(pause, 0.0, 1.0, 0.0, loss.gap_seconds, back)
        cuts = dataclasses.replace(cuts, lost_seconds=lost)
        chosen, why = self._choice(cuts, small)
        event_fields = {
            "chosen": "small motion" if chosen else "new cuts",
            "why": why,
            "new_cuts": {**cuts.event_fields, "pause_seconds": pause},
            "bytes_per_second": rate,
            "gap_seconds": loss.gap_seconds,
            "back_seconds": loss.back_seconds,
        }
        if small is not None:
            follow = traffic_of(small.layout, cuts.layout, remaining, sizes)
            event_fields["small_motion"] = {**small.event_fields, "pause_seconds": small.traffic.seconds(rate)}
            event_fields["follow_bytes"] = follow.bytes
        if not chosen or small is None:
            return Weighed(None, None, event_fields)
        return Weighed(small.layout.plan, small.layout.copied, event_fields)

    def step_seconds(self, layout: MemberLayout) -> float | None:
        """Simulated step seconds of a layout's plan at its devices' speeds; None where it cannot be simulated."""
        return None if layout.plan is None else self._simulated_seconds(layout.plan)

    def _choice(self, cuts: _Costed, small: _Costed | None) -> tuple[bool, str]:
        if small is None:
            return False, "no member is known to have room for the lost layers beside its own"
        moved = f"{format_bytes(small.traffic.bytes)} move before the next step, {format_bytes(cuts.traffic.bytes)} for"
        if self._setting == "always":
            return True, f"elastic.small_motion is always; {moved} new cuts"
        if small.lost_seconds is None or cuts.lost_seconds is None:
            return False, "without the seconds of the layers in its profile the run cannot weigh a small motion"
        lost = f"it is expected to lose {small.lost_seconds:.2f} s of training, new cuts {cuts.lost_seconds:.2f} s"
        return small.lost_seconds < cuts.lost_seconds, f"{lost}; {moved} new cuts"

    # -- the small motion ----------------------------------------------------------------------------------------------

    def _best_motion(self, loss: Loss, plan: Plan, cuts: _Costed, rate: float, scale: float) -> _Costed | None:
        """Small motion with the least expected loss of those that fit the devices; None where none fits."""
        candidates: list[_Costed] = []
        for handed_out in self._handed_out(loss, plan, cuts, rate, scale):
            owned = MemberLayout.of_plan(handed_out, loss.remaining, {}).owned
            copies = kept_copies(loss.before, owned, loss.remaining)
            fitting = self._fitting(handed_out, loss.seats, copies)
            if fitting is None:
                continue
            layout = MemberLayout.of_plan(fitting, loss.remaining, copies)
            way = self._way(loss, layout, fitting.step_seconds, scale)
            candidates.append(self._with_lost_seconds(loss, way, cuts, rate))
            if len(candidates) >= _PLAYED:
                break
        order = enumerate(candidates)
        key = lambda entry: (entry[1].lost_seconds or 0.0, entry[1].traffic.bytes, entry[0])  # noqa: E731
        return min(order, key=key)[1] if candidates else None

    def _with_lost_seconds(self, loss: Loss, way: _Costed, cuts: _Costed, rate: float) -> _Costed:
        if way.step_seconds is None or cuts.step_seconds is None:
            return way
        follow = traffic_of(way.layout, cuts.layout, loss.remaining, self._placer.layer_bytes)
        slow = BESIDE * follow.seconds(rate) + FOLLOW_STEPS * way.step_seconds
        ratio, pause = cuts.step_seconds / way.step_seconds, way.traffic.seconds(rate)
        back = share_of_sole_holders(way.layout, loss.before, loss.remaining) * loss.back_seconds
        lost = expected_loss(pause, slow, ratio, SECOND_PAUSE, loss.gap_seconds, back)
        return dataclasses.replace(way, lost_seconds=lost)

    def _handed_out(self, loss: Loss, plan: Plan, cuts: _Costed, rate: float, scale: float) -> Iterator[Plan]:
        """Yield plans in which the remaining members train the lost members' stages, the most promising first."""
        members, remaining = loss.members, set(loss.remaining)
        places = {rank: loss.remaining.index(member) for rank, member in enumerate(members) if member in remaining}
        bare_plan = bare(plan)
        if bare_plan is None:
            return
        lost = sum(stage.rank not in places for stage in bare_plan.stages)
        if not lost:  # the lost members kept copies only
            yield among(bare_plan, places)
        holds = {rank: frozenset(loss.before.holds(members[rank])) for rank in places}
        for turn in range(lost):
            lost_numbers = [number for number, stage in enumerate(bare_plan.stages) if stage.rank not in places]
            number = max((self._work(bare_plan, bare_plan.stages[at]), -at, at) for at in lost_numbers)[2]
            ways = self._in_order(bare_plan, number, holds, cuts, rate, scale)
            plans = filter(None, map(partial(give_stage, bare_plan, number), ways[:_BUILT]))
            if turn == lost - 1:
                yield from (among(handed_out, places) for handed_out in plans)
            elif (bare_plan := next(plans, None)) is None:
                return

    def _in_order(
        self,
        plan: Plan,
        number: int,
        holds: Mapping[int, frozenset[int]],
        cuts: _Costed,
        rate: float,
        scale: float,
    ) -> list[tuple[Part, ...]]:
        """Return the ways to give a stage away: first the one that moves fewest bytes, then by estimated loss."""
        sizes, stage = self._placer.layer_bytes, plan.stages[number]
        busy = dict.fromkeys(holds, 0.0)
        for planned in plan.stages:
            if planned.rank in busy:
                busy[planned.rank] += self._work(plan, planned)
        follow, busiest = BESIDE * cuts.traffic.seconds(rate), max(busy.values())
        work: dict[tuple[int, int], float] = {}
        coming: dict[Part, int] = {}

        def weight(parts: tuple[Part, ...]) -> tuple[float, int, float]:
            moved, longest, largest = 0, busiest, 0
            for part in parts:
                if part not in coming:
                    first, end, rank_of = part
                    layers = [layer for layer in stage.numbers if first <= layer < end]
                    coming[part] = sum(sizes[layer] for layer in layers if layer not in holds[rank_of])
                    if (first, end) not in work:
                        work[first, end] = self._work(plan, stage, layers)
                moved += coming[part]
                largest = max(largest, coming[part])
                longest = max(longest, busy[part[2]] + work[part[:2]])
            if self._profile is None or cuts.step_seconds is None:
                return float(moved), moved, longest
            slower = 1 - min(1.0, cuts.step_seconds / (scale * longest)) if longest else 0.0
            return largest / rate + slower * follow, moved, longest

        ways = [(weight(parts), parts) for parts in ways_to_give(plan, number, list(holds))]
        if not ways:
            return []
        fewest = min(ways, key=lambda entry: entry[0][1:])[1]
        ordered = [parts for _, parts in sorted(ways, key=lambda entry: entry[0])]
        return [fewest, *(parts for parts in ordered if parts != fewest)]

    def _work(self, plan: Plan, stage: PlanStage, layers: Sequence[int] | None = None) -> float:
        """Seconds of a stage, or of some of its layers, in a step; without a profile the bytes of the layers."""
        layers = stage.numbers if layers is None else layers
        if self._profile is None:
            return float(sum(self._placer.layer_bytes[layer] for layer in layers))
        run, rows = self._placer.candidates.run, [self._profile.layers[layer] for layer in layers]
        reruns = stage.recomputes(run) and stage.end < plan.num_layers  # at the last stage backwards follow at once
        units = len(stage.blocks) * plan.units.of_block if stage.blocks is not None else plan.units.per_step or 1
        unit_seconds = sum((row.forward_seconds or 0.0) * (1 + reruns) + (row.backward_seconds or 0.0) for row in rows)
        return units * unit_seconds

    # -- cost of a layout ----------------------------------------------------------------------------------------------

    def _way(self, loss: Loss, layout: MemberLayout, seconds: float | None, scale: float = 1.0) -> _Costed:
        traffic = traffic_of(loss.before, layout, loss.remaining, self._placer.layer_bytes)
        return _Costed(layout, traffic, None if seconds is None else scale * seconds)

    def _simulated_seconds(self, plan: Plan) -> float | None:
        """Simulated seconds of a step; None where it cannot be simulated."""
        if self._profile is None:
            return None
        candidates = self._placer.candidates
        ranks = tuple(PlanRank(speed=plan.speed_of(rank)) for rank in range(plan.num_ranks))
        timed_plan = dataclasses.replace(plan, ranks=ranks, fits=None, shortfall=None, profile_digest=None)
        try:
            run = candidates.run
            return play(self._profile, timed_plan, None, None, run.recompute, run, candidates.link).step_seconds
        except CapslogError:
            return None

    def _fitting(self, plan: Plan, seats: Sequence[Seat], copies: Mapping[Member, tuple[int, ...]]) -> Plan | None:
        """Plan with the bytes of its ranks, if each device has room for them, snapshots and these copies; else None."""
        placer, speeds = self._placer, [None if seat.speed == 1.0 else seat.speed for seat in seats]
        timed_plan = plan
        if any(speeds):
            timed_plan = dataclasses.replace(plan, ranks=tuple(PlanRank(speed=speed) for speed in speeds))
        seconds = self._simulated_seconds(timed_plan)
        if self._profile is not None and seconds is None:
            return None
        timed_plan = dataclasses.replace(timed_plan, step_seconds=seconds)
        candidates, profile = placer.candidates, placer.candidates.profile
        if not candidates.described or profile is None or not any(seat.capacity for seat in seats):
            return timed_plan
        headroom = Headroom.of(profile)
        limits: list[PlanRank] = []
        for seat, speed in zip(seats, speeds, strict=True):
            copied_bytes = sum(placer.copy_bytes[layer] for layer in copies.get(seat.member, ()))
            room = headroom.usable(seat.capacity or NO_LIMIT) - copied_bytes
            limits.append(PlanRank(capacity_bytes=max(1, headroom.device(max(0, room))), speed=speed))
        held = with_beside(profile, candidates.beside or [0] * profile.num_layers)
        tight = judge_by_fold(held, dataclasses.replace(plan, ranks=tuple(limits)), candidates.run, tier=placer.tier)
        if not tight.fits:
            return None
        pairs = zip(seats, speeds, strict=True)
        devices = tuple(PlanRank(capacity_bytes=seat.capacity or None, speed=speed) for seat, speed in pairs)
        verdict = judge_by_fold(profile, dataclasses.replace(plan, ranks=devices), candidates.run, tier=placer.tier)
        return dataclasses.replace(verdict, step_seconds=seconds)
