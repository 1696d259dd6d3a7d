"""A profile's reader refuses wrong types anywhere; a profile that it accepts can be planned and simulated."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from tests.planning.asking import plan
from tests.values import OF_ANY_TYPE, changed, each_place
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.planners import PLANNER_NAMES
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import SCHEDULES, RunShape

PARTS = {
    "static_bytes": 400,
    "saved_bytes": 60,
    "transient_bytes": 100,
    "forward_seconds": 0.5,
    "backward_seconds": 1.25,
}

FED: dict[str, Any] = {
    "format": "varuna-capslog/profile/2",
    "model": "three layers",
    "source": "measured",
    "conditions": {
        "device": "cpu",
        "microbatch_size": 1,
        "input": {"images": [3, 64, 64]},
        "recompute": True,
        "stage_inputs": "host",
        "accumulation_blocks": 1,
        "headroom": {"fixed_bytes": 3, "fragmentation": 1.5, "parts": {}},
        "limits": [],
        UPDATE_RATE: 1e-9,
    },
    "layers": [
        {"name": name, "isolated_bytes": 500, "added_bytes": added, "boundary_bytes": 20, "parameter_bytes": 100}
        | PARTS
        for name, added in (("stem", None), ("body", 100), ("head", 100))
    ],
    "shared": [{"name": "query", "bytes": 40, "layers": [0, 1]}],
    "observations": [
        {
            "layers": run,
            "device": "cpu",
            "microbatch_size": 1,
            "input": [3, 64, 64],
            "parallel": {"kind": "none", "degree": 1},
            "memory_action": "recompute",
            "peak_bytes": 500 * (run[1] - run[0]),
            "boundary_in_bytes": 20,
            "boundary_out_bytes": 20,
        }
        | PARTS
        for run in ([0, 1], [0, 2], [1, 2], [1, 3], [2, 3])
    ],
    "tensors": [{"name": "x", "bytes": 8, "gradient": True, "writer": 0, "readers": [1, 2]}],
}
"""A profile that every memory model and every planner can read."""


def runs() -> list[tuple[str, str, RunShape]]:
    """(planner, memory model, run): each planner with the model of the schedule, each model with one planner.

    mcap-bo reads the same stage costs as mcap-bf, and takes a second for each.
    """
    one_graph, several = RunShape(4), RunShape(4, "1f1b", recompute=False)
    cases = [(planner, AUTO, several) for planner in PLANNER_NAMES if planner != "mcap-bo"]
    for memory in MEMORY_MODELS:
        cases.append(("exact", memory, RunShape(4, memory, recompute=False) if memory in SCHEDULES else one_graph))
    return cases


@pytest.mark.parametrize("part", [name for name in FED if name != "format"])
def test_what_the_reader_accepts_can_be_planned_and_played(part: str) -> None:
    """Any other exception than CapslogError fails the test. Each profile is planned by a third of the planners."""
    planned = refused = 0
    done: set[str] = set()
    places = [path for path in each_place({part: FED[part]}) if path[1:2] not in [(2,), (3,), (4,)] or part == "layers"]
    for path, wrong in itertools.product(places, OF_ANY_TYPE):
        try:
            profile = Profile.from_json(changed(FED, *path, to=wrong))
        except CapslogError:
            refused += 1
            continue
        assert Profile.from_json(profile.to_json()) == profile
        if profile.digest in done:
            continue
        done.add(profile.digest)
        with warnings.catch_warnings():
            # 1e308 seconds are a number, but not twice as many.
            warnings.simplefilter("ignore", RuntimeWarning)
            for (planner, memory, run), capacity in zip(
                runs()[len(done) % 3 :: 3], itertools.cycle((None, 1000, [2000, 900])), strict=False
            ):
                try:
                    simulate_plan(profile, plan(profile, 2, planner, memory, capacity, run)).to_json()
                except CapslogError:
                    pass
                else:
                    planned += 1
    assert refused > 10
    assert planned > 3
