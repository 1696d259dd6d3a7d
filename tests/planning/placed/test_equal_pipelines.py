"""Planner `budget` for several equal pipelines beside every plan of small ones, folded and played as they would run."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.planners.test_budget import all_cuts, choices, timed
from tests.planning.asking import equal_pipelines_plan
from tests.planning.placed.test_equal_pipelines_shared_moments import profile_with_moments
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.range_bytes import kinds_on
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed import equal_pipelines
from varuna_capslog.planning.playing import moment_bytes, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import fold_plan, judge_by_fold
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

LINK = Link(bandwidth=1e5)


def every_plan(profile: Profile, replicas: int, devices: int, run: RunShape) -> list[tuple[float, int]]:
    """Return step and peak of every cut list with every choice of recomputed layers, alike in all pipelines."""
    outcomes, size, share = [], profile.num_layers, run.num_blocks // replicas
    for cuts in all_cuts(size, devices):
        bounds = list(itertools.pairwise((*cuts, size)))
        for memory in itertools.product(*(choices(first, end, ("recompute",)) for first, end in bounds)):
            stages = [
                PlanStage(
                    (layers,),
                    (replica * devices + at,),
                    tuple(range(replica * share, (replica + 1) * share)),
                    memory=memory[at],
                )
                for replica in range(replicas)
                for at, layers in enumerate(bounds)
            ]
            plan = Plan(size, tuple(stages), Units(run.num_microbatches, 1, run.num_blocks), run.schedule)
            step = with_step_seconds(profile, plan, run, LINK).step_seconds
            assert step is not None
            outcomes.append((step, max(rank.peak_bytes for rank in fold_plan(profile, plan, run))))
    return outcomes


def of_size(capacity: int | None, count: int = 1) -> list[PlanRank]:
    return [PlanRank(capacity_bytes=capacity)] * count


@pytest.mark.parametrize(
    ("seed", "replicas", "devices", "blocks"), [(1, 2, 2, 2), (2, 2, 2, 4), (3, 3, 1, 3), (4, 2, 1, 4)]
)
def test_no_plan_of_equal_pipelines_is_faster(seed: int, replicas: int, devices: int, blocks: int) -> None:
    """Each pipeline keeps the gradients of all its blocks until the exchange, so less fits than in one alone."""
    draw = random.Random(seed)
    profile = timed(draw, draw.choice([3, 4]))
    run = RunShape(2 * blocks, "1f1b", microbatch_size=1, num_blocks=blocks)
    everything = every_plan(profile, replicas, devices, run)
    peaks = sorted({peak for _, peak in everything})
    for capacity in (peaks[0], *draw.sample(peaks, min(3, len(peaks))), peaks[-1]):
        best = min(step for step, peak in everything if peak <= capacity)
        plan = equal_pipelines_plan(profile, replicas, of_size(capacity, replicas * devices), run, LINK)
        assert judge_by_fold(profile, plan, run).fits
        assert plan.step_seconds == pytest.approx(best, rel=1e-9)
        assert with_step_seconds(profile, plan, run, LINK).step_seconds == plan.step_seconds
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= best * (1 + 1e-9)
        assert plan.proven is (plan.step_seconds <= plan.bound_seconds * (1 + 1e-9))
    smaller = judge_by_fold(
        profile, equal_pipelines_plan(profile, replicas, of_size(peaks[0] - 1, replicas * devices), run), run
    )
    assert smaller.fits is False


def test_what_the_search_does_not_count_is_taken_from_its_memory_until_the_pipelines_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The profile does not tell the bytes of parameters, so the search does not know how much further blocks add."""
    profile, run = timed(random.Random(3), 4), RunShape(16, "1f1b", microbatch_size=1, num_blocks=8)
    peaks = sorted({peak for _, peak in every_plan(profile, 2, 2, run)})[::3]
    fit = []
    for rounds in (1, 4):
        monkeypatch.setattr(equal_pipelines, "_ROUNDS", rounds)
        plans = [equal_pipelines_plan(profile, 2, of_size(capacity, 4), run) for capacity in peaks]
        fit.append(sum(bool(judge_by_fold(profile, plan, run).fits) for plan in plans))
    assert fit[0] < fit[1] == len(peaks), "nothing was left to the further searches"


def test_a_stage_keeps_to_the_least_of_its_devices_and_is_as_fast_as_the_slowest() -> None:
    profile = timed(random.Random(5), 4)
    run = RunShape(4, "1f1b", microbatch_size=1, num_blocks=2)
    everything = [peak for _, peak in every_plan(profile, 2, 2, run)]
    low, high = min(everything), max(everything)
    mixed = equal_pipelines_plan(profile, 2, [*of_size(high), *of_size(low, 2), *of_size(high)], run)
    alike = equal_pipelines_plan(profile, 2, of_size(low, 4), run)
    assert mixed.stages == alike.stages
    assert [rank.capacity_bytes for rank in mixed.ranks] == [high, low, low, high]
    slow = equal_pipelines_plan(profile, 2, [PlanRank(speed=speed) for speed in (1.0, 1.0, 0.25, 1.0)], run)
    assert [rank.speed for rank in slow.ranks] == [1.0, 1.0, 0.25, 1.0]
    assert slow.stages[0].end < equal_pipelines_plan(profile, 2, of_size(None, 4), run).stages[0].end
    with pytest.raises(CapslogError, match="3 pipelines cannot share 4 accumulation block"):
        equal_pipelines_plan(profile, 3, of_size(None, 3), RunShape(4, "1f1b", microbatch_size=1, num_blocks=4))


@pytest.mark.parametrize(("planner", "rounds"), [("budget", 1), ("exact", 1), ("throughput", 1), ("exact", 2)])
def test_replicas_share_the_moments_where_a_run_says_so(planner: str, rounds: int) -> None:
    """Of any planner, with room for all; the bytes are those of the fold, and as many as are expected are spared."""
    profile = profile_with_moments()
    run = RunShape(4, "1f1b", False, microbatch_size=1, num_blocks=2)
    problem = Problem(profile, tuple(of_size(1 << 40, 4)), run, pipelines=2, stages_per_rank=rounds)
    plans = [solve(replace(problem, shares_moments=shares), planner) for shares in (False, True)]
    moments = moment_bytes(profile)
    for plan in plans:
        assert plan.fits
        assert plan.profile_digest == profile.digest
    shared = plans[1]
    kept = [sorted(frozenset(stage.numbers) - stage.moments_elsewhere) for stage in shared.stages]
    assert sorted(layer for layers in kept for layer in layers) == list(range(8))
    whole = replace(shared, stages=tuple(replace(stage, moments=()) for stage in shared.stages))
    for rank, (before, after) in enumerate(
        zip(*(fold_plan(profile, plan, run) for plan in (whole, shared)), strict=True)
    ):
        assert shared.ranks[rank].bytes == after.peak_bytes
        away = {layer for stage in shared.stages if stage.rank == rank for layer in stage.moments_elsewhere}
        assert before.peak_bytes - after.peak_bytes == sum(moments[layer] or 0 for layer in away)
        kinds = kinds_on(shared, profile, rank, "rank", after.peak_bytes)
        assert kinds == {} or sum(kinds.values()) == after.peak_bytes


@pytest.mark.parametrize(("replicas", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_replicas_share_the_moments_where_nothing_fits_otherwise(replicas: int, devices: int) -> None:
    """On a CPU, which has no host tier for them."""
    profile = profile_with_moments()
    profile = replace(profile, observations=tuple(replace(row, device="cpu") for row in profile.observations))
    moments = sum(size or 0 for size in moment_bytes(profile).values())
    run, count = RunShape(2 * replicas, "1f1b", microbatch_size=1, num_blocks=replicas), replicas * devices

    def peak(plan: Plan) -> int:
        return max(fold.peak_bytes for fold in fold_plan(profile, plan, run))

    alone = equal_pipelines_plan(profile, replicas, of_size(1, count), run)
    below = peak(alone) - moments // (4 * devices)
    whole = equal_pipelines_plan(profile, replicas, of_size(below, count), run)
    assert judge_by_fold(profile, whole, run).fits is False
    shared = equal_pipelines_plan(profile, replicas, of_size(below, count), run, may_share=True)
    assert judge_by_fold(profile, shared, run).fits
    assert peak(shared) <= below
    assert "replicas share the optimizer's moments" in shared.notes[-1]
    assert {piece.kind for stage in shared.stages for piece in stage.moments} == {"replica"}
    assert not any(
        stage.moments
        for stage in equal_pipelines_plan(profile, replicas, of_size(2 * below, count), run, may_share=True).stages
    )
    smallest = equal_pipelines_plan(profile, replicas, of_size(1, count), run, may_share=True)
    assert judge_by_fold(profile, smallest, run).fits is False
