"""Plans judged by their ranks: the bytes of each, the missing bytes, and cases without a verdict."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.memory.chains import SHORT
from tests.memory.machine import Model, profile_of
from tests.planning.asking import plan as search
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import resolve
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.fold import fold
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.verdict import HostMemory, fold_plan, judge_by_fold, with_rank_bytes, within_tier
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage, Shortfall, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, schedule_of, to_strings

RUN = RunShape(8, "1f1b", False)
MODEL = Model.random(random.Random(3), 6, True)
STAGES = (
    PlanStage(((0, 2),), (0,)),
    PlanStage(((2, 4),), (1,), memory=(MemoryInterval(2, 4, "recompute"),)),
    PlanStage(((4, 6),), (0,)),
)


def plan_with(*capacities: int | None) -> Plan:
    ranks = tuple(PlanRank(capacity_bytes=capacity) for capacity in capacities)
    return Plan(6, STAGES, Units(8, 1, 1), "1f1b", ranks=ranks)


def seconds(profile: Profile) -> Profile:
    rows = [dataclasses.replace(row, forward_seconds=1.0, backward_seconds=2.0) for row in profile.layers]
    return dataclasses.replace(profile, layers=tuple(rows))


def test_every_rank_is_judged_by_all_its_stages() -> None:
    profile = profile_of(MODEL, "cpu")
    first, second = (rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan_with(), RUN))
    plan = judge_by_fold(profile, plan_with(first, second), RUN)
    assert (plan.fits, plan.peak_bytes, plan.memory_model) == (True, max(first, second), "ranks")
    assert [rank.bytes for rank in plan.ranks] == [first, second]
    less = judge_by_fold(profile, plan_with(first - 1, second), RUN)
    assert (less.fits, less.shortfall) == (False, Shortfall(None, 1, rank=0))
    assert less.notes == (
        f"does not fit: rank 0 needs {format_bytes(first)} of {format_bytes(first - 1)}, 1 B too much; give that rank "
        "less to hold, or a device with more",
    )
    # a rank without a capacity has no limit; without any, the plan fits
    assert judge_by_fold(profile, plan_with(None, second - 1), RUN).shortfall == Shortfall(None, 1, rank=1)
    assert judge_by_fold(profile, plan_with(), RUN).fits is True


def test_only_stages_that_recompute_have_an_r() -> None:
    """A named schedule would give one to every stage."""
    profile, plan = profile_of(MODEL, "cpu"), plan_with()
    rows = schedule_of("1f1b", plan.stage_graph(), True)
    rows = [[action for action in row if action.kind != "R" or action.stage == 1] for row in rows]
    assert fold_plan(profile, plan, RUN) == fold(profile, STAGES, plan.units, rows, RUN)


def test_a_plans_own_lists_are_folded() -> None:
    """GPipe's order holds more than that of the schedule that the config names."""
    profile, plan = (
        profile_of(MODEL, "cpu"),
        Plan(6, (STAGES[0], STAGES[2], PlanStage(((2, 4),), (1,))), Units(8, 1, 1)),
    )
    rows = schedule_of("gpipe", plan.stage_graph(), False)
    listed = dataclasses.replace(plan, actions=tuple(map(tuple, to_strings(rows))))
    assert fold_plan(profile, listed, RUN) == fold(profile, plan.stages, plan.units, rows, RUN)
    assert fold_plan(profile, listed, RUN)[0].peak_bytes > fold_plan(profile, plan, RUN)[0].peak_bytes


def test_the_rehearsal_has_the_last_word() -> None:
    profile = profile_of(MODEL, "cpu")
    sizes = [rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan_with(), RUN)]
    plan = judge_by_fold(profile, plan_with(*sizes), RUN, lambda: [sizes[0] - 2, sizes[1] + 3])
    assert [rank.bytes for rank in plan.ranks] == [sizes[0] - 2, sizes[1] + 3]
    assert plan.shortfall == Shortfall(None, 3, rank=1)
    assert plan.notes[-1].endswith(
        "when its own program is rehearsed; give that rank less to hold, or a device with more"
    )

    def never() -> list[int]:
        raise AssertionError("nothing to confirm")

    narrow = [size - size // 400 for size in sizes]
    assert judge_by_fold(profile, plan_with(*narrow), RUN, lambda: narrow).fits is True, "the fold counts some twice"
    assert judge_by_fold(profile, plan_with(*(int(size / 1.01) for size in sizes)), RUN, never).fits is False
    assert judge_by_fold(profile, plan_with(1, 1), RUN, never).fits is False
    assert judge_by_fold(profile, plan_with(), RUN, never).fits is True


def test_recomputed_parts_of_layers_are_rehearsed_where_the_profile_has_no_runs_with_them() -> None:
    """The fold took them for layers that are kept, or for whole layers that it had met before."""
    profile, parts = profile_of(MODEL, "cpu"), MemoryInterval(2, 4, "recompute", ("mlp",))
    plan = plan_with(10**9, 10**9)
    fold_plan(profile, plan, RUN)
    parted = dataclasses.replace(plan, stages=(STAGES[0], dataclasses.replace(STAGES[1], memory=(parts,)), STAGES[2]))
    why = r"the memory interval recompute 2-3 \(mlp\) treats parts of its layers, and the profile has no runs of these"
    with pytest.raises(CapslogError, match=why):
        fold_plan(profile, parted, RUN)
    rehearsed = judge_by_fold(profile, parted, RUN, lambda: [5, 7])
    assert ([rank.bytes for rank in rehearsed.ranks], rehearsed.fits) == ([5, 7], True)
    unknown = judge_by_fold(profile, parted, RUN)
    assert (unknown.fits, unknown.ranks[0].bytes) == (None, None)
    assert "the profile has no runs of these layers with them" in unknown.notes[-1]


def test_a_profile_of_peaks_alone_is_always_rehearsed() -> None:
    """Such a profile has no bytes per action; a model that cannot be rehearsed is named."""
    profile = profile_of(MODEL, "cpu")
    rows = tuple(dataclasses.replace(row, action_bytes=None) for row in profile.observations)
    measured = dataclasses.replace(profile, observations=rows)
    assert judge_by_fold(measured, plan_with(9, 9), RUN, lambda: [8, 9]).fits is True
    enough = [10 * rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan_with(), RUN)]

    def cannot() -> list[int]:
        raise CapslogError("layers 0 to 1 cannot run on fake tensors")

    plan = judge_by_fold(measured, plan_with(*enough), RUN, cannot)
    assert plan.fits is True
    assert plan.notes[-1].endswith("not confirmed by a rehearsal: layers 0 to 1 cannot run on fake tensors")
    estimate = dataclasses.replace(profile, source="estimated")
    assert judge_by_fold(profile, plan_with(*enough), RUN, cannot).notes == (), "far from full, it needs no rehearsal"
    barely = [rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan_with(), RUN)]
    with pytest.raises(CapslogError, match="cannot run on fake tensors"):
        judge_by_fold(estimate, plan_with(*barely), RUN, cannot)
    # a measurement on CUDA outweighs a rehearsal, which knows no kernel workspaces
    assert judge_by_fold(profile_of(MODEL, "cuda"), plan_with(*enough), RUN, cannot).notes == ()


def test_what_cannot_be_said_is_null_and_says_why() -> None:
    plan = Plan(3, (PlanStage(((0, 3),), (0,)),), Units(4, 1, 1), "1f1b", ranks=(PlanRank(capacity_bytes=9),))
    judged_plan = judge_by_fold(SHORT, plan, RUN)
    assert (judged_plan.fits, judged_plan.ranks[0].bytes) == (None, None)
    assert "memory model 'ranks' needs observations" in judged_plan.notes[0]
    with pytest.raises(CapslogError, match="the profile has 3 layers, the plan 6"):
        fold_plan(SHORT, plan_with(), RUN)
    low = dataclasses.replace(profile_of(MODEL, "cpu"), conditions={"limits": ["bfloat16"]})
    assert "the estimate is too low for bfloat16" in judge_by_fold(low, plan_with(9, 9), RUN).notes[0]


def test_the_host_tier_counts_where_it_is_the_same_memory() -> None:
    plan = plan_with(100, 100)
    for shared, fits in ((True, False), (False, True)):
        judged_plan = with_rank_bytes(plan, [90, 80], [11, 0], Headroom(), shared)
        assert (judged_plan.fits, [rank.host_bytes for rank in judged_plan.ranks]) == (fits, [11, None])


def test_a_host_tier_that_is_too_small_is_named_before_the_run() -> None:
    """`pipeline.host_capacity` was met in the middle of the first step only."""
    profile, offloading = profile_of(MODEL, "cpu"), (MemoryInterval(2, 4, "offload"),)
    stages = (STAGES[0], dataclasses.replace(STAGES[1], memory=offloading), STAGES[2])
    plan = dataclasses.replace(plan_with(), stages=stages)
    (_, size) = (rank_fold.host_bytes for rank_fold in fold_plan(profile, plan, RUN))
    assert size > 0
    assert judge_by_fold(profile, plan, RUN, tier=HostMemory(size)).fits is True
    judged_plan = judge_by_fold(profile, plan, RUN, tier=HostMemory(size - 1))
    assert (judged_plan.fits, judged_plan.shortfall) == (False, Shortfall(None, 1, rank=1))
    assert judged_plan.notes == (
        f"does not fit: rank 1 needs {format_bytes(size)} of the {format_bytes(size - 1)} that its host tier may hold "
        "(pipeline.host_capacity), 1 B too much; raise it, or offload fewer layers",
    )
    # on the CPU a tier in memory counts against the device's capacity, one in files does not
    peak = judge_by_fold(profile, plan, RUN).ranks[1].bytes
    limited = dataclasses.replace(plan, ranks=(PlanRank(), PlanRank(capacity_bytes=peak)))
    assert judge_by_fold(profile, limited, RUN).fits is False
    assert judge_by_fold(profile, limited, RUN, tier=HostMemory(in_files=True)).fits is True


def test_so_is_one_for_the_inputs_of_stages_that_a_search_has_found() -> None:
    profile, run = profile_of(MODEL, "cuda"), RunShape(8, "varuna", True, "host")
    plan = search(profile, 2, memory="ranks", run=run)
    most = max(rank_fold.host_bytes for rank_fold in fold_plan(profile, plan, run))
    assert within_tier(profile, plan, run, HostMemory(most)) == plan
    less = within_tier(profile, plan, run, HostMemory(most - 1))
    assert (less.fits, less.shortfall) == (False, Shortfall(0, 1, None))
    assert Plan.from_json(less.to_json()).fits is False


def test_the_search_and_the_simulation_show_the_fold() -> None:
    profile = seconds(profile_of(MODEL, "cuda"))
    plan = search(profile, 2, memory="ranks", run=RUN)
    peaks = [rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan, RUN)]
    assert (plan.memory_model, list(plan.stage_bytes or ())) == ("ranks", peaks)
    step = simulate_plan(profile, plan_with(), recompute=False)
    folds = fold_plan(profile, plan_with(), RUN)
    assert step.pipelines[0].rank_bytes == [rank_fold.peak_bytes for rank_fold in folds]
    assert step.to_json()["pipelines"][0]["rank_peak_bytes"] == step.pipelines[0].rank_bytes


def test_split_backwards_need_a_profile_that_tells_the_halves() -> None:
    """Without them no bytes are reported: the closed form of whole graphs would be too low."""
    profile, run = profile_of(Model.random(random.Random(3), 6, True), "cpu"), RunShape(8, "zb-h1", False)
    plan = search(profile, 3, run=run)
    assert (plan.memory_model, plan.fits, plan.peak_bytes) == ("ranks", True, max(plan.stage_bytes or ()))
    folded = [rank_fold.peak_bytes for rank_fold in fold_plan(profile, plan, run)]
    assert list(plan.stage_bytes or ()) == folded
    # the closed form that guides searches is as near as that of whole backwards
    unsplit = dataclasses.replace(plan, schedule="1f1b")
    least = [
        min(ours / rank_fold.peak_bytes for ours, rank_fold in zip(closed.peaks(plan.cut_list), exact, strict=True))
        for closed, exact in (
            (resolve("ranks", profile, run)[1], fold_plan(profile, plan, run)),
            (resolve("1f1b", profile, RUN)[1], fold_plan(profile, unsplit, RUN)),
        )
    ]
    assert least[0] >= least[1]
    rows = tuple(dataclasses.replace(row, weight_bytes=None) for row in profile.observations)
    old = dataclasses.replace(profile, observations=rows)
    unknown = search(old, 3, run=run)
    assert (unknown.fits, unknown.peak_bytes) == (None, None)
    assert "use memory model 'ranks'" in unknown.notes[0]
    with pytest.raises(CapslogError, match=r"needs weight_bytes of .* profile again with pipeline.schedule=zb-h1"):
        search(old, 3, memory="ranks", run=run)
