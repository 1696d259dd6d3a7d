"""Moments in the host tier: only for devices that are too small otherwise, and as few as possible."""

from __future__ import annotations

import dataclasses

import pytest

from tests.memory.test_truth import Wide
from tests.planning.asking import layerwise_plan
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.budget import BudgetSearch
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.fastest import all_away
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.verdict import HostMemory, fold_plan, judge_by_fold
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import estimate_workload
from varuna_capslog.schedules import RunShape

RUN = RunShape(4, "auto")
LINK = Link(host_bandwidth=1e9)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Return an estimate without headroom and lasting bytes, which on a GPU exceed the stages by far."""
    estimate = estimate_workload(Wide(), RunConditions(microbatch_size=2, device="cuda"))
    kept = {name: value for name, value in estimate.conditions.items() if name != "headroom"}
    actions = (dataclasses.replace(row.action_bytes, lasting_bytes=None) for row in estimate.observations)
    rows = (
        dataclasses.replace(row, action_bytes=action_bytes)
        for row, action_bytes in zip(estimate.observations, actions, strict=True)
    )
    return dataclasses.replace(estimate, conditions=kept, observations=tuple(rows))


def planned(profile: Profile, devices: int, capacity: int, tier: HostMemory | None = None) -> Plan:
    return layerwise_plan(profile, devices, "budget", capacity, RUN, LINK, tier)


def fits(profile: Profile, plan: Plan) -> bool:
    return judge_by_fold(profile, plan, dataclasses.replace(RUN, schedule=plan.schedule or "1f1b")).fits is True


def smallest(profile: Profile, devices: int, all_moments_away: bool) -> int:
    """Return the smallest capacity for which a plan that recomputes whole stages fits."""
    plan = planned(profile, devices, 1)
    if not all_moments_away:
        plan = dataclasses.replace(plan, stages=tuple(dataclasses.replace(stage, moments=()) for stage in plan.stages))
    run = dataclasses.replace(RUN, schedule=plan.schedule or "1f1b")
    return max(fold.peak_bytes for fold in fold_plan(profile, plan, run))


@pytest.mark.parametrize("devices", some([1, 2], 1))
def test_a_device_that_is_too_small_keeps_as_much_as_it_has_room_for(profile: Profile, devices: int) -> None:
    least, most = (smallest(profile, devices, away) for away in (True, False))
    assert least < 0.9 * most
    seen = set()
    for tenth in (1, 4, 8):
        capacity = least + (most - least) * tenth // 10
        plan = planned(profile, devices, capacity)
        assert fits(profile, plan)
        waiting = [(number, layer) for number, stage in enumerate(plan.stages) for layer in stage.moments_away]
        seen.add(len(waiting))
        for number, layer in waiting:
            stage = plan.stages[number]
            other_layers = [other_layer for other_layer in sorted(stage.moments_away) if other_layer != layer]
            less = dataclasses.replace(
                stage,
                moments=tuple(MemoryInterval(other_layer, other_layer + 1, "host") for other_layer in other_layers),
            )
            stages = (*plan.stages[:number], less, *plan.stages[number + 1 :])
            assert not fits(profile, dataclasses.replace(plan, stages=stages)), "there is room for one more"
    assert len(seen) > 2
    assert not any(stage.moments for stage in planned(profile, devices, 2 * most).stages)


def test_searches_share_the_bytes_of_a_profile_but_not_those_with_waiting_moments(profile: Profile) -> None:
    run = dataclasses.replace(RUN, schedule="1f1b")
    first, second = (Layerwise.of_profile(profile, run, 1, usable, LINK) for usable in (None, [1]))
    assert second.peak is first.peak
    assert first.with_waiting_moments().peak(0, 0, 5, ()) < first.peak(0, 0, 5, ())
    assert RangeBytes.of_ranks(dataclasses.replace(profile), True) is not RangeBytes.of_ranks(profile, True)


def test_a_search_with_waiting_moments_shares_the_table_where_no_stage_is_left_out(
    profile: Profile,
) -> None:
    """Questions without an answer made it twice, which took half as long again."""
    chain = Layerwise.of_profile(profile, dataclasses.replace(RUN, schedule="1f1b"), 1, [1], LINK)
    assert chain.question is not None
    whole = chain.question.ranges.resident(range(chain.num_layers))

    def tables(most: float) -> set[int]:
        chains = chain, chain.with_waiting_moments()
        return {id(BudgetSearch(row, most_bytes=most)._options(row).interval_searches[0]._table) for row in chains}

    assert (len(tables(whole)), len(tables(whole - 1))) == (1, 2)


def test_the_copies_count_in_the_step(profile: Profile) -> None:
    stage = PlanStage(((0, 5),), (0,), memory=())
    plan = Plan(5, (stage,), planned(profile, 1, 1 << 40).units, "1f1b")
    run = dataclasses.replace(RUN, schedule="1f1b")
    away = all_away(plan)
    (fold,) = fold_plan(profile, away, run)
    device_seconds, host_seconds = (
        with_step_seconds(profile, candidate, run, LINK).step_seconds for candidate in (plan, away)
    )
    assert device_seconds is not None
    assert host_seconds is not None
    assert host_seconds - device_seconds == pytest.approx(2 * fold.moved_bytes / 1e9)
    assert fold.host_bytes == fold.moved_bytes > 1e6


def test_on_a_cpu_whose_tier_is_its_own_memory_nothing_waits_there(profile: Profile) -> None:
    rows = [dataclasses.replace(row, device="cpu") for row in profile.observations]
    ours = dataclasses.replace(profile, observations=tuple(rows))
    capacity = (smallest(profile, 1, True) + smallest(profile, 1, False)) // 2
    assert not any(stage.moments for stage in planned(ours, 1, capacity).stages)
    assert any(stage.moments for stage in planned(ours, 1, capacity, HostMemory(in_files=True)).stages)


def test_a_profile_that_does_not_tell_moments_is_one_sentence(profile: Profile) -> None:
    rows = []
    for row in profile.observations:
        assert row.action_bytes is not None
        rows.append(dataclasses.replace(row, action_bytes=dataclasses.replace(row.action_bytes, moment_bytes=None)))
    older = dataclasses.replace(profile, observations=tuple(rows))
    assert not any(stage.moments for stage in planned(older, 1, 1).stages)
    plan = all_away(Plan(5, (PlanStage(((0, 5),), (0,)),), planned(older, 1, 1 << 40).units, "1f1b"))
    with pytest.raises(CapslogError, match=r"does not say what the optimizer keeps of each layer \(moment_bytes\)"):
        fold_plan(older, plan, dataclasses.replace(RUN, schedule="1f1b"))
    with pytest.raises(CapslogError, match=r"does not say what the optimizer keeps of layer 0 \(moment_bytes\)"):
        with_step_seconds(older, plan, dataclasses.replace(RUN, schedule="1f1b"), LINK)
    assert Headroom.of(older) == Headroom()
