"""Real members, one of which lacks memory after the vote, while it updates its layers: no update is half applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe, truth_of
from tests.rig.faults import Fault
from varuna_capslog.elastic.host.terminal import describe as line_of
from varuna_capslog.start.choices import with_given_plan

TRAIN = {"optimizer": "rmsprop", "optimizer_args": {"momentum": 0.9}, "lr": 1e-3}
"""An optimizer that changes one parameter after the other, in several operations each."""

WAITING: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "num_layers": 11,
    "schedule": "1f1b",
    "units": {"per_step": 4, "samples": 2, "blocks": 2},
    "stages": [
        {"layers": [[0, 5]], "ranks": [0], "moments": [[2, 5, "host"]]},
        {"layers": [[5, 11]], "ranks": [1], "moments": [[5, 9, "host"]]},
    ],
}
"""The moments of most layers wait in the host tier."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return truth_of(tmp_path_factory.mktemp("undisturbed"), train=TRAIN)


@pytest.mark.parametrize(
    ("redundancy", "waits"), [(0, True), (1, False)], ids=["moments in the host tier", "a copy of every layer"]
)
def test_an_update_that_finds_no_memory_is_taken_back_and_made_again(
    cradle: Cradle, undisturbed: Truth, tmp_path: Path, redundancy: int, waits: bool
) -> None:
    """Memory runs out in the middle of the first update, before another update, in the middle and at the end of later
    ones. Where a copy of the member's layers has made the step, the others continue from it.
    """
    pipeline: dict[str, Any] = {}
    if waits:
        (tmp_path / "given.json").write_text(json.dumps(WAITING))
        pipeline = {"plan": str(tmp_path / "given.json"), "cuts": None}
    elastic = {"redundancy": redundancy}
    config = config_of(tmp_path / "run", 2, train=TRAIN, pipeline=pipeline, elastic=elastic)
    # how often m1 has come to the point by then: without copies it makes every step that failed once more
    first, middle, later, end, copy = (1, 3, 5, 4, 6) if redundancy else (1, 4, 7, 7, 10)
    faults = [Fault("m1", "applying", "starve", first, "500 7"), Fault("m1", "applying", "starve", middle, "500")]
    faults += [Fault("m1", "applying", "starve", later, "500 30"), Fault("m1", "changed", "starve", end, "500")]
    faults += [Fault("m1", "changed", "copy", copy)]
    outcome = Live(cradle, with_given_plan(config) if waits else config, faults=faults).finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    check(outcome, undisturbed)
    shortages = [
        (event["member"], event["step"], event["times"]) for event in outcome.events if event["kind"] == "memory"
    ]
    assert shortages == [("m1", step, 1) for step in (1, 3, 5, 7, 9)], describe(outcome)
    last = next(event for event in reversed(outcome.events) if event["kind"] == "memory")
    assert str(line_of(last)).startswith("m1 could not make step 9, which is made again: a copy to or from the host")
    assert outcome.kinds().count("morph") == 5, describe(outcome)
    assert "lost" not in outcome.kinds()
