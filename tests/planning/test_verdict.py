"""The verdict: one record tells every command whether a plan fits, the missing bytes, and what would suffice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.asking import plan
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import MemoryVerdict, capacities_of_devices, judge, judge_plan, judge_rehearsal
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Shortfall, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile

TENTH = Headroom(3, 1.1)


def test_what_is_needed_is_the_peak_and_its_headroom() -> None:
    verdict = judge([10, 20, 30], [20, 25, 30], TENTH)
    assert verdict == MemoryVerdict((10, 20, 30), (14, 25, 36), (20, 25, 30))
    assert (verdict.margins, verdict.fits, verdict.worst, verdict.lacking) == ([6, 0, -6], False, 2, 6)
    assert verdict.need == "stage 2 needs 36 B of 30 B"
    assert verdict.shortfall(5) == Shortfall(2, 6, 5)
    assert verdict.sentence(5) == (
        "does not fit: stage 2 needs 36 B of 30 B, 6 B too much (30 B and its headroom); "
        "5 device(s) of 20 B would do with planner exact"
    )
    assert verdict.sentence(None).startswith("nothing fits: stage 2 needs 36 B of 30 B, 6 B too much (30 B and")
    assert "and no number of devices of 20 B, the smallest here, would do, since" in verdict.sentence(None)
    assert "; with planner p no number of devices of 20 B, the smallest here, would" in verdict.sentence(
        None, way="planner p"
    )
    alike = judge([1, 40], [30, 30], TENTH)
    assert alike is not None
    assert "and no number of devices would do, since" in alike.sentence(None)


def test_a_device_that_is_used_up_to_the_last_byte_fits() -> None:
    verdict = judge([10, 20], [14, 25], TENTH)
    assert verdict is not None
    assert (verdict.fits, verdict.lacking, min(verdict.margins)) == (True, 0, 0)


@pytest.mark.parametrize(("peaks", "capacities"), [(None, [1]), ([1], None), (None, None)])
def test_there_is_no_verdict_without_peaks_and_capacities(peaks: Any, capacities: Any) -> None:
    assert judge(peaks, capacities, Headroom()) is None


def test_capacities_are_one_number_or_one_for_each_device() -> None:
    assert capacities_of_devices(5, 2) == [5, 5]
    assert capacities_of_devices([5, 6], 2) == [5, 6]
    assert capacities_of_devices(None, 2) is None
    with pytest.raises(CapslogError, match="3 capacities for 2 devices"):
        capacities_of_devices([1, 2, 3], 2)


def profile_with_headroom() -> Profile:
    layers = [LayerProfile(f"l{i}", 10, 10 if i else None, forward_seconds=1.0, backward_seconds=2.0) for i in range(4)]
    return Profile(tuple(layers), conditions={"headroom": {"fixed_bytes": 3, "fragmentation": 1.1}})


def test_every_answer_about_one_plan_is_the_same_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Four places once decided whether a plan fits, and two more computed the margins that they did not show."""
    from varuna_capslog.commands.shared import print_plan

    profile = profile_with_headroom()
    for capacity in (25, 24):
        answer = plan(profile, 2, capacity=capacity)
        verdict = judge_plan(answer, profile)
        assert verdict is not None
        assert verdict.margins == [capacity - 25, capacity - 25]
        assert answer.fits is verdict.fits is (capacity == 25)
        (row,) = compare(Problem.of(profile, 2, capacity), ["exact"])
        assert row.margin_bytes == min(verdict.margins)
        print_plan(answer, profile)
        assert f" {capacity - 25:.2f} " in capsys.readouterr().out
        if not answer.fits:
            assert answer.shortfall == verdict.shortfall(4)
            assert verdict.need in answer.notes[0]


def test_the_table_of_a_plan_says_what_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    from varuna_capslog.commands.shared import print_plan

    first = PlanStage(((0, 2),), (0,), memory=(MemoryInterval(0, 1, "offload"), MemoryInterval(1, 2, "recompute")))
    print_plan(Plan(4, (first, PlanStage(((2, 4),), (1,))), Units(2, 1, 1), "gpipe"))
    shown = capsys.readouterr().out
    assert "memory" in shown
    assert "offload 0-0" in shown
    assert "recompute 1-1" in shown
    print_plan(Plan.of_cuts(4, (0, 2)))
    assert "memory" not in capsys.readouterr().out
    pieces = (PlanStage(((0, 2), (3, 4)), (0,)), PlanStage(((2, 3),), (1,)))
    print_plan(Plan(4, pieces, Units(2, 1, 1), "gpipe", routes="direct"))
    assert "0-1, 3" in capsys.readouterr().out


def test_a_plan_that_its_rehearsal_exceeds_does_not_fit() -> None:
    profile = profile_with_headroom()
    capacities: list[int] = []

    def find(capacity: int) -> Plan:
        capacities.append(capacity)
        return plan(profile, 2, capacity=capacity)

    answer = plan(profile, 2, capacity=30)
    assert answer.fits
    smaller = judge_rehearsal(answer, [19, 21], [1, 0], Headroom.of(profile), find)
    assert (smaller.fits, smaller.stage_bytes, smaller.peak_bytes, capacities) == (True, (19, 21), 21, [])
    larger = judge_rehearsal(answer, [19, 21], [1, 5], Headroom.of(profile), find)
    assert (larger.fits, larger.peak_bytes) == (False, 21)
    assert (larger.shortfall, capacities) == (Shortfall(1, 2, None), [28])
    assert larger.notes[-1] == "does not fit: stage 1 needs 32 B of 30 B when its own program is rehearsed"


def test_a_plan_of_a_profile_with_seconds_says_what_each_stage_takes(tmp_path: Path) -> None:
    answer = plan(profile_with_headroom(), 2)
    assert answer.stage_seconds == (6.0, 6.0)
    assert json.loads(json.dumps(answer.to_json()))["stage_seconds"] == [6.0, 6.0]
    bare = Profile(tuple(LayerProfile(f"l{i}", 10, 10 if i else None) for i in range(4)))
    assert plan(bare, 2).stage_seconds is None
