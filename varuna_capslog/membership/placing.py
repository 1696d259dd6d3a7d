"""From the members that are left to who trains and copies what: `recovery.Place` for the pipeline engine.

Every participant of a generation asks with the same seats and gets the same layout, so nothing here depends on the
clock, on chance or on what was asked before. `candidates` weighs the pipelines, `redundancy` places the copies. It
imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config, Elastic
from varuna_capslog.membership.candidates import Candidate, Candidates
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import Copies, Reserve, place_copies, reserves
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planning.verdict import MemoryVerdict, judge
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["Placer", "describe_reserves", "state_bytes", "with_reserves"]


class Placer:
    """Places layers and copies on any number of devices.

    Seats are ranks in order: replica r's device d is seat `r * devices + d`; the last ones beyond these are idle and
    may keep copies. The quickest of `Candidates` that fits is taken; without seconds one pipeline of as many stages as
    possible.

    Args:
        candidates: every pipeline that could be; its `beside` counts the snapshots.
        elastic: what copies are to protect from, and with how few devices the run waits. Of two placements the one
            whose copies find room is taken.
        gradient_bytes: per layer, what its gradients take as they are sent. By default as AdamW's state has them, a
            third of the layer's state.
        given: (cuts, replicas) of the run's own plan, taken where exactly as many devices are there as it is for, and
            it fits them. They need not be what a planner would choose.
    """

    def __init__(
        self,
        candidates: Candidates,
        elastic: Elastic,
        gradient_bytes: Sequence[int] | None = None,
        given: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self.candidates, self.elastic, self.sync = candidates, elastic, elastic.protection == "sync"
        self.layer_bytes = tuple(candidates.layer_bytes)
        self.gradient_bytes = tuple(gradient_bytes or (-(-size // 3) for size in self.layer_bytes))
        self._given = None if given is None else candidates.of_cuts(given[1], tuple(given[0]))
        # A copy's two boundaries, and the gradients that wait for the vote.
        self._copy_bytes = [
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
    ) -> Placer:
        """The placer of a run; `plan` is the run's own, with one stage per device (others are not taken).

        Raises:
            CapslogError: as `Candidates`.
        """
        pipeline = config.pipeline
        one_each = plan is not None and plan.short and len(plan.stages) == pipeline.devices
        shape, sizes = RunShape.of_config(config), tuple(layer_bytes)
        candidates = Candidates(profile, sizes, shape, pipeline.planner, pipeline.memory, beside=sizes)
        given = (plan.cut_list, pipeline.replicas) if plan is not None and one_each else None
        return cls(candidates, config.elastic, gradient_bytes, given)

    def __call__(self, seats: Sequence[Seat]) -> MemberLayout | str:
        """Who owns and copies what, or the sentence that says for what the run waits."""
        if not seats:
            return "no device is left; waiting for one"
        if len(seats) < self.elastic.min_devices:
            lack = self.elastic.min_devices - len(seats)
            return (
                f"{len(seats)} device(s) are left, but elastic.min_devices is {self.elastic.min_devices}; waiting for "
                f"{lack} more"
            )
        limits = _Limits(seats, self.candidates)
        found = self._given if self._given is not None and self._given.devices == len(seats) else None
        if found is None or not found.fits(limits.usable(found.replicas, len(found.cuts))):
            # What hosts are too few for, no placement protects from.
            least = max(0, self.elastic.redundancy - (len({seat.host for seat in seats}) - 1))

            def lost_protection(candidate: Candidate) -> int:
                """By how many host losses the copies that find room fall short of what is asked."""
                if not limits.any:
                    return least
                return self.elastic.redundancy - self._place_copies(candidate, seats, limits).survives

            found = self.candidates.quickest(len(seats), limits.usable, lost_protection, least)
        if found is None:
            return self._waiting(seats, limits)
        return self._layout(found, seats, limits)

    def of_cuts(
        self, cuts: Sequence[int], replicas: int, seats: Sequence[Seat]
    ) -> tuple[MemberLayout, tuple[int, ...] | None]:
        """The layout of given cuts, and the bytes of each stage with the reserves that every stage has; None where no
        memory model describes the run.
        """
        found = self.candidates.of_cuts(replicas, tuple(cuts))
        return self._layout(found, seats, _Limits(seats, self.candidates)), found.stage_bytes

    def _layout(self, found: Candidate, seats: Sequence[Seat], limits: _Limits) -> MemberLayout:
        copies = self._place_copies(found, seats, limits)
        owned = {member: layers for row in _pipelines(found, seats, len(self.layer_bytes)) for member, layers in row}
        return MemberLayout(len(self.layer_bytes), owned, dict(copies.kept), copies.problem)

    def pipeline(self, layout: MemberLayout, members: Sequence[Member]) -> tuple[tuple[int, ...], int, int]:
        """Cuts, devices of one pipeline and replicas of a layout that a placer made for these members, by rank.

        Raises CapslogError where the layout is not one of whole pipelines on the first ranks.
        """
        owners = [member for member in members if layout.owned.get(member)]
        devices = next(
            (rank for rank in range(1, len(owners)) if layout.owned[owners[rank]][0] == 0), max(1, len(owners))
        )
        replicas = len(owners) // devices
        rows = [[layout.owned[member] for member in owners[r * devices : (r + 1) * devices]] for r in range(replicas)]
        whole = [layer for layers in rows[0] for layer in layers] if rows else []
        if (
            list(members[: len(owners)]) != owners
            or len(owners) != devices * replicas
            or any(row != rows[0] for row in rows)
            or whole != list(range(layout.num_layers))
        ):
            raise CapslogError(
                f"the layout of {len(owners)} of {len(members)} members is not that of whole, equal pipelines on the "
                "first ranks; give the members in the order of the seats that it was placed for"
            )
        return tuple(layers[0] for layers in rows[0]), devices, replicas

    # -- copies

    def _place_copies(self, candidate: Candidate, seats: Sequence[Seat], limits: _Limits) -> Copies:
        pipelines = _pipelines(candidate, seats, len(self.layer_bytes))
        spare = [seat.member for seat in seats[candidate.devices :]]
        hosts = {seat.member: seat.host for seat in seats}
        room = None
        if limits.any and candidate.stage_bytes is not None:
            held = [*candidate.stage_bytes * candidate.replicas, *[0] * len(spare)]
            left = [max(0, usable - taken) for usable, taken in zip(limits.of_rank, held, strict=True)]
            room = {seat.member: size for seat, size in zip(seats, left, strict=True)}
        return place_copies(pipelines, hosts, self.elastic.redundancy, self._copy_bytes, spare, room)

    # -- what is lacking

    def _waiting(self, seats: Sequence[Seat], limits: _Limits) -> str:
        """What does not fit where, by how much, and what would do."""
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
    """What each seat's device can use, by rank, and by stage of a candidate."""

    def __init__(self, seats: Sequence[Seat], candidates: Candidates) -> None:
        usable = candidates.headroom.usable
        # An unknown capacity limits nothing.
        self.of_rank = [usable(seat.capacity) if seat.capacity else NEVER - 1 for seat in seats]
        self.any = candidates.described and any(seat.capacity for seat in seats)

    def usable(self, replicas: int, stages: int) -> list[int] | None:
        """Per stage, the least that a device of any replica can use; None where nothing limits."""
        if not self.any:
            return None
        return [min(self.of_rank[device : replicas * stages : stages]) for device in range(stages)]


def _pipelines(
    candidate: Candidate, seats: Sequence[Seat], num_layers: int
) -> list[list[tuple[Member, tuple[int, ...]]]]:
    """Per replica, its members in stage order with their layers."""
    stages = len(candidate.cuts)
    ends = [*candidate.cuts[1:], num_layers]
    layers = [tuple(range(first, end)) for first, end in zip(candidate.cuts, ends, strict=True)]
    return [
        [(seats[replica * stages + stage].member, layers[stage]) for stage in range(stages)]
        for replica in range(candidate.replicas)
    ]


def state_bytes(profile: Profile) -> tuple[list[int], list[int]] | None:
    """State and gradient bytes of each layer as a profile tells them; None where it does not.

    A layer's static bytes are its state and one gradient of what is trained, and of these AdamW keeps as much twice
    more: a third of what exceeds the parameters is the gradient.
    """
    states, gradients = [], []
    for layer in profile.layers:
        if layer.static_bytes is None or layer.parameter_bytes is None:
            return None
        gradient = max(0, layer.static_bytes - layer.parameter_bytes) // 3
        states.append(layer.static_bytes - gradient)
        gradients.append(gradient)
    return states, gradients


def describe_reserves(found: Mapping[Member, Reserve]) -> str:
    """What protection takes, in a sentence: the rank with most of it, and all of them together."""
    most = max(found.values(), key=sum)
    parts = [f"{format_bytes(most.snapshot)} for its own layers at the last boundary"]
    if most.copies:
        parts.append(f"{format_bytes(most.copies)} for copies of others'")
    if most.updates:
        parts.append(f"{format_bytes(most.updates)} for their gradients")
    total = sum(map(sum, found.values()))
    return (
        f"protection takes up to {format_bytes(sum(most))} of a rank's memory on the device beside training "
        f"({', '.join(parts)}), {format_bytes(total)} over {len(found)} rank(s)"
    )


def with_reserves(config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
    """Before a run: the plan with what protection takes in its notes, and the bytes of each stage's own snapshot.

    Snapshots and copies lie on the device beside training, so a plan that fits without them may not fit with them.
    Every rank is taken to be on a host of its own. Where a capacity is given that the plan keeps to without snapshots
    and not with them, it is cut anew with them, unless the config fixes the cuts; where that does not help it does not
    fit. Copies that find no room are said, not refused: the run trains without that protection.

    Args:
        find: `search.plan` for this run, without capacity and cuts.

    Raises:
        CapslogError: as `Placer`: what a run that changes its members cannot be planned with.
    """
    pipeline, replicas = config.pipeline, config.pipeline.replicas
    sizes = state_bytes(profile)
    if sizes is None:
        note = "what protection takes is unknown: the profile has no static_bytes or parameter_bytes; profile again"
        Placer.of_config(config, profile, [0] * profile.num_layers)
        return dataclasses.replace(plan, notes=(*plan.notes, note)), [0] * len(plan.stages)
    placer, headroom = Placer.of_config(config, profile, *sizes), Headroom.of(profile)
    capacities = plan.capacities_of(plan.placement())
    seats = [
        Seat(f"rank {rank}", f"host {rank}", 0 if capacities is None else capacities[rank % len(plan.stages)])
        for rank in range(len(plan.stages) * replicas)
    ]

    def judged(cuts: Sequence[int]) -> MemoryVerdict | None:
        """Whether stages with what lies beside them fit their devices."""
        return judge(placer.of_cuts(cuts, replicas, seats)[1], capacities, headroom)

    lack, verdict = "", judged(plan.cut_list)
    if plan.fits and verdict is not None and not verdict.fits:
        usable = _Limits(seats, placer.candidates).usable(replicas, len(plan.stages))
        cuts = placer.candidates.candidate(replicas, len(plan.stages), usable).cuts
        other = judged(cuts)
        if pipeline.cuts is None and pipeline.plan is None and other is not None and other.fits:
            found = find(capacity=pipeline.capacity, cuts=list(cuts))
            plan = dataclasses.replace(found, planner=plan.planner, search_seconds=plan.search_seconds)
        else:
            plan = dataclasses.replace(plan, fits=False, shortfall=verdict.shortfall(None))
            lack = (
                f"does not fit with elastic.enabled: {verdict.need} where a snapshot of its layers lies beside it; add "
                "devices or capacity, or set elastic.enabled to false"
            )
    layout, _ = placer.of_cuts(plan.cut_list, replicas, seats)
    kept = reserves(layout, placer.sync, placer.layer_bytes, placer.gradient_bytes)
    told = [lack, describe_reserves(kept), layout.problem]
    snapshots = [sum(sizes[0][first:end]) for first, end in plan.ranges()]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, told))), snapshots
