"""Plans of cuts: one interface, its predictions, and its answers where nothing fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planning import asking
from varuna_capslog import planners
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Observation, Profile, layers_of_runs
from varuna_capslog.schedules import RunShape


def profile_of(isolated: list[int], added: list[int], **conditions: Any) -> Profile:
    rows = enumerate(zip(isolated, added, strict=True))
    layers = [LayerProfile(f"l{i}", alone, more if i else None) for i, (alone, more) in rows]
    return Profile(layers=tuple(layers), model="m", conditions=conditions)


COUNTEREXAMPLE = profile_of([5, 5, 10], [0, 1, 2])


def test_short_form_of_a_plan_without_capacity() -> None:
    plan = asking.plan(COUNTEREXAMPLE, 2, run=RunShape(4, microbatch_size=1))
    assert plan.cuts == (0, 1)
    assert plan.stage_bytes == (5, 7)
    assert (plan.peak_bytes, plan.capacity_bytes, plan.fits, plan.shortfall) == (7, None, True, None)
    assert (plan.planner, plan.memory_model, plan.model, plan.schedule) == ("exact", "additive", "m", "varuna")
    assert plan.profile_digest == COUNTEREXAMPLE.digest
    assert plan.search_seconds is not None
    assert plan.search_seconds > 0
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("planner", "peak"), [("exact", 7), ("capslog", 10), ("varuna", 7)])
def test_every_planner_behind_one_interface(planner: str, peak: int) -> None:
    assert asking.plan(COUNTEREXAMPLE, 2, planner).peak_bytes == peak


def test_does_not_fit_is_an_answer() -> None:
    plan = asking.plan(profile_of([4, 4, 4], [0, 4, 4]), 2, capacity=7)
    assert plan.fits is False
    assert plan.peak_bytes == 8
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes, plan.shortfall.devices_that_fit) == (1, 1, 3)
    assert "stage 1 needs 8 B of 7 B" in plan.notes[0]


@pytest.mark.parametrize("planner", ["varuna", "gpipe-size", "capslog", "exact", "mcap-bf"])
def test_the_devices_that_would_do_are_those_of_the_planner_that_was_asked(planner: str) -> None:
    """A plan that did not fit told how many devices would do with another planner, and the next call answered with
    another number.
    """
    sizes, seen = [9, 4, 1, 1, 1, 5, 1, 9], set()
    layers = [
        LayerProfile(f"l{i}", size, size if i else None, static_bytes=0, saved_bytes=size)
        for i, size in enumerate(sizes)
    ]
    chain, names = Profile(tuple(layers)), set()
    for capacity in range(9, 24):
        plan = asking.plan(chain, 2, planner, capacity=capacity)
        if plan.shortfall is None or plan.shortfall.devices_that_fit is None:
            continue
        enough = plan.shortfall.devices_that_fit
        how, _, named = plan.notes[0].rpartition(" ")
        assert how.endswith(f"; {enough} device(s) of {capacity} B would do with planner")
        fits = [asking.plan(chain, count, named, capacity=capacity).fits for count in range(1, enough + 1)]
        assert fits == [False] * (enough - 1) + [True]
        seen.add(enough)
        names.add(named)
    assert len(seen) > 1
    assert names == {"exact" if planner == "mcap-bf" else planner}, "mcap-bf would search long"


def test_no_number_of_devices_would_do() -> None:
    plan = asking.plan(profile_of([4, 9, 4], [0, 9, 4]), 3, capacity=8)
    assert plan.shortfall is not None
    assert plan.shortfall.devices_that_fit is None


def test_capacity_is_judged_per_device() -> None:
    uneven = profile_of([6, 2, 2], [0, 3, 2])
    assert asking.plan(uneven, 2, capacity=[6, 4]).fits is True
    plan = asking.plan(uneven, 2, capacity=[4, 6])
    assert plan.fits is False
    assert plan.capacity_bytes == (4, 6)
    assert asking.plan(uneven, 2, capacity=6e0).capacity_bytes == 6  # type: ignore[arg-type]
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes) == (0, 2)
    # The smallest peak, 9 on each device, does not fit; 12 and 6 do.
    layers = profile_of([6, 6, 6, 6], [0, 3, 3, 3])
    assert asking.plan(layers, 2).cuts == (0, 2)
    plan = asking.plan(layers, 2, capacity=[12, 6])
    assert plan.cuts == (0, 3)
    assert plan.fits is True


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"schedule": "1f1b", "recompute": False}, "memory model '1f1b'"),
        ({"schedule": "gpipe", "recompute": False}, "memory model 'gpipe'"),
        ({"stage_inputs": "device"}, "memory model 'varuna'"),
    ],
)
@pytest.mark.parametrize("capacity", [None, 5])
def test_no_number_without_a_memory_model(options: dict[str, Any], needed: str, capacity: int | None) -> None:
    plan = asking.plan(COUNTEREXAMPLE, 2, capacity=capacity, run=RunShape(**options))
    assert plan.cuts == (0, 1)
    assert (plan.fits, plan.peak_bytes, plan.stage_bytes, plan.shortfall) == (None, None, None, None)
    assert needed in plan.notes[0]


def test_a_profile_of_another_microbatch_size_gives_no_number() -> None:
    plan = asking.plan(profile_of([5, 5], [0, 1], microbatch_size=1), 2, run=RunShape(microbatch_size=2))
    assert plan.peak_bytes is None
    assert "microbatch_size 1, not 2" in plan.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 4}, "4 devices but only 3 layers"),
        ({"devices": 0}, "devices is 0"),
        ({"devices": 2, "planner": "exat"}, "unknown planner 'exat'; did you mean 'exact'"),
        ({"devices": 2, "memory": "aditive"}, "unknown memory model 'aditive'; did you mean 'additive'"),
        ({"devices": 2, "capacity": [1, 2, 3]}, "3 capacities for 2 devices"),
        ({"devices": 2, "capacity": 0}, "capacity is 0"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CapslogError) as error:
        asking.plan(COUNTEREXAMPLE, **arguments)
    assert message in str(error.value)


def test_an_impossible_run_is_refused() -> None:
    with pytest.raises(CapslogError, match="stage_inputs is 'disk'"):
        RunShape(stage_inputs="disk")
    with pytest.raises(CapslogError, match="the number of microbatches of a step is not known"):
        RunShape().share(2)


def test_numbers_beyond_the_search_are_refused() -> None:
    with pytest.raises(CapslogError, match="1 EiB"):
        asking.plan(profile_of([1 << 60, 1], [0, 1]), 2)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from varuna_capslog import planners
from tests.planning import asking
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.plans.plan import read_plan, write_plan
rows = [{"name": "a", "isolated_bytes": 3, "added_bytes": None}, {"name": "b", "isolated_bytes": 4, "added_bytes": 1}]
profile = Profile.from_json({"format": "varuna-capslog/profile/1", "layers": rows})
for name in planners.PLANNERS:
    write_plan("plan.json", asking.plan(profile, 2, name, capacity=9))
    read_plan("plan.json")
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "torchvision")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=180, env=_path())


def observed_profile(headroom: dict[str, Any] | None = None, source: str | None = None) -> Profile:
    """Three layers that keep 2, 4 and 8 bytes and hold 1 byte each; no transients. A pair keeps the sum of both."""
    saved, rows = [2, 4, 8], []
    for first, end in [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]:
        kept = sum(saved[first:end])
        parts = {"static_bytes": end - first, "saved_bytes": kept, "boundary_in_bytes": 1, "boundary_out_bytes": 1}
        rows.append(Observation((first, end), "cuda", 1, [1], end - first + kept, memory_action="none", **parts))  # type: ignore[arg-type]
    conditions = {} if headroom is None else {"headroom": headroom}
    return Profile(
        layers=layers_of_runs(["a", "b", "c"], rows), source=source, conditions=conditions, observations=tuple(rows)
    )


@pytest.mark.parametrize(
    ("options", "model", "stage_bytes"),
    [
        ({}, "varuna", (8, 9)),
        ({"run": RunShape(4, "1f1b", False)}, "1f1b", (5, 14)),
        ({"run": RunShape(4, "gpipe", False)}, "gpipe", (26, 33)),
        ({"run": RunShape(schedule="1f1b", stage_inputs="device")}, "1f1b", (9, 9)),
        ({"memory": "additive"}, "additive", (8, 9)),
        ({"memory": "composition"}, "composition", (8, 9)),
    ],
)
def test_the_default_model_is_the_schedules_own(options: Any, model: str, stage_bytes: tuple[int, ...]) -> None:
    plan = asking.plan(observed_profile(), 2, **options)
    assert (plan.memory_model, plan.stage_bytes, plan.fits) == (model, stage_bytes, True)
    assert plan.notes == ()


@pytest.mark.parametrize("planner", ["varuna", "capslog", "capslog-tb", "mcap-bf", "exact"])
def test_every_planner_plans_for_every_model(planner: str) -> None:
    for schedule in ("varuna", "1f1b", "gpipe"):
        plan = asking.plan(observed_profile(), 2, planner, run=RunShape(2, schedule, False))
        assert plan.peak_bytes is not None
        assert plan.peak_bytes >= (asking.plan(observed_profile(), 2, run=RunShape(2, schedule, False)).peak_bytes or 0)


def test_shortfall_of_a_schedules_model() -> None:
    """Two stages of 5 and 14 bytes; on three devices the first one holds three graphs of 2: 7, 9, 9."""
    run = RunShape(4, "1f1b", False)
    plan = asking.plan(observed_profile(), 2, capacity=13, run=run)
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes, plan.shortfall.devices_that_fit) == (1, 1, 3)
    assert asking.plan(observed_profile(), 3, capacity=13, run=run).stage_bytes == (7, 9, 9)
    assert asking.plan(observed_profile(), 3, capacity=13, run=run).fits is True


def test_given_cuts_are_predicted_and_judged() -> None:
    plan = asking.plan(observed_profile(), 2, cuts=[0, 1], capacity=13)
    assert (plan.planner, plan.cuts, plan.stage_bytes, plan.fits) == (None, (0, 1), (3, 14), False)
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.devices_that_fit) == (1, 2)
    assert plan.search_seconds is None
    for cuts, message in (
        ([0], "give the first layer of each device's stage"),
        ([0, 1, 2], "give the first layer of each device's stage"),
        ([1, 2], "it must begin with 0"),
        ([0, 0], "0 follows 0, but cuts must rise"),
        ([0, 3], "no stage can begin at 3, the last layer is 2"),
    ):
        with pytest.raises(CapslogError, match=message):
            asking.plan(observed_profile(), 2, cuts=cuts)


def test_what_is_reserved_is_compared_with_the_capacity() -> None:
    """Stages of 8 and 9 bytes reserve 1.5 times as much and 100 bytes: 112 and ceil(13.5) + 100 = 114."""
    profile = observed_profile({"fixed_bytes": 100, "fragmentation": 1.5})
    assert asking.plan(profile, 2, capacity=114).fits is True
    plan = asking.plan(profile, 2, capacity=113)
    assert (plan.fits, plan.stage_bytes) == (False, (8, 9))
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes, plan.shortfall.devices_that_fit) == (1, 1, None)
    assert "stage 1 needs 114 B of 113 B, 1 B too much (9 B and its headroom)" in plan.notes[0]
    assert asking.plan(profile, 2, capacity=50).fits is False
    for headroom, message in [
        ({"fragmentation": 0.9}, "fragmentation is 0.9"),
        ({"fixed_bytes": -1}, "fixed_bytes is -1"),
        ({"fixd_bytes": 1}, "did you mean 'fixed_bytes'"),
    ]:
        with pytest.raises(CapslogError, match=message):
            asking.plan(observed_profile(headroom), 2)


def _path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(planners.__file__).parents[2])}
