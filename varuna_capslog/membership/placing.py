"""Layout of the remaining members, with the layers that each trains and copies: `recovery.Place` for the engine.

All participants of a generation call it with the same seats and must get the same layout, so nothing here depends on
the clock, on chance or on earlier calls. `layout_candidates` compares pipelines, `redundancy` places copies. No torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config, Elastic
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.layout_candidates import TICK, Budgeted, Candidate, LayoutCandidates, neighbours
from varuna_capslog.membership.recovery import Seat, speeds_of
from varuna_capslog.membership.redundancy import Copies, Reserve, place_copies, reserves
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners import BUDGET, JOINT
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet_of_run
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.cuts import with_limits
from varuna_capslog.planning.playing import SAME
from varuna_capslog.planning.verdict import (
    HostMemory,
    MemoryVerdict,
    judge,
    judge_ranks,
)
from varuna_capslog.plans.parts import PlanRank, Units
from varuna_capslog.plans.plan import Plan, pipelines_of, plan_of_pipelines
from varuna_capslog.profiles.conditions import kept_copies
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Edge, RunShape

__all__ = ["Choice", "Fleets", "Placer", "RunProtection", "describe_reserves", "state_bytes"]

# -- Joint plans for the members of a run: pipelines may differ in length, so that every device can be used.
#
# Searched at every change where `pipeline.planner` is `joint` or `budget`; where there is no such plan, equal pipelines
# are used. Pure; no torch.


class Fleets:
    """Joint plans by capacities and speeds of the devices, cached. They have room for the snapshots."""

    def __init__(self, candidates: LayoutCandidates) -> None:
        self._candidates = candidates
        self.plan = functools.cache(self._plan)

    @classmethod
    def of(cls, candidates: LayoutCandidates) -> Fleets | None:
        """Return the joint plans of a run; None where it has another planner, or the profile lacks seconds or bytes."""
        is_ours = candidates.planner in (BUDGET, JOINT) and candidates.described and candidates.timed
        return cls(candidates) if is_ours else None

    def _plan(self, kinds: tuple[tuple[int, float], ...]) -> Plan | None:
        """Plan for devices of (bytes, speed), by rank; 0 bytes: no limit known. None where nothing fits."""
        ours = self._candidates
        assert ours.profile is not None
        devices = [Device(size or None, speed) for size, speed in kinds]
        fleet = best_fleet_of_run(ours.profile, devices, ours.run, ours.memory, ours.link, ours.beside)
        return fleet.plan if isinstance(fleet, JointPlan) else None

    def prepare(self, devices: int, capacity: int) -> None:
        """Plan for up to `devices` devices of this capacity, while no member waits for them."""
        for count in range(1, devices + 1):
            self.plan(((capacity, 1.0),) * count)


# -- A layout in the form that the placement of copies needs: ways through the stages, and bytes of the ranks.
#
# A `Candidate` of equal pipelines and a plan of any stages both become a `Choice`. Pure; no torch.


Way = list[tuple[int, tuple[int, ...]]]
"""The stages that serve one block, in the order of the chain: rank and layers of each."""


@dataclass(frozen=True)
class Choice:
    """Ways and bytes of a layout, by rank. ways: every way through the stages once.

    rank_bytes: on each rank's device, with snapshots, 0 for a rank without stages; None: not known.
    links: (rank, rank that reads its outputs) under direct routes; None: each stage of a way sends to the next.
    """

    ways: list[Way]
    rank_bytes: tuple[int, ...] | None
    links: frozenset[Edge] | None = None

    @classmethod
    def of_candidate(cls, candidate: Candidate, num_layers: int) -> Choice:
        """Return the choice of equal pipelines; their ranks follow each other."""
        stages, ends = len(candidate.cuts), [*candidate.cuts[1:], num_layers]
        layers = [tuple(range(first, end)) for first, end in zip(candidate.cuts, ends, strict=True)]
        ways = [
            [(replica * stages + stage, layers[stage]) for stage in range(stages)]
            for replica in range(candidate.replicas)
        ]
        return cls(ways, None if candidate.stage_bytes is None else candidate.stage_bytes * candidate.replicas)

    @classmethod
    def of_plan(cls, plan: Plan, beside: Sequence[int], one_memory: bool = False, edges: Iterable[Edge] = ()) -> Choice:
        """Return the choice of a plan of any stages, with the bytes that the plan predicts.

        beside: bytes per layer of a rank, on the device beside training. edges: of the chain's graph, which direct
        routes follow. one_memory: the host tier is the device's own memory.
        """
        layers = [tuple(stage.numbers) for stage in plan.stages]
        ranks = plan.placement()
        ways = [[(ranks[number], layers[number]) for number in path] for path in plan.paths()]
        held: list[int] = []
        for rank in range(plan.num_ranks):
            numbers = [number for number, at in enumerate(ranks) if at == rank]
            sizes = [plan.stages[number].bytes for number in numbers]
            if plan.ranks and (rank_bytes := plan.ranks[rank].bytes) is not None:
                sizes = [rank_bytes + ((plan.ranks[rank].host_bytes or 0) if one_memory else 0)]
            known_sizes = [size for size in sizes if size is not None]
            if len(known_sizes) == len(sizes):
                held.append(sum(known_sizes) + sum(beside[layer] for number in numbers for layer in layers[number]))
        links = None
        if plan.routes == "direct":
            links = frozenset((ranks[writer], ranks[reader]) for writer, reader in plan.stage_graph(edges).edges)
        return cls(ways, tuple(held) if len(held) == plan.num_ranks else None, links)

    def of_members(
        self, members: Sequence[Member]
    ) -> tuple[list[list[tuple[Member, Sequence[int]]]], list[tuple[Member, Member]] | None]:
        """Return `ways` and `links` with members in place of ranks."""
        ways: list[list[tuple[Member, Sequence[int]]]] = [
            [(members[rank], layers) for rank, layers in way] for way in self.ways
        ]
        links = None if self.links is None else [(members[writer], members[reader]) for writer, reader in self.links]
        return ways, links

    @property
    def used(self) -> set[int]:
        """Ranks with stages."""
        return {rank for way in self.ways for rank, _ in way}

    def fits(self, usable: Sequence[int]) -> bool:
        """True where each rank fits the bytes that its device can use, or where no bytes are known."""
        return self.rank_bytes is None or all(
            held <= limit for held, limit in zip(self.rank_bytes, usable, strict=False)
        )


# -- the layout of the remaining members


_Weighed = tuple[int, float, Plan]
"""(required host losses from which a plan's copies do not protect, seconds of its step, the plan)."""
_ROUNDS = 3
"""Most searches for a plan that leaves room for the copies of its own stages."""


class Placer:
    """Places layers and copies on any number of devices.

    Seats are the ranks of a plan, in order. With planner `joint` its plan is used where there is one. With `budget` one
    member proposes a plan (`propose`), and all use that of the record. Otherwise the quickest of `LayoutCandidates`
    that fits is used; without seconds, one pipeline of as many stages as possible. In equal pipelines, device d of
    replica r is seat `r * devices + d`; the remaining seats are idle and may keep copies.

    Args:
        candidates: every possible pipeline; its `beside` counts the snapshots.
        elastic: settings of protection, and the least number of devices. Layouts with room for copies are preferred.
        gradient_bytes: per layer, as sent; default, as for AdamW's state, a third of the layer's state.
        run_plan: the run's plan, of any stages; used for exactly its number of devices, where it fits them.
        tier: memory in which the host tier lies.
        edges: of the chain's graph, by which members are neighbours under direct routes.
        budgeted: plans of planner `budget`; None: the run has another planner.

    Attributes:
        proposes: two machines might compute different plans, so one member proposes them.
        copy_bytes: of each layer's copy: two boundaries, and the gradients that wait for the vote.
    """

    def __init__(
        self,
        candidates: LayoutCandidates,
        elastic: Elastic,
        gradient_bytes: Sequence[int] | None = None,
        run_plan: Plan | None = None,
        tier: HostMemory | None = None,
        edges: Sequence[Edge] = (),
        budgeted: Budgeted | None = None,
    ) -> None:
        self.tier, self._edges = tier or HostMemory(), edges
        self.candidates, self.elastic, self.sync = candidates, elastic, elastic.protection == "sync"
        self.layer_bytes = tuple(candidates.layer_bytes)
        self.gradient_bytes = tuple(gradient_bytes or (-(-size // 3) for size in self.layer_bytes))
        self._run_plan = None if run_plan is None else (run_plan, self._choice_of(run_plan))
        self._fleets = Fleets.of(candidates)
        self.budgeted = budgeted
        self.proposes = self._fleets is not None or budgeted is not None
        self.copy_bytes = [
            2 * state + (gradient if self.sync else 0)
            for state, gradient in zip(self.layer_bytes, self.gradient_bytes, strict=True)
        ]

    @classmethod
    def of_config(
        cls,
        config: Config,
        profile: Profile | None,
        layer_bytes: Sequence[int],
        gradient_bytes: Sequence[int] | None = None,
        plan: Plan | None = None,
        edges: Sequence[Edge] = (),
    ) -> Placer:
        """Return the placer of a run. A short `plan` is the plan of one of the config's replicas. Raises CapslogError
        as `LayoutCandidates`.
        """
        pipeline = config.pipeline
        shape, sizes, link = RunShape.of_config(config), tuple(layer_bytes), Link.of_config(config)
        run, tier = shape.settled(), HostMemory.of_config(config)
        candidates = LayoutCandidates(profile, sizes, run, pipeline.planner, pipeline.memory, beside=sizes, link=link)
        budgeted = Budgeted.of(candidates, shape, tier, link, pipeline.search_seconds)
        if plan is not None and plan.short:
            one_each = len(plan.stages) == pipeline.devices
            plan = _of_pipelines(candidates, plan.cut_list, pipeline.replicas) if one_each else None
        return cls(candidates, config.elastic, gradient_bytes, plan, tier, edges, budgeted)

    def __call__(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """Return the owners and copies of the layers, or a sentence on what the run waits for.

        plan: that of the record; None: the seats alone decide. Raises CapslogError if the plan is for another run.
        """
        if not seats:
            return "no device is left; waiting for one"
        if len(seats) < self.elastic.min_devices:
            lacking_devices = self.elastic.min_devices - len(seats)
            return (
                f"{len(seats)} device(s) are left, but elastic.min_devices is {self.elastic.min_devices}; waiting for "
                f"{lacking_devices} more"
            )
        limits = _Limits(seats, self.candidates)
        if plan is not None:
            self._check(plan)
            return self._layout(plan, self._choice_of(plan), seats, limits)
        run_plan, choice = self._run_plan_for(seats, limits)
        if run_plan is not None and choice is not None:
            return self._layout(run_plan, choice, seats, limits)
        least, lost = self._protection(seats, limits)
        kinds = tuple((seat.capacity, seat.speed) for seat in seats)
        # with planner `budget` joint plans are compared in `propose`
        joint = None if self._fleets is None or self.budgeted is not None else self._fleets.plan(kinds)
        shared = None if joint is None else self._choice_of(joint)
        if joint is not None and shared is not None and lost(shared) <= least:
            return self._layout(joint, shared, seats, limits)
        size = len(self.layer_bytes)
        candidate = self.candidates.quickest(
            len(seats),
            limits.usable,
            limits.speeds,
            rank=lambda candidate: lost(Choice.of_candidate(candidate, size)),
            best_rank=least,
        )
        if joint is not None and shared is not None:
            protected = candidate is not None and lost(Choice.of_candidate(candidate, size)) < lost(shared)
            if not protected:
                return self._layout(joint, shared, seats, limits)
        if candidate is None:
            return self._waiting(seats, limits)
        plan = self.pipelines(candidate.cuts, candidate.replicas)
        if words := self._lack_sentence(plan, seats):
            return f"the job fits {len(seats)} device(s) in no way that was found ({words}); waiting for more"
        return self._layout(plan, Choice.of_candidate(candidate, size), seats, limits)

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        """Return the plan for the record of a generation; None where every member computes the same plan. Joint plans
        are always proposed: their search adds and compares times, which two machines may round differently.
        """
        speeds, plan = speeds_of(seats), None
        if self.budgeted is not None:
            plan = self._proposed(seats) if len(seats) >= max(1, self.elastic.min_devices) else None
        elif self._fleets is not None or speeds:
            layout = self(seats)
            plan = layout.plan if isinstance(layout, MemberLayout) else None
        if plan is None or plan.ranks or not speeds:
            return plan
        return dataclasses.replace(plan, ranks=tuple(PlanRank(speed=speed) for speed in speeds[: plan.num_ranks]))

    def _run_plan_for(self, seats: Sequence[Seat], limits: _Limits) -> tuple[Plan, Choice] | tuple[None, None]:
        """Return the run's plan and its choice, if it is for this number of devices of equal speed and fits them."""
        run_plan, choice = self._run_plan or (None, None)
        fits = run_plan is not None and run_plan.num_ranks == len(seats) and not speeds_of(seats)
        if run_plan is None or choice is None or not fits or not limits.allow(choice):
            return None, None
        return run_plan, choice

    def _protection(self, seats: Sequence[Seat], limits: _Limits) -> tuple[int, Callable[[Choice], int]]:
        """Return how many of the required host losses no placement covers, for lack of hosts, and a function: how many
        of them the copies of a choice, as far as they have room, do not cover.
        """
        least = max(0, self.elastic.redundancy - (len({seat.host for seat in seats}) - 1))

        def lost(choice: Choice) -> int:
            if not limits.any:
                return least
            return self.elastic.redundancy - self._place_copies(choice, seats, limits).survives

        return least, lost

    # -- before a run

    def pipelines(self, cuts: Sequence[int], replicas: int) -> Plan:
        """Return the plan of equal pipelines with these cuts."""
        return _of_pipelines(self.candidates, cuts, replicas)

    def cuts(self, seats: Sequence[Seat], replicas: int, stages: int) -> list[int]:
        """Return the planner's cuts for equal pipelines on these seats, with room for the snapshots."""
        usable = _Limits(seats, self.candidates).usable(replicas, stages)
        return list(self.candidates.candidate(replicas, stages, usable).cuts)

    # -- planner budget

    def _proposed(self, seats: Sequence[Seat]) -> Plan | None:
        """Return the run's plan, else the quickest of the plans whose copies protect best; None where none fits."""
        assert self.budgeted is not None
        limits = _Limits(seats, self.candidates)
        run_plan, _ = self._run_plan_for(seats, limits)
        if run_plan is not None:
            return run_plan
        least, lost = self._protection(seats, limits)
        size = len(self.layer_bytes)

        def loss(candidate: Candidate) -> int:
            return lost(Choice.of_candidate(candidate, size))

        best: _Weighed | None = None
        for replicas in self.budgeted.replicas(len(seats)):
            bound_of = self.budgeted.least_seconds
            if best is not None and best[0] <= least and best[1] <= bound_of(len(seats), replicas) * (1 + SAME):
                break
            plan = self.budget_plan(seats, replicas)
            if plan.fits and plan.step_seconds is not None:
                weight = lost(self._choice_of(plan)), plan.step_seconds
                if best is None or weight < best[:2]:
                    best = *weight, plan
        best = self._or_joint(seats, lost, best)
        equal = self.candidates.quickest(len(seats), limits.usable, limits.speeds, rank=loss, best_rank=least)
        if equal is None or self._lack_sentence(pipelines := self.pipelines(equal.cuts, equal.replicas), seats):
            return None if best is None else best[2]
        seconds = (equal.step_ticks or 0) * TICK
        if best is not None and best[:2] <= (loss(equal), seconds):
            return best[2]
        return dataclasses.replace(pipelines, step_seconds=seconds)

    def _or_joint(self, seats: Sequence[Seat], lost: Callable[[Choice], int], best: _Weighed | None) -> _Weighed | None:
        """Return the best plan so far, or a joint plan where that is better."""
        if self._fleets is None or self.budgeted is None:
            return best
        joint = self._fleets.plan(tuple((seat.capacity, seat.speed) for seat in seats))
        if joint is None or self._lack_sentence(joint, seats) is not None:
            return best
        if (seconds := self.budgeted.step_seconds(joint)) is None:
            return best
        weight = lost(self._choice_of(joint)), seconds
        if best is not None and best[:2] <= weight:
            return best
        return *weight, dataclasses.replace(joint, step_seconds=seconds)

    def _lack_sentence(self, plan: Plan, seats: Sequence[Seat]) -> str | None:
        """Sentence on what a plan lacks in `budget`'s simulation; None where it fits, or the planner is another."""
        return None if self.budgeted is None else self.budgeted.lack_sentence(plan, [seat.capacity for seat in seats])

    def budget_plan(self, seats: Sequence[Seat], replicas: int = 1) -> Plan:
        """Return `budget`'s plan, with room for copies if possible; `fits` is False if none fits with snapshots."""
        assert self.budgeted is not None
        limits = _Limits(seats, self.candidates)
        first, copies = self.budgeted.plan(seats, replicas=replicas), [0] * len(seats)
        plan = first
        for _ in range(_ROUNDS):
            if not plan.fits:
                return first
            layout = self._layout(plan, choice := self._choice_of(plan), seats, limits)
            wanted = self._place_copies(choice, seats, None).kept
            if not limits.any or sum(map(len, layout.copied.values())) >= sum(map(len, wanted.values())):
                return plan
            before, copies = copies, [sum(self.copy_bytes[n] for n in wanted.get(seat.member, ())) for seat in seats]
            if before == copies:
                break
            plan = self.budgeted.plan(seats, copies, replicas)
        return first

    def look_ahead(self, seats: Sequence[Seat]) -> Iterator[list[Any]]:
        """Search plans for likely next seats, and yield the new plans for `learn` of other members."""
        if self.budgeted is not None:
            for following in neighbours(seats, self.elastic.min_devices):
                self._proposed(following)
                yield self.budgeted.taken()

    def learn(self, entries: Sequence[Any]) -> None:
        """Add plans from another member's `look_ahead`. Raises CapslogError for an invalid plan."""
        if self.budgeted is not None:
            self.budgeted.learn(entries)

    def prepare(self, devices: int, capacity: int = 0) -> None:
        """Compute the layouts of up to `devices` devices of this capacity (0: no limit), while no member waits."""
        self.candidates.prepare(devices)
        if self.budgeted is not None:
            self.budgeted.prepare(devices)
        if self._fleets is not None:
            self._fleets.prepare(devices, capacity)

    def weighed(self, plan: Plan, seats: Sequence[Seat]) -> tuple[MemberLayout, tuple[int, ...] | None]:
        """Return a plan's layout, and the bytes of each rank with snapshots; None: not known."""
        choice = self._choice_of(plan)
        return self._layout(plan, choice, seats, _Limits(seats, self.candidates)), choice.rank_bytes

    def needed(self, plan: Plan) -> list[int] | None:
        """Bytes that each rank's device needs, with snapshots and headroom; None: not known."""
        sizes = self._choice_of(plan).rank_bytes
        return None if sizes is None else [self.candidates.headroom.device(size) for size in sizes]

    def _layout(self, plan: Plan, choice: Choice, seats: Sequence[Seat], limits: _Limits) -> MemberLayout:
        copies = self._place_copies(choice, seats, limits)
        return MemberLayout.of_plan(plan, [seat.member for seat in seats], dict(copies.kept), copies.problem)

    def _choice_of(self, plan: Plan) -> Choice:
        """Choice of a plan: for equal pipelines with the bytes of a candidate, else with the plan's own bytes."""
        if (alike := pipelines_of(plan)) is not None:
            return Choice.of_candidate(self.candidates.of_cuts(alike[1], alike[0]), plan.num_layers)
        profile = self.candidates.profile
        one_memory = profile is not None and self.tier.is_device(profile)
        return Choice.of_plan(plan, self.candidates.beside or [0] * plan.num_layers, one_memory, self._edges)

    def _check(self, plan: Plan) -> None:
        """Raise CapslogError unless a plan from the store's log is for this run."""
        run = self.candidates.run
        ours = {"num_layers": len(self.layer_bytes), "units.per_step": run.num_microbatches}
        theirs = {"num_layers": plan.num_layers, "units.per_step": plan.units.per_step}
        ours["units.blocks"], theirs["units.blocks"] = run.num_blocks, plan.units.blocks
        for name, value in theirs.items():
            if value != ours[name]:
                raise CapslogError(
                    f"the plan in the store's log has {name} {value}, but this run has {ours[name]}; the store belongs "
                    "to another run or version"
                )

    # -- copies

    def _place_copies(self, choice: Choice, seats: Sequence[Seat], limits: _Limits | None) -> Copies:
        """Place the copies. limits: bytes of the devices; None: room for all copies."""
        ways, links = choice.of_members([seat.member for seat in seats])
        used = choice.used
        spare = [seat.member for rank, seat in enumerate(seats) if rank not in used]
        hosts = {seat.member: seat.host for seat in seats}
        room = None
        if limits is not None and limits.any and choice.rank_bytes is not None:
            held = [*choice.rank_bytes, *[0] * (len(seats) - len(choice.rank_bytes))]
            free = [max(0, usable - taken) for usable, taken in zip(limits.of_rank, held, strict=True)]
            room = {seat.member: size for seat, size in zip(seats, free, strict=True)}
        return place_copies(ways, hosts, self.elastic.redundancy, self.copy_bytes, spare, room, links)

    # -- what is lacking

    def _waiting(self, seats: Sequence[Seat], limits: _Limits) -> str:
        """Sentence on the stage that does not fit its device, by how much, and what would be enough."""
        stages = min(len(seats), len(self.layer_bytes))
        usable = limits.usable(1, stages)
        candidate = self.candidates.candidate(1, stages, usable)
        capacities = [seat.capacity or NEVER for seat in seats[:stages]]  # an unknown capacity limits nothing
        verdict = judge(candidate.stage_bytes, capacities, self.candidates.headroom)
        assert verdict is not None
        stage = verdict.worst
        seat, end = seats[stage], [*candidate.cuts[1:], len(self.layer_bytes)][stage]
        smallest = min(seat.capacity for seat in seats if seat.capacity)
        fewest = self.candidates.fewest_devices(smallest)
        if fewest is None:
            wanted = f"devices of more than {format_bytes(smallest)}, since no number of these holds the layers"
        elif fewest > len(seats):
            wanted = f"{fewest - len(seats)} more of {format_bytes(smallest)}"
        else:
            wanted = "other devices, since the planner's cuts do not fit these"
        return (
            f"the job does not fit {len(seats)} device(s): layers {candidate.cuts[stage]} to {end - 1} need "
            f"{format_bytes(verdict.needed[stage])} of the {format_bytes(seat.capacity)} of {seat.member} on "
            f"{seat.host}, {format_bytes(verdict.lacking)} too much; waiting for {wanted}"
        )


class _Limits:
    """Usable bytes and speeds of the seats' devices, by rank, and by stage of a candidate."""

    def __init__(self, seats: Sequence[Seat], candidates: LayoutCandidates) -> None:
        usable = candidates.headroom.usable
        self._speeds = speeds_of(seats)
        # An unknown capacity limits nothing.
        self.of_rank = [usable(seat.capacity) if seat.capacity else NEVER - 1 for seat in seats]
        self.any = candidates.described and any(seat.capacity for seat in seats)

    def allow(self, choice: Choice) -> bool:
        """True where every rank fits the bytes that its device can use, or no capacity is known."""
        return not self.any or choice.fits(self.of_rank)

    def usable(self, replicas: int, stages: int) -> list[int] | None:
        """Usable bytes of each stage's smallest device, over all replicas; None where no capacity is known."""
        if not self.any:
            return None
        return [min(self.of_rank[device : replicas * stages : stages]) for device in range(stages)]

    def speeds(self, replicas: int, stages: int) -> tuple[float, ...] | None:
        """Speed of each stage's slowest device, over all replicas; None where all speeds are equal."""
        if self._speeds is None:
            return None
        return tuple(min(self._speeds[device : replicas * stages : stages]) for device in range(stages))


def _of_pipelines(candidates: LayoutCandidates, cuts: Sequence[int], replicas: int) -> Plan:
    """Plan of a run's equal pipelines, with its stages' in-flight limits where the schedule takes them from seconds."""
    run, profile = candidates.run, candidates.profile
    units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
    plan = plan_of_pipelines(len(candidates.layer_bytes), cuts, replicas, units, run.schedule)
    if not run.limits_by_plan or profile is None or not candidates.timed:
        return plan
    return with_limits(profile, plan, run, candidates.link)


# -- Device bytes that protection takes, before a run: in a plan's notes, in its verdict and in the cuts. No torch.


def state_bytes(profile: Profile) -> tuple[list[int], list[int]] | None:
    """Return state and gradient bytes of each layer from a profile; None where it lacks them. Static bytes are the
    state and the gradient. Beyond the parameters they are the gradient and the optimizer's tensors of equal size: with
    AdamW, which has two, the gradient is a third of them.
    """
    states, gradients, parts = [], [], 1 + sum(kept_copies(profile.conditions))
    for layer in profile.layers:
        if layer.static_bytes is None or layer.parameter_bytes is None:
            return None
        gradient = int(max(0, layer.static_bytes - layer.parameter_bytes) // parts)
        states.append(layer.static_bytes - gradient)
        gradients.append(gradient)
    return states, gradients


def describe_reserves(reserve_of: Mapping[Member, Reserve]) -> str:
    """Sentence on the bytes that protection takes: on the rank with most of them, and on all ranks together."""
    largest_reserve = max(reserve_of.values(), key=sum)
    parts = [f"{format_bytes(largest_reserve.snapshot)} for its own layers at the last boundary"]
    if largest_reserve.copies:
        parts.append(f"{format_bytes(largest_reserve.copies)} for copies of others'")
    if largest_reserve.updates:
        parts.append(f"{format_bytes(largest_reserve.updates)} for their gradients")
    total = sum(map(sum, reserve_of.values()))
    return (
        f"protection takes up to {format_bytes(sum(largest_reserve))} of a rank's memory on the device beside training "
        f"({', '.join(parts)}), {format_bytes(total)} over {len(reserve_of)} rank(s)"
    )


@dataclass(frozen=True)
class RunProtection:
    """Protection before a run, on equal hosts; a `planning.solve.Protection`. Raises CapslogError as `Placer`."""

    config: Config
    profile: Profile

    @property
    def beside(self) -> tuple[int, ...]:
        """Bytes of each layer's snapshot; empty where they are not known."""
        sizes = state_bytes(self.profile)
        return () if sizes is None else tuple(sizes[0])

    def plan(self, capacities: Sequence[int] | None) -> Plan | None:
        """Return the plan that a member would propose with planner `budget`, with room for protection; else None."""
        pipeline, sizes = self.config.pipeline, state_bytes(self.profile)
        if sizes is None:
            return None
        placer = Placer.of_config(self.config, self.profile, *sizes, edges=self.profile.known_edges or ())
        if placer.budgeted is None:
            return None
        limits = [0] * pipeline.devices if capacities is None else capacities
        limit_of_rank = enumerate([*limits] * pipeline.replicas)
        seats = [Seat(f"rank {rank}", f"host {rank}", size) for rank, size in limit_of_rank]
        return placer.propose(seats) or placer.budget_plan(seats, pipeline.replicas)

    def reserve(self, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
        """Return a plan with protection in its notes, and the bytes of each stage's snapshot.

        Snapshots and copies lie on the device beside training; every rank counts as a host. Where the plan fits only
        without snapshots, a short plan is cut anew with them, unless the config fixes the cuts; otherwise the plan does
        not fit. Copies without room are reported, not refused: the run trains without that protection.

        Args:
            plan: of any form, with the bytes of its ranks. A short plan is that of one of the config's replicas.
            find: see `planning.solve.Protection`.
        """
        return _with_reserves(self.config, self.profile, plan, find)


def _with_reserves(config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
    pipeline, replicas = config.pipeline, config.pipeline.replicas
    sizes = state_bytes(profile)
    if sizes is None:
        note = "what protection takes is unknown: the profile has no static_bytes or parameter_bytes; profile again"
        Placer.of_config(config, profile, [0] * profile.num_layers)
        return dataclasses.replace(plan, notes=(*plan.notes, note)), [0] * len(plan.stages)
    edges = profile.known_edges or ()
    placer, width = Placer.of_config(config, profile, *sizes, edges=edges), plan.num_ranks
    limits = [rank.capacity_bytes or 0 for rank in plan.ranks] or [0] * width
    seats = [Seat(f"rank {rank}", f"host {rank}", limits[rank % width]) for rank in range(config.world_size)]

    def placed(plan: Plan) -> tuple[MemberLayout, MemoryVerdict | None]:
        """Return the layout with its copies, and the verdict on its ranks with snapshots; None: bytes not known."""
        full = placer.pipelines(plan.cut_list, replicas) if plan.short else plan
        layout, held = placer.weighed(full, seats)
        verdict = None if held is None else judge_ranks(plan, held[:width], Headroom.of(profile))
        return layout, verdict and dataclasses.replace(verdict, of="stage" if plan.short else "rank")

    lack_note, (layout, verdict) = "", placed(plan)
    if plan.fits and verdict is not None and not verdict.fits:
        anew = None
        if plan.short and pipeline.cuts is None and pipeline.plan is None:
            anew = find(capacity=pipeline.capacity, cuts=placer.cuts(seats, replicas, width))
        if anew is not None and (moved := placed(anew))[1] is not None and moved[1].fits:
            plan = dataclasses.replace(anew, planner=plan.planner, search_seconds=plan.search_seconds)
            layout = moved[0]
        else:
            plan = dataclasses.replace(plan, fits=False, shortfall=verdict.shortfall(None))
            lack_note = (
                f"does not fit with elastic.enabled: {verdict.need} where a snapshot of its layers lies beside it; add "
                "devices or capacity, or set elastic.enabled to false"
            )
    kept = reserves(layout, placer.sync, placer.layer_bytes, placer.gradient_bytes)
    notes = [lack_note, describe_reserves(kept), layout.problem]
    snapshots = [sum(sizes[0][layer] for layer in stage.numbers) for stage in plan.stages]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, notes))), snapshots
