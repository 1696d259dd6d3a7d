"""Real members that run plans of any rectangles, and change between them: the bits equal the uninterrupted run's."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.live import Cradle, Live, Outcome, Truth, check, config_of, describe, truth_of
from tests.rig.faults import Fault
from varuna_capslog import cli
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.host.terminal import describe as line_of
from varuna_capslog.plans.plan import Plan, pipelines_of, read_plan, write_plan
from varuna_capslog.profiling.estimation import rates
from varuna_capslog.schedules import schedule_of, to_strings
from varuna_capslog.start.choices import with_given_plan

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


@pytest.fixture(scope="module")
def kept_profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that keeps the estimates of this file for its other tests."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(autouse=True)
def one_processor(kept_profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate for the same processor on every machine, since the fastest plan depends on the processor's speed."""
    monkeypatch.setattr(
        rates, "calibrated_cpu", lambda threads: rates.cpu_speed("a processor", 1e11, 1e11, 1e10, 4.4e-6)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept_profiles))


def planned(folder: Path, plan: dict[str, Any], **sections: Any) -> Config:
    path = folder / "given.json"
    path.write_text(json.dumps(plan))
    pipeline = {"plan": str(path), "cuts": None} | sections.pop("pipeline", {})
    return with_given_plan(config_of(folder / "run", 1, pipeline=pipeline, **sections))


def ways_of(outcome: Outcome) -> list[Any]:
    """Return the plan's paths of every generation, from its event."""
    return [event.get("ways", event["cuts"]) for event in outcome.events if event["kind"] in ("start", "morph")]


def test_a_run_begins_with_rectangles_loses_a_member_and_gets_another(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """A replica of the middle stage is killed in a step; the planner finds cuts for the remaining two members; with a
    new third member the given plan runs again, its stages on other members.
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


def with_actions(value: dict[str, Any]) -> dict[str, Any]:
    """Return the plan with an order of its own for every rank: all forwards first, unlike the config's schedule."""
    rows = schedule_of("gpipe", Plan.from_json(value).stage_graph(), True)
    return {name: part for name, part in value.items() if name != "schedule"} | {"actions": to_strings(rows)}


@pytest.mark.parametrize("plan", [THREE_AND_ONE, with_actions(THREE_AND_ONE)], ids=["schedule", "actions"])
def test_a_pipeline_of_one_stage_beside_one_of_three_leaves_at_a_notice(
    cradle: Cradle, truth: Truth, tmp_path: Path, plan: dict[str, Any]
) -> None:
    """The pipeline of a single stage leaves: the others hold all its layers and get new cuts. Only the given plan has
    actions: the plan that follows has the config's schedule.
    """
    config = planned(tmp_path, plan)
    # m2 runs two microbatches: by the config's schedule each backward follows its forward, four instructions in all
    fifth = Fault("m2", "action 4", "wait", 1, "fifth")
    faults = [Fault("m0", "compute", "wait", 4, "four"), *([fifth] if "actions" in plan else [])]
    live = Live(cradle, config, faults=faults)
    if "actions" in plan:
        live.when("fifth")
        live.go("fifth")
    live.when("four")
    live.leave("m2")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("four")
    outcome = live.finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    check(outcome, truth)
    assert ways_of(outcome)[0] == [[0], [0, 3, 8]]


@pytest.mark.parametrize("seed", ["one", "two"])
def test_from_one_drawn_plan_to_another_in_the_same_processes(
    cradle: Cradle, truth: Truth, tmp_path: Path, seed: str
) -> None:
    """Each founder draws a random plan, which no other member could compute. After changes without a loss, a leave with
    copies made ahead, a kill in a step, and a join, the results are those of an undisturbed run.
    """
    faults = [Fault("m0", "compute", "wait", at, f"step {at}") for at in (3, 5, 7, 9, 11)]
    live = Live(cradle, config_of(tmp_path, 4), faults=faults, plans=seed)
    for at in (3, 5):
        live.when(f"step {at}")
        live.shake(live.generation().number)
        live.go(f"step {at}")
    live.when("step 7")
    live.leave("m3")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("step 7")
    live.when("step 9")
    live.signal("m2", signal.SIGKILL)
    live.go("step 9")
    live.when("step 11")
    live.until_asked(live.join())
    live.go("step 11")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": -9, "m3": 0, "m4": 0}, describe(outcome)
    check(outcome, truth)
    founded = [entry["record"] for entry in live.log if entry["kind"] == "generation"]
    assert len(founded) >= 5, describe(outcome)
    plans = {record["number"]: Plan.from_json(record["plan"]) for record in founded}
    assert len({json.dumps(plan.to_json()) for plan in plans.values()}) == len(plans)
    written = {int(path.stem.removeprefix("plan-")) + 1: read_plan(path) for path in tmp_path.glob("plan-*.json")}
    del written[1]  # the plan from before the run began
    assert len(written) >= 3, describe(outcome)
    for number, plan in written.items():
        assert plan == plans[number] or pipelines_of(plan) == (pipelines_of(plans[number]) or ((), 0)), number


def test_what_a_drawn_plan_moves_is_copied_ahead_of_a_leave(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    """Regression: the members copied the layers of the planner's layout; those of the drawn plan moved in the pause."""
    live = Live(cradle, config_of(tmp_path, 4), faults=[Fault("m0", "compute", "wait", 4, "four")], plans="three")
    live.when("four")
    live.leave("m3")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("four")
    outcome = live.finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    check(outcome, truth)
    (leave,) = [event for event in outcome.events if event["kind"] == "morph"]
    assert (leave["why"], leave["moved_bytes"]) == (["m3 left"], 0), describe(outcome)


def test_a_run_of_joint_plans_uses_every_number_of_devices(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    """Three devices in two blocks form a pipeline of one stage and one of two, also after a leave and a join. The
    record carries the founder's plan, and the files hold the plans that were run with their predictions.
    """
    pipeline = {"devices": 3, "cuts": None, "planner": "joint"}
    config = config_of(tmp_path, 1, pipeline=pipeline, profile={"source": "estimated"})
    faults = [Fault("m0", "compute", "wait", at, f"step {at}") for at in (4, 8)]
    live = Live(cradle, config, faults=faults)
    live.when("step 4")
    live.leave("m1")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("step 4")
    live.when("step 8")
    live.until_asked(live.join())
    live.go("step 8")
    outcome = live.finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    check(outcome, truth)
    lengths = [
        sorted(len(way) for way in event.get("ways", [event["cuts"]])) for event in outcome.events if "cuts" in event
    ]
    assert lengths[0] == lengths[2] == [1, 2], describe(outcome)
    assert all(event["idle"] == 0 for event in outcome.events if "idle" in event), describe(outcome)
    founded = [entry["record"] for entry in live.log if entry["kind"] == "generation"]
    assert "plan" not in founded[0]
    for record in founded[1:]:
        assert set(Plan.from_json(record["plan"]).placement()) == set(range(len(record["members"])))
    plans = [read_plan(path) for path in sorted(tmp_path.glob("plan-*.json"))]
    assert [plan.step_seconds is not None and plan.peak_bytes is not None for plan in plans[::2]] == [True, True]
    assert [plan.planner for plan in plans[::2]] == ["joint", "joint"]


def test_a_run_that_has_grown_is_evaluated_and_reported_by_its_last_plan(
    forked_servers: None, cradle: Cradle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run begins with two devices and ends with three, in pipelines of one stage and of two. The scores equal those
    of a single device.
    """
    pipeline = {"devices": 2, "cuts": None, "planner": "joint"}
    config = config_of(tmp_path / "run", 1, steps=12, pipeline=pipeline, profile={"source": "estimated"})
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 3, "three")])
    live.when("three")
    live.until_asked(live.join())
    live.go("three")
    outcome = live.finish()
    assert outcome.rows[-1]["world_size"] == 3, describe(outcome)
    newest = max(int(path.stem.removeprefix("plan-")) for path in (tmp_path / "run").glob("plan-*.json"))
    assert read_plan(tmp_path / "run" / f"plan-{newest}.json").num_ranks == 3
    assert cli._run(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert cli._run(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "[0] + [0, " in page
    write_plan(tmp_path / "run" / f"plan-{newest + 1}.json", Plan.of_cuts(11, (0,), model="tiny"))
    capsys.readouterr()
    assert cli._run(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == scores


AUTO = 200_000
BUDGET = 126_000
"""Bytes: one device holds the tiny model with its snapshot only where two layers run again."""


def test_four_devices_become_one_by_kills_and_four_again_without_waiting(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """The plan of the last member was searched ahead by a member that may be dead, and the record carries it."""
    pipeline = {"cuts": None, "planner": "budget", "schedule": "auto", "capacity": f"{BUDGET}B"}
    config = config_of(tmp_path, 4, pipeline=pipeline, profile={"source": "estimated"})
    # the computation at which each member is killed; the others repeat the step under way
    begun = {"m0": 3, "m1": 5, "m2": 7, "m3": 10}
    live = Live(cradle, config, faults=[Fault(member, "compute", "wait", at, member) for member, at in begun.items()])
    for generation, (step, member) in enumerate(((3, "m0"), (4, "m1"), (5, "m2"))):
        live.when(member)
        live.until_planned(generation)
        live.signal(member, signal.SIGKILL)
        live.reaches(step)
    live.when("m3")
    for _ in range(3):
        live.until_asked(live.join())
    live.go("m3")
    outcome = live.finish()
    assert outcome.status == {"m0": -9, "m1": -9, "m2": -9, "m3": 0, "m4": 0, "m5": 0, "m6": 0}, describe(outcome)
    check(outcome, truth)
    changes = [event for event in outcome.events if event["kind"] in ("start", "morph")]
    assert "waiting" not in outcome.kinds(), describe(outcome)
    assert [len(event["members"]) for event in changes] == [4, 3, 2, 1, 4], describe(outcome)
    assert changes[3]["recomputed_layers"] == 2, describe(outcome)
    assert changes[4]["cuts"] == changes[0]["cuts"]
    seconds = [event["planned_step_seconds"] for event in changes]
    assert seconds == sorted(seconds[:4]) + seconds[:1], "slower with every loss, and as at first in the end"
    assert changes[3]["planned_step_ratio"] == pytest.approx(seconds[3] / seconds[2])
    slower = f"a planned step is {changes[3]['planned_step_ratio']:.2f} times the one before, layers 2 recomputed"
    assert f"goes on slower: {slower}" in str(line_of(changes[3]))
    assert "goes on faster" in str(line_of(changes[4]))
    records = [entry["record"] for entry in live.log if entry["kind"] == "generation"]
    alone = next(Plan.from_json(record["plan"]) for record in records if len(record["members"]) == 1)
    assert alone.stages[0].memory
    written = [read_plan(path) for path in sorted(tmp_path.glob("plan-*.json"))]
    # two pipelines of one stage are faster than one pipeline on three ranks, the third of which keeps only copies
    assert [plan.num_ranks for plan in written[1:4]] == [2, 2, 1]
    assert changes[4]["replicas"] == changes[0]["replicas"]
    for plan in written:
        # None: equal pipelines without memory intervals, which are as fast on some processors
        assert plan.planner in ("budget", None)
        assert plan.fits
        assert (plan.peak_bytes or BUDGET) < BUDGET, "snapshots lie beside it"


def test_planner_auto_chooses_anew_at_a_kill_and_the_record_carries_it(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """Three members, two after a kill, three again: the same bits, by plans that no other member has searched."""
    pipeline = {"cuts": None, "planner": "auto", "schedule": "auto", "capacity": f"{AUTO}B"}
    config = config_of(tmp_path, 3, pipeline=pipeline, profile={"source": "estimated"})
    waits = [Fault(member, "compute", "wait", at, member) for member, at in (("m0", 4), ("m1", 9))]
    live = Live(cradle, config, faults=waits)
    live.when("m0")
    live.signal("m0", signal.SIGKILL)
    live.when("m1")
    live.until_asked(live.join())
    live.go("m1")
    outcome = live.finish()
    assert outcome.status == {"m0": -9, "m1": 0, "m2": 0, "m3": 0}, describe(outcome)
    check(outcome, truth)
    assert "waiting" not in outcome.kinds(), describe(outcome)
    records = [entry["record"] for entry in live.log if entry["kind"] == "generation"]
    carried = [None if record.get("plan") is None else Plan.from_json(record["plan"]) for record in records]
    assert [len(record["members"]) for record in records] == [3, 2, 3]
    assert carried[0] is None, "the run began with the plan of its folder"
    forms = [read_plan(path) for path in sorted(tmp_path.glob("plan-*.json"))]
    # a plan by cuts is written once for all its pipelines, the record has the stages of every rank
    written, sent = ([{stage.layers for stage in plan.stages} for plan in plans if plan] for plans in (forms, carried))
    assert written[1:] == sent
    assert all(plan.units.blocks == 2 for plan in (forms[0], *filter(None, carried)) if plan.units)
    for plan in forms:
        assert plan.fits
        assert (plan.peak_bytes or AUTO) < AUTO, "snapshots and copies lie beside it"
    assert any(pipelines_of(plan) is None and plan.actions is not None for plan in forms), "replicas of single stages"


def test_a_member_that_becomes_slow_is_given_fewer_layers_with_the_same_bits(cradle: Cradle, tmp_path: Path) -> None:
    """From its third step on the work of a member takes twenty times as long; `balance.WINDOW` steps later a plan for
    this speed begins, prepared beside the training. No member leaves, and no step is computed twice.
    """
    (tmp_path / "alone").mkdir()
    (tmp_path / "two").mkdir()
    steps = 24
    pipeline = {"cuts": None, "planner": "budget", "schedule": "1f1b"}
    profile, elastic = {"source": "estimated"}, {"rebalance": True}
    config = config_of(tmp_path / "two", 2, steps=steps, pipeline=pipeline, profile=profile, elastic=elastic)
    slow = Fault("m1", "action 1", "slow", 3, "20")
    outcome = Live(cradle, config, faults=[slow]).finish()
    assert set(outcome.status.values()) == {0}, describe(outcome)
    check(outcome, truth_of(tmp_path / "alone", steps), steps)
    assert len(outcome.rows) == steps, "no step was made twice"
    finding = next(event for event in outcome.events if event["kind"] == "rebalance")
    assert finding["member"] == "m1", describe(outcome)
    assert finding["slower"] > 5
    assert finding["speeds"]["m1"] < 0.3
    assert finding["planned_gain"] > 1.1
    assert f"m1 takes {finding['slower']:.2f} times as long as planned" in str(line_of(finding))
    first, second = [event["cuts"] for event in outcome.events if event["kind"] in ("start", "morph")][:2]
    assert second == [0] or second[1] > first[1], "m1 has the second stage, or none"
    changes = [event for event in outcome.events if event["kind"] in ("rebalance", "morph")]
    at = next(place for place, event in enumerate(changes) if event["kind"] == "morph")
    # If the machine's own speed changes before the change, the member has a further finding, and the last one counts.
    assert changes[at]["why"] == [changes[at - 1]["why"]], describe(outcome)
    assert all(len(row["busy_seconds"]) == 2 and row["busy_seconds"][0] > 0 for row in outcome.rows)


def test_a_step_that_finds_too_little_memory_is_made_again_with_less_and_a_third_failure_stops_the_run(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """A member has less memory than planned once in step 2, and three times in a row in step 4; the plans that follow
    need less there. The same command goes on from what was on disk.
    """
    pipeline = {"cuts": None, "planner": "budget", "schedule": "1f1b", "capacity": "122kB"}
    alone = {"redundancy": 0}
    config = config_of(tmp_path, 2, pipeline=pipeline, profile={"source": "estimated"}, elastic=alone)
    starve = [Fault("m1", "action 1", "starve", at, "500") for at in (3, 6, 7, 8)]
    outcome = Live(cradle, config, faults=starve).finish()
    assert outcome.status == {"m0": 0, "m1": 2}, describe(outcome)
    shortages = [event for event in outcome.events if event["kind"] == "memory"]
    assert [(event["step"], event["times"]) for event in shortages] == [(2, 1), (4, 1), (4, 2), (4, 3)], describe(
        outcome
    )
    assert line_of(shortages[0]) == "m1 lacked 500 B in step 2: the step is made again with less there"
    room = [event["capacity_bytes"] for event in shortages]
    assert room == sorted(room, reverse=True), describe(outcome)
    assert room[0] - room[1] >= 500
    written = [read_plan(path).ranks[1].bytes for path in sorted(tmp_path.glob("plan-*.json"))]
    assert written[1] is not None
    assert written[1] < room[0], "with its snapshot"
    assert outcome.kinds().count("persisted") == 2
    assert "m1 lacked 500 B in step 4, after plans for less memory 2 times" in outcome.error_of("m1")
    assert not list((tmp_path / "checkpoints").glob("step-*")), "no checkpoint was due"
    outcome = Live(cradle, config, resumes=True, first=2).finish()
    check(outcome, truth)
    assert sum(row["step"] == 1 for row in outcome.rows) == 1, "it went on from step 3"


def test_after_a_loss_the_lost_layers_alone_are_handed_out_and_new_cuts_follow(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    """The second of four members dies in its third step. The remaining members train its layers, and make no copy
    before the next step; the first vote asks for the cuts of three, which are prepared beside the training.
    """
    pipeline = {"cuts": None, "planner": "exact", "schedule": "1f1b"}
    profile, elastic = {"source": "estimated"}, {"small_motion": "always"}
    config = config_of(tmp_path, 4, pipeline=pipeline, profile=profile, elastic=elastic)
    live = Live(cradle, config, faults=[Fault("m1", "action 1", "kill", 3)])
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": -9, "m2": 0, "m3": 0}, describe(outcome)
    check(outcome, truth)
    first, second = [event for event in outcome.events if event["kind"] == "morph"]
    motion = first["motion"]
    assert motion["chosen"] == "small motion"
    assert first["moved_bytes"] == motion["small_motion"]["moved_bytes"]
    assert motion["small_motion"]["copied_bytes"] == 0
    assert first["moved_bytes"] < motion["new_cuts"]["moved_bytes"] + motion["new_cuts"]["copied_bytes"]
    assert "small motion, since elastic.small_motion is always" in str(line_of(first))
    assert second["why"] == ["new cuts and the copies that were lacking, after a small motion"]
    assert second["members"] == first["members"] == ["m0", "m2", "m3"]
    assert second["moved_bytes"] == 0, "it was copied ahead"
    assert "motion" not in second
    records = [entry["record"] for entry in live.log if entry["kind"] == "generation"]
    assert ["copies" in record for record in records] == [False, True, False]
    assert records[1]["motion"] == motion
