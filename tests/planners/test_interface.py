"""`planners.plan`: one interface, what it predicts, and what it answers where nothing fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog import planners
from varuna_capslog.errors import CapslogError
from varuna_capslog.plan import Plan
from varuna_capslog.profiles import LayerProfile, Profile


def profile_of(isolated: list[int], added: list[int], **conditions: Any) -> Profile:
    rows = enumerate(zip(isolated, added, strict=True))
    layers = [LayerProfile(f"l{i}", alone, more if i else None) for i, (alone, more) in rows]
    return Profile(layers=tuple(layers), model="m", conditions=conditions)


COUNTEREXAMPLE = profile_of([5, 5, 10], [0, 1, 2])


def test_short_form_of_a_plan_without_capacity() -> None:
    plan = planners.plan(COUNTEREXAMPLE, 2, num_microbatches=4, microbatch_size=1)
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
    assert planners.plan(COUNTEREXAMPLE, 2, planner).peak_bytes == peak


def test_does_not_fit_is_an_answer() -> None:
    plan = planners.plan(profile_of([4, 4, 4], [0, 4, 4]), 2, capacity=7)
    assert plan.fits is False
    assert plan.peak_bytes == 8
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes, plan.shortfall.devices_that_fit) == (1, 1, 3)
    assert "stage 1 needs 8 B of 7 B" in plan.notes[0]


def test_no_number_of_devices_would_do() -> None:
    plan = planners.plan(profile_of([4, 9, 4], [0, 9, 4]), 3, capacity=8)
    assert plan.shortfall is not None
    assert plan.shortfall.devices_that_fit is None


def test_capacity_is_judged_per_device() -> None:
    uneven = profile_of([6, 2, 2], [0, 3, 2])
    assert planners.plan(uneven, 2, capacity=[6, 4]).fits is True
    plan = planners.plan(uneven, 2, capacity=[4, 6])
    assert plan.fits is False
    assert plan.capacity_bytes == (4, 6)
    assert planners.plan(uneven, 2, capacity=6e0).capacity_bytes == 6  # type: ignore[arg-type]
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes) == (0, 2)
    # The smallest peak, 9 on each device, does not fit; 12 and 6 do.
    layers = profile_of([6, 6, 6, 6], [0, 3, 3, 3])
    assert planners.plan(layers, 2).cuts == (0, 2)
    plan = planners.plan(layers, 2, capacity=[12, 6])
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
    plan = planners.plan(COUNTEREXAMPLE, 2, capacity=capacity, **options)
    assert plan.cuts == (0, 1)
    assert (plan.fits, plan.peak_bytes, plan.stage_bytes, plan.shortfall) == (None, None, None, None)
    assert needed in plan.notes[0]


def test_a_profile_of_another_microbatch_size_gives_no_number() -> None:
    plan = planners.plan(profile_of([5, 5], [0, 1], microbatch_size=1), 2, microbatch_size=2)
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
        ({"devices": 2, "stage_inputs": "disk"}, "stage_inputs is 'disk'"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CapslogError) as error:
        planners.plan(COUNTEREXAMPLE, **arguments)
    assert message in str(error.value)


def test_numbers_beyond_the_search_are_refused() -> None:
    with pytest.raises(CapslogError, match="1 EiB"):
        planners.plan(profile_of([1 << 60, 1], [0, 1]), 2)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from varuna_capslog import planners
from varuna_capslog.profiles import Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.plan import read_plan, write_plan
rows = [{"name": "a", "isolated_bytes": 3, "added_bytes": None}, {"name": "b", "isolated_bytes": 4, "added_bytes": 1}]
profile = Profile.from_json({"format": "varuna-capslog/profile/1", "layers": rows})
for name in planners.PLANNERS:
    write_plan("plan.json", planners.plan(profile, 2, name, capacity=9))
    read_plan("plan.json")
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "torchvision")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60, env=_path())


def _path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(planners.__file__).parents[2])}
