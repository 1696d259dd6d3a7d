"""Judges memory: the bytes of the stages or ranks of a plan, whether they fit, what is missing, and what is enough.

`judge` and `judge_ranks` compare given bytes of stages or ranks with capacities, `judge_plan` the bytes that the plan
states. They return a `MemoryVerdict`; all others return the plan with its verdict. `judge_by_fold` computes the bytes
of every rank by the fold, for plans of any form. For a short-form plan that fits by the memory model of its stages,
`check_by_fold` checks this by the fold, `judge_rehearsal` by a rehearsal, `within_tier` its host tiers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import AUTO
from varuna_capslog.memory.costs import NEVER, Headroom
from varuna_capslog.memory.fold import RankFold, fold
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.plans.parts import PlanRank, Shortfall, Units, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.conditions import PURPOSE, why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, from_strings

if TYPE_CHECKING:
    from typing import Self

    from varuna_capslog.config.settings import Config

__all__ = [
    "HostMemory",
    "MemoryVerdict",
    "capacities_of_devices",
    "check_by_fold",
    "fold_plan",
    "is_certain",
    "judge",
    "judge_by_fold",
    "judge_plan",
    "judge_ranks",
    "judge_rehearsal",
    "prediction_gaps",
    "with_rank_bytes",
    "with_stage_bytes",
    "within_tier",
]


# -- Verdicts on stages and ranks. A device needs the peak of its stage and the profile's headroom (`memory.costs`).
#    Nothing is planned, profiled or rehearsed here: functions that do so are passed in.


@dataclass(frozen=True)
class HostMemory:
    """Limit of each rank's host tier in bytes; None: no limit. in_files: the tier is a folder, not host memory."""

    capacity: int | None = None
    in_files: bool = False

    @classmethod
    def of_config(cls, config: Config) -> Self:
        """Return the limit that a run's config sets."""
        return cls(config.pipeline.host_capacity, config.pipeline.host_tier != "memory")

    def is_device(self, profile: Profile) -> bool:
        """True where the host tier lies in the device's own memory: on a CPU, unless the tier is a folder."""
        return not self.in_files and bool(profile.observations) and profile.observations[0].device == "cpu"

    def with_verdict(self, plan: Plan, sizes: Sequence[int]) -> Plan:
        """Return the plan, with `fits` False where a rank's tier exceeds the limit. sizes: bytes by rank."""
        worst = max(range(len(sizes)), key=lambda rank: sizes[rank])
        if self.capacity is None or sizes[worst] <= self.capacity:
            return plan
        more = sizes[worst] - self.capacity
        note = (
            f"does not fit: rank {worst} needs {format_bytes(sizes[worst])} of the {format_bytes(self.capacity)} that "
            f"its host tier may hold (pipeline.host_capacity), {format_bytes(more)} too much; raise it, or offload "
            "fewer layers"
        )
        where = Shortfall(worst, more, None) if plan.short else Shortfall(None, more, None, rank=worst)
        return dataclasses.replace(plan, fits=False, shortfall=plan.shortfall or where, notes=(*plan.notes, note))


@dataclass(frozen=True)
class MemoryVerdict:
    """Bytes of each stage and of its device, in stage order; or of each rank, which may hold several stages.

    peaks: without headroom. needed: peaks with headroom. capacities: of the devices. of: "stage" or "rank".
    """

    peaks: tuple[int, ...]
    needed: tuple[int, ...]
    capacities: tuple[int, ...]
    of: str = "stage"

    @property
    def margins(self) -> list[int]:
        """Bytes of its device that each stage leaves free; below 0 where the stage does not fit."""
        return [has - needed for has, needed in zip(self.capacities, self.needed, strict=True)]

    @property
    def fits(self) -> bool:
        """True where every stage fits its device."""
        return min(self.margins) >= 0

    @property
    def worst(self) -> int:
        """Stage with the smallest margin; the first of several."""
        margins = self.margins
        return margins.index(min(margins))

    @property
    def lacking(self) -> int:
        """Bytes that the worst stage lacks; 0 where all fit."""
        return max(0, -min(self.margins))

    @property
    def need(self) -> str:
        """Text on the worst stage, such as `stage 1 needs 8 GiB of 7 GiB`."""
        worst = self.worst
        return f"{self.of} {worst} needs {format_bytes(self.needed[worst])} of {format_bytes(self.capacities[worst])}"

    @property
    def lack(self) -> str:
        """`need`, followed by the bytes that are too much."""
        peak, needed = self.peaks[self.worst], self.needed[self.worst]
        beside = f" ({format_bytes(peak)} and its headroom)" if needed != peak else ""
        return f"{self.need}, {format_bytes(self.lacking)} too much{beside}"

    def shortfall(self, devices_that_fit: int | None) -> Shortfall:
        """Return the shortfall that a plan file states for a plan that does not fit."""
        if self.of == "rank":
            return Shortfall(None, self.lacking, devices_that_fit, rank=self.worst)
        return Shortfall(self.worst, self.lacking, devices_that_fit)

    def sentence(self, devices_that_fit: int | None, why: str | None = None, way: str | None = None) -> str:
        """Return the text on what is missing and how many devices are enough, for a plan that does not fit.

        why: reason why no number of devices is enough; default: each stage holds at least one layer.
        way: planner for which devices are counted; default: `exact`, or if none are enough, all planners of cuts.
        """
        if devices_that_fit is None:
            why, alike = f"since {why or 'each stage holds at least one layer'}", len(set(self.capacities)) == 1
            which = "" if alike else f" of {format_bytes(min(self.capacities))}, the smallest here,"
            if way is not None:
                return f"does not fit: {self.lack}; with {way} no number of devices{which} would do, {why}"
            return f"nothing fits: {self.lack}, and no number of devices{which} would do, {why}"
        size = format_bytes(min(self.capacities))
        return (
            f"does not fit: {self.lack}; {devices_that_fit} device(s) of {size} would do with {way or 'planner exact'}"
        )


def judge(peaks: Sequence[int] | None, capacities: Sequence[int] | None, headroom: Headroom) -> MemoryVerdict | None:
    """Compare peaks of stages with capacities of their devices, in bytes; None where either is not known."""
    if peaks is None or capacities is None:
        return None
    return MemoryVerdict(tuple(peaks), tuple(headroom.device(peak) for peak in peaks), tuple(capacities))


def judge_plan(plan: Plan, profile: Profile, tier: HostMemory | None = None) -> MemoryVerdict | None:
    """Compare the bytes that a plan states with its capacities: bytes of ranks, or in the short form, of stages. None
    where the plan has no bytes or no capacity. tier: its bytes count if the tier lies in the device's own memory.
    """
    headroom, used = Headroom.of(profile), {rank for stage in plan.stages for rank in stage.ranks}
    if plan.short or any(rank >= len(plan.ranks) or plan.ranks[rank].bytes is None for rank in used):
        together = len(used) == sum(len(stage.ranks) for stage in plan.stages)
        return judge(plan.stage_bytes, plan.capacities_of(plan.placement()), headroom) if together else None
    shared = (tier or HostMemory()).is_device(profile)
    sizes = [(rank.bytes or 0) + (rank.host_bytes or 0) * shared for rank in plan.ranks]
    return judge_ranks(plan, sizes, headroom)


def judge_ranks(plan: Plan, sizes: Sequence[int], headroom: Headroom) -> MemoryVerdict | None:
    """Compare peaks of ranks with the capacities that the plan states, in bytes; None where it states none."""
    limits = [rank.capacity_bytes for rank in plan.ranks] + [None] * (len(sizes) - len(plan.ranks))
    if all(limit is None for limit in limits):
        return None
    needed = tuple(headroom.device(size) for size in sizes)
    capacities = tuple(NEVER if limit is None else limit for limit in limits[: len(sizes)])
    return MemoryVerdict(tuple(sizes), needed, capacities, "rank")


def prediction_gaps(profile: Profile, microbatch_size: int | None) -> list[str]:
    """Reasons why a profile cannot predict bytes for microbatches of this size, in samples; empty if it can."""
    served = PURPOSE in profile.conditions
    instead = "plan in float32, or for a GPU" if served else "measure the profile instead (profile.source=measured)"
    gaps = [
        f"fits and peak_bytes are unknown: the estimate is too low for {limit}; {instead}"
        for limit in profile.conditions.get("limits", [])
    ]
    profiled = profile.conditions.get("microbatch_size")
    if None not in (microbatch_size, profiled) and microbatch_size != profiled:
        gaps.append(
            f"fits and peak_bytes are unknown: the profile holds for microbatch_size {profiled}, "
            f"not {microbatch_size}; profile with that size"
        )
    return gaps


def judge_rehearsal(
    plan: Plan, peaks: Sequence[int], beside: Sequence[int], headroom: Headroom, find: Callable[..., Plan]
) -> Plan:
    """Judge a short-form plan that fits by its memory model again, by the peaks of a rehearsal of every rank's program:
    on a CPU the stages share memory with what a schedule keeps in flight, which sums over layers do not fully count.

    peaks: rehearsed, per stage. beside: bytes on each stage's device beside training, such as snapshots.
    find: plans the same run for another `capacity`; its shortfall says how many devices are enough.
    """
    together = [peak + more for peak, more in zip(peaks, beside, strict=True)]
    verdict = judge(together, plan.capacities_of(plan.placement()), headroom)
    assert verdict is not None, "only a plan with a capacity is rehearsed"
    filled = plan.with_bytes(peaks)
    if verdict.fits:
        return dataclasses.replace(filled, fits=True)
    less = find(capacity=max(1, min(verdict.capacities) - verdict.lacking)).shortfall
    return dataclasses.replace(
        filled,
        fits=False,
        shortfall=verdict.shortfall(None if less is None else less.devices_that_fit),
        notes=(*plan.notes, f"does not fit: {verdict.need} when its own program is rehearsed"),
    )


def check_devices(devices: int, profile: Profile) -> None:
    """Raise CapslogError for more devices than layers."""
    if devices > profile.num_layers:
        instead = "change what keeps it whole" if why_few(profile.conditions) else "a chain with more cut points"
        raise CapslogError(
            f"{devices} devices but only {profile.num_layers} layers; every stage holds at least one layer, "
            f"so use at most {profile.num_layers} devices or {instead}{why_few(profile.conditions)}"
        )


def capacities_of_devices(capacity: int | Sequence[int] | None, devices: int) -> list[int] | None:
    """Return the capacity of each device in bytes, from one number for all or one for each; None stays None."""
    if capacity is None:
        return None
    if isinstance(capacity, (list, tuple)):
        if len(capacity) != devices:
            raise CapslogError(f"{len(capacity)} capacities for {devices} devices; give one for all, or one for each")
        return [fields.whole(row, f"capacity of device {i}", minimum=1) for i, row in enumerate(capacity)]
    return [fields.whole(capacity, "capacity", minimum=1)] * devices


# -- Bytes of every rank of a plan by `memory/fold`, and whether they fit. Rehearsals need torch, and are passed in.


_CERTAIN = 0.8
"""Largest part of its device that a rank may need by the fold without a rehearsal, which may take seconds: the fold's
errors are a few percent (`benchmarks/fold`)."""
_NARROW = 0.005
"""Part of its device by which a rank may exceed it by the fold, and still be rehearsed: the fold counts some tensors
twice, such as rotary embeddings that several recomputed layers read."""


def fold_plan(profile: Profile, plan: Plan, run: RunShape) -> list[RankFold]:
    """Return the bytes of every rank at every position of its list of actions.

    run: for what the plan leaves to the config: schedule, microbatches and blocks of the pipeline, and recomputation
        in stages whose memory is None.

    Raises CapslogError for stages on several ranks, unknown units, and bytes that the profile lacks.
    """
    if profile.num_layers != plan.num_layers:
        raise CapslogError(
            f"the profile has {profile.num_layers} layers, the plan {plan.num_layers}; give the profile that the plan "
            "was made for"
        )
    units = Units(plan.units.per_step or run.num_microbatches, None, plan.units.blocks or run.num_blocks)
    name = plan.schedule or run.schedule
    shape = dataclasses.replace(run, schedule=name, num_microbatches=units.per_step, num_blocks=units.blocks or 1)
    ranges = RangeBytes.of_ranks(profile, shape.recomputes)  # first, since it names what the profile lacks
    return fold(ranges, plan.stages, units, _actions(profile, plan, units, shape), shape, plan.routes)


def judge_by_fold(
    profile: Profile,
    plan: Plan,
    run: RunShape,
    rehearse: Callable[[], Sequence[int]] | None = None,
    tier: HostMemory | None = None,
) -> Plan:
    """Return the plan with the bytes of its ranks, and whether each fits its device. They come from the fold, or where
    it fails, from the rehearsal; where both fail, `fits` is None and a note says why.

    Args:
        rehearse: returns the peak of every rank, by running its program on fake tensors. With a capacity, its peaks
            replace those of the fold in two cases: the profile is an estimate or of the CPU, and the plan fits, but not
            certainly (`is_certain`), or narrowly does not; or the profile lacks the bytes of each action. Its error is
            raised if the fold of an estimate has succeeded, else it becomes a note.
        tier: limit of the host tiers; None: no limit, in memory.
        run: as for `fold_plan`.
    """
    gaps = prediction_gaps(profile, run.microbatch_size)
    if gaps:
        return dataclasses.replace(plan, fits=None, shortfall=None, notes=(*plan.notes, *gaps))
    try:
        folds = fold_plan(profile, plan, run)
    except CapslogError as error:
        return _by_rehearsal_alone(profile, plan, rehearse, str(error))
    tier, on_cpu = tier or HostMemory(), HostMemory().is_device(profile)
    shared, headroom = tier.is_device(profile), Headroom.of(profile)
    peaks, host = [rank.peak_bytes for rank in folds], [rank.host_bytes for rank in folds]
    verdict = tier.with_verdict(with_rank_bytes(plan, peaks, host, headroom, shared), host)
    if rehearse is None or all(rank.capacity_bytes is None for rank in verdict.ranks):
        return verdict
    estimated = profile.source == "estimated"
    has_action_bytes = all(row.action_bytes is not None for row in profile.observations)
    of_tier = not verdict.fits and _needs_at_most(1.0, verdict, headroom)
    near = not of_tier and not is_certain(verdict, headroom) and _needs_at_most(1 + _NARROW, verdict, headroom)
    if has_action_bytes and not (near and (estimated or on_cpu)):
        return verdict
    try:
        sizes = rehearse()
    except CapslogError as error:
        if estimated:
            raise
        note = f"the ranks' bytes are not confirmed by a rehearsal: {error}"
        return dataclasses.replace(verdict, notes=(*verdict.notes, note))
    verdict = with_rank_bytes(plan, sizes, host, headroom, shared, " when its own program is rehearsed")
    return tier.with_verdict(verdict, host)


def is_certain(plan: Plan, headroom: Headroom) -> bool:
    """True where every rank needs so little of its device that it fits whatever the error of the fold."""
    return _needs_at_most(_CERTAIN, plan, headroom)


def _needs_at_most(part: float, plan: Plan, headroom: Headroom) -> bool:
    """True where every rank needs at most this part of its device."""
    sizes = [(rank.bytes, rank.capacity_bytes) for rank in plan.ranks]
    return all(limit is None or (size is not None and headroom.device(size) <= part * limit) for size, limit in sizes)


def _by_rehearsal_alone(profile: Profile, plan: Plan, rehearse: Callable[[], Sequence[int]] | None, lack: str) -> Plan:
    """Judge by the rehearsal a plan with a capacity for which the fold failed, for the reason `lack`. Only the fold
    counts bytes of the host tier, so plans that offload stay unknown.
    """
    limited = any(rank.capacity_bytes is not None for rank in plan.ranks)
    if rehearse is not None and limited and not any(stage.offloads for stage in plan.stages):
        try:
            sizes = rehearse()
            how = " when its own program is rehearsed"
            return with_rank_bytes(plan, sizes, [0] * len(sizes), Headroom.of(profile), False, how)
        except CapslogError as error:
            lack = f"{lack}; a rehearsal does not say it either: {error}"
    note = f"fits and the ranks' bytes are unknown: {lack}"
    return dataclasses.replace(plan, fits=None, shortfall=None, notes=(*plan.notes, note))


def within_tier(profile: Profile, plan: Plan, run: RunShape, tier: HostMemory) -> Plan:
    """Judge the host tiers of a plan that fits its devices. A plan for which the fold fails stays as it is."""
    if tier.capacity is None or not plan.fits:
        return plan
    try:
        return tier.with_verdict(plan, [rank.host_bytes for rank in fold_plan(profile, plan, run)])
    except CapslogError:  # the profile lacks runs for the fold
        return plan


def with_stage_bytes(plan: Plan) -> Plan:
    """Return a judged plan whose stages have the bytes of their ranks; unchanged where a rank has several stages."""
    if len(plan.stages) > plan.num_ranks:
        return plan
    stages = [dataclasses.replace(stage, bytes=plan.ranks[stage.rank].bytes) for stage in plan.stages]
    return dataclasses.replace(plan, stages=tuple(stages))


def check_by_fold(profile: Profile, plan: Plan, memory: str, run: RunShape) -> Plan:
    """Check by the fold a plan that fits by the memory model of its stages: judged by the bytes of its ranks if these
    do not fit, else unchanged. Models of stages are faster than the fold, but a few percent off where a stage's order
    of actions is not the one that they assume.

    memory: as in `Problem`; only plans of "auto" are checked. run: as for `fold_plan`.
    """
    unchecked = not plan.fits or plan.memory_model == RANKS or memory != AUTO or plan.capacity_bytes is None
    if unchecked or any(row.action_bytes is None for row in profile.observations):
        return plan
    verdict = judge_by_fold(profile, plan, dataclasses.replace(run, schedule=plan.schedule or run.schedule))
    return with_stage_bytes(verdict) if verdict.fits is False else plan


def with_rank_bytes(
    plan: Plan, sizes: Sequence[int], host: Sequence[int], headroom: Headroom, shared: bool, how: str = ""
) -> Plan:
    """Return the plan with these peaks of its ranks and bytes of their host tiers, judged by them.

    shared: both count against the same capacity. how: source of the peaks, for the note.
    """
    together = [size + (more if shared else 0) for size, more in zip(sizes, host, strict=True)]
    verdict = judge_ranks(plan, together, headroom)
    ranks = tuple(
        dataclasses.replace(
            plan.ranks[rank] if rank < len(plan.ranks) else PlanRank(),
            bytes=size,
            host_bytes=more or None,
        )
        for rank, (size, more) in enumerate(zip(sizes, host, strict=True))
    )
    fits = verdict is None or verdict.fits
    filled = dataclasses.replace(
        plan,
        ranks=(*ranks, *plan.ranks[len(ranks) :]),
        peak_bytes=max(sizes),
        memory_model=RANKS,
        fits=None,
        shortfall=None,
    )
    if verdict is None or fits:
        return dataclasses.replace(filled, fits=fits)
    note = f"does not fit: {verdict.lack}{how}; give that rank less to hold, or a device with more"
    return dataclasses.replace(filled, fits=False, shortfall=verdict.shortfall(None), notes=(*plan.notes, note))


def _actions(profile: Profile, plan: Plan, units: Units, run: RunShape) -> Schedule:
    """Actions of each rank: the plan's own, or those of its schedule."""
    if plan.actions is not None:
        return from_strings(plan.actions)
    return scheduled(run.schedule, plan.stages, stage_graph(plan.stages, units, plan.routes, profile.known_edges), run)
