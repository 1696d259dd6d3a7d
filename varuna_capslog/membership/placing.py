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
from varuna_capslog.membership.candidates import Candidates
from varuna_capslog.membership.choice import Choice
from varuna_capslog.membership.fleets import Fleets
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import Copies, Reserve, place_copies, reserves
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planning.limits import with_limits
from varuna_capslog.planning.verdict import HostMemory, MemoryVerdict, judge, judge_ranks
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.pipelines import pipelines_of, plan_of_pipelines
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Edge, RunShape

__all__ = ["Placer", "describe_reserves", "state_bytes", "with_reserves"]


class Placer:
    """Places layers and copies on any number of devices.

    Seats are the ranks of a plan, in order. With the planner `joint` its plan is taken where there is one. Otherwise
    the quickest of `Candidates` that fits is taken; without seconds one pipeline of as many stages as possible. Of
    equal pipelines replica r's device d is seat `r * devices + d`; the last ones beyond these are idle and may keep
    copies.

    Args:
        candidates: every pipeline that could be; its `beside` counts the snapshots.
        elastic: what copies are to protect from, and with how few devices the run waits. Of two placements the one
            whose copies find room is taken.
        gradient_bytes: per layer, what its gradients take as they are sent. By default as AdamW's state has them, a
            third of the layer's state.
        given: the run's own plan, of any stages, taken where exactly as many devices are there as it is for, and it
            fits them. It need not be what a planner would choose.
        tier: where the host tier's bytes lie.
        edges: of the chain's graph, by which members are neighbours under direct routes.

    Attributes:
        proposes: plans are searched that two machines might not find alike.
    """

    def __init__(
        self,
        candidates: Candidates,
        elastic: Elastic,
        gradient_bytes: Sequence[int] | None = None,
        given: Plan | None = None,
        tier: HostMemory | None = None,
        edges: Sequence[Edge] = (),
    ) -> None:
        self._tier, self._edges = tier or HostMemory(), edges
        self.candidates, self.elastic, self.sync = candidates, elastic, elastic.protection == "sync"
        self.layer_bytes = tuple(candidates.layer_bytes)
        self.gradient_bytes = tuple(gradient_bytes or (-(-size // 3) for size in self.layer_bytes))
        self._given = None if given is None else (given, self._choice_of(given))
        self._fleets = Fleets.of(candidates)
        self.proposes = self._fleets is not None
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
        edges: Sequence[Edge] = (),
    ) -> Placer:
        """The placer of a run; `plan` is the run's own. One of the short form stands in the config's replicas.

        Raises:
            CapslogError: as `Candidates`.
        """
        pipeline = config.pipeline
        shape, sizes = RunShape.of_config(config), tuple(layer_bytes)
        candidates = Candidates(profile, sizes, shape, pipeline.planner, pipeline.memory, beside=sizes)
        if plan is not None and plan.short:
            one_each = len(plan.stages) == pipeline.devices
            plan = _of_pipelines(candidates, plan.cut_list, pipeline.replicas) if one_each else None
        return cls(candidates, config.elastic, gradient_bytes, plan, HostMemory.of_config(config), edges)

    def __call__(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """Who owns and copies what, or the sentence that says for what the run waits.

        Args:
            plan: what the generation's founder chose for these seats; None: the seats alone decide.

        Raises:
            CapslogError: `plan` is of another run.
        """
        if not seats:
            return "no device is left; waiting for one"
        if len(seats) < self.elastic.min_devices:
            lack = self.elastic.min_devices - len(seats)
            return (
                f"{len(seats)} device(s) are left, but elastic.min_devices is {self.elastic.min_devices}; waiting for "
                f"{lack} more"
            )
        limits = _Limits(seats, self.candidates)
        if plan is not None:
            self._check(plan)
            return self._layout(plan, self._choice_of(plan), seats, limits)
        given, choice = self._given or (None, None)
        if given is not None and choice is not None and given.num_ranks == len(seats) and limits.allow(choice):
            return self._layout(given, choice, seats, limits)
        # What hosts are too few for, no placement protects from.
        least = max(0, self.elastic.redundancy - (len({seat.host for seat in seats}) - 1))

        def lost(choice: Choice) -> int:
            """By how many host losses the copies that find room fall short of what is asked."""
            if not limits.any:
                return least
            return self.elastic.redundancy - self._place_copies(choice, seats, limits).survives

        joint = None if self._fleets is None else self._fleets.plan(tuple(seat.capacity for seat in seats))
        shared = None if joint is None else self._choice_of(joint)
        if joint is not None and shared is not None and lost(shared) <= least:
            return self._layout(joint, shared, seats, limits)
        size = len(self.layer_bytes)
        found = self.candidates.quickest(
            len(seats), limits.usable, lambda one: lost(Choice.of_candidate(one, size)), least
        )
        if joint is not None and shared is not None:
            protected = found is not None and lost(Choice.of_candidate(found, size)) < lost(shared)
            if not protected:
                return self._layout(joint, shared, seats, limits)
        if found is None:
            return self._waiting(seats, limits)
        plan = _of_pipelines(self.candidates, found.cuts, found.replicas)
        return self._layout(plan, Choice.of_candidate(found, size), seats, limits)

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        """The plan for the record of a generation of these seats; None where every member computes it alike, which
        joint plans are not left to: their search adds and compares times in ways that two machines may round apart.
        """
        layout = self(seats) if self.proposes else None
        return layout.plan if isinstance(layout, MemberLayout) else None

    def prepare(self, devices: int, capacity: int = 0) -> None:
        """Weighs what up to `devices` devices of this capacity (0: no limit) could be, while no member waits."""
        self.candidates.prepare(devices)
        if self._fleets is not None:
            self._fleets.prepare(devices, capacity)

    def weighed(self, plan: Plan, seats: Sequence[Seat]) -> tuple[MemberLayout, tuple[int, ...] | None]:
        """The layout of a plan for these seats, and the bytes of each rank with the reserves that every rank has; None
        where they are not known.
        """
        choice = self._choice_of(plan)
        return self._layout(plan, choice, seats, _Limits(seats, self.candidates)), choice.rank_bytes

    def _layout(self, plan: Plan, choice: Choice, seats: Sequence[Seat], limits: _Limits) -> MemberLayout:
        copies = self._place_copies(choice, seats, limits)
        return MemberLayout.of_plan(plan, [seat.member for seat in seats], dict(copies.kept), copies.problem)

    def _choice_of(self, plan: Plan) -> Choice:
        """A plan of equal pipelines is weighed like every candidate; of others the plan itself says what they hold."""
        if (alike := pipelines_of(plan)) is not None:
            return Choice.of_candidate(self.candidates.of_cuts(alike[1], alike[0]), plan.num_layers)
        profile = self.candidates.profile
        one_memory = profile is not None and self._tier.is_device(profile)
        return Choice.of_plan(plan, self.candidates.beside or [0] * plan.num_layers, one_memory, self._edges)

    def _check(self, plan: Plan) -> None:
        """Raises CapslogError unless a plan from the store's log is one for this run."""
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

    def _place_copies(self, choice: Choice, seats: Sequence[Seat], limits: _Limits) -> Copies:
        ways, links = choice.of_members([seat.member for seat in seats])
        used = choice.used
        spare = [seat.member for rank, seat in enumerate(seats) if rank not in used]
        hosts = {seat.member: seat.host for seat in seats}
        room = None
        if limits.any and choice.rank_bytes is not None:
            held = [*choice.rank_bytes, *[0] * (len(seats) - len(choice.rank_bytes))]
            left = [max(0, usable - taken) for usable, taken in zip(limits.of_rank, held, strict=True)]
            room = {seat.member: size for seat, size in zip(seats, left, strict=True)}
        return place_copies(ways, hosts, self.elastic.redundancy, self._copy_bytes, spare, room, links)

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

    def allow(self, choice: Choice) -> bool:
        """Whether every rank keeps to what its device can use, or nothing limits."""
        return not self.any or choice.fits(self.of_rank)

    def usable(self, replicas: int, stages: int) -> list[int] | None:
        """Per stage, the least that a device of any replica can use; None where nothing limits."""
        if not self.any:
            return None
        return [min(self.of_rank[device : replicas * stages : stages]) for device in range(stages)]


def _of_pipelines(candidates: Candidates, cuts: Sequence[int], replicas: int) -> Plan:
    """The plan of a run's equal pipelines, with the limits of its stages where these follow from seconds."""
    run, profile = candidates.run, candidates.profile
    units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
    plan = plan_of_pipelines(len(candidates.layer_bytes), cuts, replicas, units, run.schedule)
    if not run.limits_by_plan or profile is None or not candidates.timed:
        return plan
    return with_limits(profile, plan, run, candidates.link)


def state_bytes(profile: Profile) -> tuple[list[int], list[int]] | None:
    """State and gradient bytes of each layer as a profile tells them; None where it does not.

    A layer's static bytes are its state and one gradient of what is trained, and the optimizer keeps as much several
    times more, AdamW twice: of what exceeds the parameters the gradient is one part of three.
    """
    states, gradients, parts = [], [], 1 + profile.conditions.get("optimizer_copies", 2)
    for layer in profile.layers:
        if layer.static_bytes is None or layer.parameter_bytes is None:
            return None
        gradient = int(max(0, layer.static_bytes - layer.parameter_bytes) // parts)
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
    """Before a run: a plan of any form with what protection takes in its notes, and the bytes of each stage's snapshot.

    Snapshots and copies lie on the device beside training, so a plan that fits without them may not fit with them.
    Every rank is taken to be on a host of its own. Where a capacity is given that the plan keeps to without snapshots
    and not with them, one pipeline is cut anew with them, unless the config fixes the cuts; where that does not help it
    does not fit. Copies that find no room are said, not refused: the run trains without that protection.

    Args:
        plan: with the bytes of its ranks. One of the short form stands in the config's replicas.
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
    edges = profile.known_edges or ()
    placer, width = Placer.of_config(config, profile, *sizes, edges=edges), plan.num_ranks
    limits = [one.capacity_bytes or 0 for one in plan.ranks] or [0] * width
    seats = [Seat(f"rank {rank}", f"host {rank}", limits[rank % width]) for rank in range(config.world_size)]

    def placed(one: Plan) -> tuple[MemberLayout, MemoryVerdict | None]:
        """Who copies what, and whether the ranks with what lies beside training fit their devices."""
        whole = _of_pipelines(placer.candidates, one.cut_list, replicas) if one.short else one
        layout, held = placer.weighed(whole, seats)
        verdict = None if held is None else judge_ranks(one, held[:width], Headroom.of(profile))
        return layout, verdict and dataclasses.replace(verdict, of="stage" if one.short else "rank")

    lack, (layout, verdict) = "", placed(plan)
    if plan.fits and verdict is not None and not verdict.fits:
        anew = None
        if plan.short and pipeline.cuts is None and pipeline.plan is None:
            usable = _Limits(seats, placer.candidates).usable(replicas, width)
            cuts = placer.candidates.candidate(replicas, width, usable).cuts
            anew = find(capacity=pipeline.capacity, cuts=list(cuts))
        if anew is not None and (other := placed(anew))[1] is not None and other[1].fits:
            plan = dataclasses.replace(anew, planner=plan.planner, search_seconds=plan.search_seconds)
            layout = other[0]
        else:
            plan = dataclasses.replace(plan, fits=False, shortfall=verdict.shortfall(None))
            lack = (
                f"does not fit with elastic.enabled: {verdict.need} where a snapshot of its layers lies beside it; add "
                "devices or capacity, or set elastic.enabled to false"
            )
    kept = reserves(layout, placer.sync, placer.layer_bytes, placer.gradient_bytes)
    told = [lack, describe_reserves(kept), layout.problem]
    snapshots = [sum(sizes[0][layer] for layer in stage.numbers) for stage in plan.stages]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, told))), snapshots
