"""Real members that run plans of any rectangles, and change from one to another: the bits of the uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.elastic.live import Cradle, Live, Outcome, Truth, check, config_of, describe
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.rig.faults import Fault
from varuna_capslog.start.given_plan import with_given_plan

REPLICATED_MIDDLE: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "num_layers": 11,
    "schedule": "varuna",
    "units": {"per_step": 4, "samples": 2, "blocks": 2},
    "stages": [
        {"layers": [[0, 3]], "ranks": [1], "memory": [[0, 3, "recompute"]]},
        {"layers": [[3, 8]], "ranks": [0], "blocks": [0], "memory": [[3, 8, "recompute"]]},
        {"layers": [[3, 8]], "ranks": [2], "blocks": [1], "memory": [[3, 8, "recompute"]]},
        {"layers": [[8, 11]], "ranks": [1], "memory": [[8, 11, "recompute"]]},
    ],
}
"""Both ends on rank 1, the middle in two replicas."""
THREE_AND_ONE: dict[str, Any] = REPLICATED_MIDDLE | {
    "stages": [
        {"layers": [[0, 11]], "ranks": [2], "blocks": [0], "memory": [[0, 11, "recompute"]]},
        {"layers": [[8, 11]], "ranks": [0], "blocks": [1], "memory": [[8, 11, "recompute"]]},
        {"layers": [[0, 3]], "ranks": [3], "blocks": [1], "memory": [[0, 3, "recompute"]]},
        {"layers": [[3, 8]], "ranks": [1], "blocks": [1], "memory": [[3, 8, "recompute"]]},
    ]
}
"""A pipeline of a single stage and one of three."""


def planned(folder: Path, plan: dict[str, Any], **sections: Any) -> Config:
    path = folder / "given.json"
    path.write_text(json.dumps(plan))
    pipeline = {"plan": str(path), "cuts": None} | sections.pop("pipeline", {})
    return with_given_plan(config_of(folder / "run", 1, pipeline=pipeline, **sections))


def ways_of(outcome: Outcome) -> list[Any]:
    """What every generation was told to run, by its event."""
    return [event.get("ways", event["cuts"]) for event in outcome.events if event["kind"] in ("start", "morph")]


def test_a_run_begins_with_rectangles_loses_a_member_and_gets_another(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """One of the replicas of the middle is killed in a step; the planner cuts for the two that are left; with a new
    third one the given plan runs again, its stages on other members.
    """
    config = planned(tmp_path, REPLICATED_MIDDLE)
    faults = [Fault("m0", "action 5", count=4), Fault("m2", "compute", "wait", 8, "eight")]
    live = Live(cradle, config, faults=faults)
    live.when("eight")
    live.until_asked(live.join())
    live.go("eight")
    outcome = live.finish()
    assert outcome.status == {"m0": -9, "m1": 0, "m2": 0, "m3": 0}, describe(outcome)
    check(outcome, truth)
    first, second, third = ways_of(outcome)
    assert first == third == [[0, 3, 8], [0, 3, 8]], describe(outcome)
    assert len(second) == 2, describe(outcome)
    assert len(outcome.rows) - len(outcome.accepted()) <= 1, describe(outcome)
    plans = [read_plan(path) for path in sorted((config.run_dir).glob("plan-*.json"))]
    assert [len(plan.stages) for plan in plans] == [4, 2, 4]


def test_a_pipeline_of_one_stage_beside_one_of_three_leaves_at_a_notice(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """The pipeline of a single stage leaves: all its layers are on the others, which are cut anew."""
    config = planned(tmp_path, THREE_AND_ONE)
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.leave("m2")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("four")
    outcome = live.finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    check(outcome, truth)
    assert ways_of(outcome)[0] == [[0], [0, 3, 8]]
