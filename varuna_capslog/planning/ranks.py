"""The bytes of every rank of a plan, and whether they fit: for plans that are more than one stage per rank.

`start/prepare` judges given plans and cut lists here, the search a plan of memory model `ranks`, and `simulate` shows
the bytes. `memory/fold` computes them; a rehearsal, which needs torch, is passed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO
from varuna_capslog.memory.fold import RankFold, fold
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planning.verdict import HostMemory, judge_ranks, predictable
from varuna_capslog.plans.parts import PlanRank, Units, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, from_strings

__all__ = ["Known", "fold_plan", "folded", "judged", "with_rank_bytes", "with_stage_bytes", "within_tier"]

Known = dict[bool, RangeBytes]
"""True if the run recomputes -> bytes of ranges of layers."""
_CERTAIN = 0.8
"""A rank that needs no more than this part of its device by the fold is not rehearsed, which may take seconds: the
fold's errors are a few percent (`benchmarks/fold`)."""


def fold_plan(profile: Profile, plan: Plan, run: RunShape, known: Known | None = None) -> list[RankFold]:
    """The bytes of every rank at every position of its list.

    Args:
        run: what the plan leaves to the config: in the short form the microbatches and blocks of the pipeline, and for
            stages whose memory is null, whether they recompute.
        known: the profile's bytes from earlier folds; a caller that folds many plans passes the same dict each time.

    Raises CapslogError for what schedules do not describe (splits), units that are not known, and what the
    profile lacks.
    """
    if profile.num_layers != plan.num_layers:
        raise CapslogError(
            f"the profile has {profile.num_layers} layers, the plan {plan.num_layers}; give the profile that the plan "
            "was made for"
        )
    units = Units(plan.units.per_step or run.num_microbatches, None, plan.units.blocks or run.num_blocks)
    name = plan.schedule or run.schedule
    shape = dataclasses.replace(run, schedule=name, num_microbatches=units.per_step, num_blocks=units.blocks or 1)
    known = {} if known is None else known
    if shape.recomputes not in known:
        known[shape.recomputes] = RangeBytes(profile, RANKS, shape.recomputes)  # says first what the profile lacks
    ranges = known[shape.recomputes]
    return fold(ranges, plan.stages, units, _actions(profile, plan, units, shape), shape, plan.routes)


def judged(
    profile: Profile,
    plan: Plan,
    run: RunShape,
    rehearse: Callable[[], Sequence[int]] | None = None,
    tier: HostMemory | None = None,
    known: Known | None = None,
) -> Plan:
    """The plan with the bytes of its ranks, and whether each fits its device.

    Where the fold cannot say that, the rehearsal does; where that cannot either, `fits` is None and a note says why.

    Args:
        run: as for `fold_plan`.
        rehearse: gives the peak of every rank from its own program, on fake tensors. Where there is a capacity it has
            the last word on ranks that fit by the fold of an estimate, or of any profile of the CPU, and on all ranks
            where the profile does not say what each action takes. A model that it cannot run is named in a note, unless
            the profile itself is an estimate.
        tier: what the host tiers may hold; None: no limit, in memory.
        known: as for `fold_plan`.
    """
    gaps = predictable(profile, run.microbatch_size)
    if gaps:
        return dataclasses.replace(plan, fits=None, shortfall=None, notes=(*plan.notes, *gaps))
    try:
        folds = fold_plan(profile, plan, run, known)
    except CapslogError as error:
        return _by_rehearsal_alone(profile, plan, rehearse, str(error))
    tier, on_cpu = tier or HostMemory(), HostMemory().is_device(profile)
    shared, host, headroom = (
        tier.is_device(profile),
        [rank.host_bytes for rank in folds],
        Headroom.of(profile),
    )
    verdict = tier.lacks(with_rank_bytes(plan, [rank.peak_bytes for rank in folds], host, headroom, shared), host)
    if rehearse is None or all(rank.capacity_bytes is None for rank in verdict.ranks):
        return verdict
    estimated = profile.source == "estimated"
    told = all(row.action_bytes is not None for row in profile.observations)
    if told and (_far_below(verdict, headroom) or not (verdict.fits and (estimated or on_cpu))):
        return verdict
    try:
        sizes = rehearse()
    except CapslogError as error:
        if estimated:
            raise
        note = f"the ranks' bytes are not confirmed by a rehearsal: {error}"
        return dataclasses.replace(verdict, notes=(*verdict.notes, note))
    verdict = with_rank_bytes(plan, sizes, host, headroom, shared, " when its own program is rehearsed")
    return tier.lacks(verdict, host)


def _far_below(plan: Plan, headroom: Headroom) -> bool:
    """Return True if every rank needs so little of its device that no error of the fold could make it too much."""
    needs = [(headroom.device(rank.bytes or 0), rank.capacity_bytes) for rank in plan.ranks]
    return all(limit is None or need <= _CERTAIN * limit for need, limit in needs)


def _by_rehearsal_alone(profile: Profile, plan: Plan, rehearse: Callable[[], Sequence[int]] | None, lack: str) -> Plan:
    """Judge a plan that the fold has no bytes of by the rehearsal, where there is a capacity.

    lack: why the fold has none. Only the fold counts bytes of the host tier, so plans that offload stay unknown.
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
    """A plan that a search has found and that fits its devices, judged by its host tiers as well."""
    if tier.capacity is None or not plan.fits:
        return plan
    try:
        return tier.lacks(plan, [rank.host_bytes for rank in fold_plan(profile, plan, run)])
    except CapslogError:  # the profile has not the runs for the fold
        return plan


def with_stage_bytes(plan: Plan) -> Plan:
    """Return a judged plan with the bytes of its stages: those of their ranks, where each rank has one stage."""
    if len(plan.stages) > plan.num_ranks:
        return plan
    stages = [dataclasses.replace(stage, bytes=plan.ranks[stage.rank].bytes) for stage in plan.stages]
    return dataclasses.replace(plan, stages=tuple(stages))


def folded(profile: Profile, plan: Plan, memory: str, run: RunShape) -> Plan:
    """Return a plan that fits by the memory model of its stages; judged by its ranks' bytes where these do not fit.

    Models of stages are quicker, and a few percent off where a stage's order of work is not the one that they assume.

    memory: as in `search.plan`; another model than "auto" is believed. run: as for `fold_plan`.
    """
    told = all(row.action_bytes is not None for row in profile.observations)
    if not plan.fits or plan.memory_model == RANKS or memory != AUTO or not told or plan.capacity_bytes is None:
        return plan
    verdict = judged(profile, plan, dataclasses.replace(run, schedule=plan.schedule or run.schedule))
    return with_stage_bytes(verdict) if verdict.fits is False else plan


def with_rank_bytes(
    plan: Plan, sizes: Sequence[int], host: Sequence[int], headroom: Headroom, shared: bool, how: str = ""
) -> Plan:
    """The plan with these peaks of its ranks, judged.

    Args:
        host: bytes of the host tier. shared: they count against the same capacity.
        how: how the peaks are known, for the sentence that says what does not fit.
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
    """Each rank's list: the plan's own, or that of its schedule."""
    if plan.actions is not None:
        return from_strings(plan.actions)
    return scheduled(run.schedule, plan.stages, stage_graph(plan.stages, units, plan.routes, profile.known_edges), run)
