"""Plans with replicated stages and branches: their contents, their bytes and seconds, and the fastest planner."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.replicas.graphs import draw_tree
from tests.planning.asking import plan
from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.costs import ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import plan_of_stages
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord, write_profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(12, "1f1b", False)


def profile_of_graph(edges: list[tuple[int, int]], seconds: list[float], size: int = 10, weights: int = 50) -> Profile:
    """Return layers of these seconds, a third of them forward; every layer writes one tensor."""
    rows = [
        LayerProfile(f"layer{at}", 1, 0 if at else None, 100, 10, 1, size, weights, took / 3, 2 * took / 3)
        for at, took in enumerate(seconds)
    ]
    readers = {at: sorted(reader for writer, reader in edges if writer == at) for at in range(len(rows))}
    tensors = [TensorRecord(f"t{at}", size, True, at, tuple(row or [len(rows)])) for at, row in readers.items()]
    return Profile(tuple(rows), tensors=tuple(tensors), source="estimated", conditions={"device": "cuda"})


def towers(lengths: list[int], join: float = 0.0) -> Profile:
    """Branches of layers of one second, and a join."""
    edges, count = list[tuple[int, int]](), 0
    ends = []
    for length in lengths:
        edges += [(at, at + 1) for at in range(count, count + length - 1)]
        count += length
        ends.append(count - 1)
    return profile_of_graph([*edges, *((end, count) for end in ends)], [1.0] * count + [join], weights=10**5)


def test_replicas_take_turns_at_the_blocks_and_the_stage_before_them_keeps_them_busy() -> None:
    """1 : 3 over four devices. The schedule's own limits, two and one, would let two of three replicas wait."""
    profile = profile_of_graph([(0, 1)], [1.0, 3.0], 1)
    heavy = dataclasses.replace(profile.layers[0], parameter_bytes=10**6)
    profile = dataclasses.replace(profile, layers=(heavy, profile.layers[1]))
    answer = plan(profile, 4, "pipedream", run=RUN, link=Link(1000.0))
    alone, *others = answer.stages
    assert [(stage.layers, stage.blocks) for stage in others] == [
        (((1, 2),), tuple(range(at, 12, 3))) for at in range(3)
    ]
    assert (alone.blocks, alone.in_flight, answer.units.blocks, answer.schedule) == (None, 5, 12, "1f1b")
    step = simulate_plan(profile, answer).step_seconds
    # 12 microbatches of a second, the way to the loss and back, and the delay of the last replica
    assert step <= 12 + 3 + 3
    starved = dataclasses.replace(answer, stages=(dataclasses.replace(alone, in_flight=2), *others), actions=None)
    assert simulate_plan(profile, starved).step_seconds > 1.2 * step
    assert Plan.from_json(json.loads(json.dumps(answer.to_json()))).stages == answer.stages


def test_graphpipe_is_never_slower_than_the_planners_that_see_no_branches() -> None:
    dice = random.Random(2)
    faster = 0
    for _ in range(40):
        layers = dice.randrange(3, 11)
        edges, last = draw_tree(dice, layers)
        edges += [(layer, layers) for layer in last]
        profile = profile_of_graph(edges, [float(dice.randrange(1, 6)) for _ in range(layers)] + [0.0], 30)
        devices, link = dice.randrange(2, 6), Link(dice.choice([10.0, 100.0]))
        steps = {}
        for name in ("pipedream", "piper", "graphpipe"):
            answer = plan(profile, devices, name, run=RUN, link=link)
            answer.check_graph(profile.edges)
            assert answer.planner == name
            steps[name] = simulate_plan(profile, answer, link=link).step_seconds
            assert steps[name] == answer.step_seconds
        assert steps["graphpipe"] <= min(steps.values()) * (1 + 1e-9)
        assert answer.bound_seconds is not None
        assert answer.bound_seconds <= steps["graphpipe"]
        faster += steps["graphpipe"] < 0.99 * steps["pipedream"]
    assert faster > 8


def test_towers_begin_together_and_the_step_is_that_of_the_shorter_way() -> None:
    """Two towers of two layers: direct routes fill three stages instead of four; replicas are too dear."""
    profile, link = towers([2, 2]), Link(10000.0)
    plans = {name: plan(profile, 4, name, run=RUN, link=link) for name in ("pipedream", "graphpipe")}
    assert {name: candidate.routes for name, candidate in plans.items()} == {
        "pipedream": "relay",
        "graphpipe": "direct",
    }
    assert [stage.layers for stage in plans["graphpipe"].stages] == [((0, 1),), ((1, 2),), ((2, 3),), ((3, 5),)]
    free = {name: simulate_plan(profile, candidate).step_seconds for name, candidate in plans.items()}
    assert free["graphpipe"] == pytest.approx(12 + 2)
    assert free["pipedream"] == pytest.approx(12 + 3)


def test_lopsided_towers_share_a_stage_where_ranks_are_few() -> None:
    """Towers of four and two seconds on three devices: a third of all is half of one tower, or a part of both."""
    profile = profile_of_graph([(0, 1), (1, 4), (2, 3), (3, 4)], [2.0, 1.0, 2.0, 1.0, 0.0], 1, 10**6)
    answer = plan(profile, 3, "graphpipe", run=RUN, link=Link(100.0))
    assert sorted(stage.layers for stage in answer.stages) == [((0, 1),), ((1, 2), (3, 5)), ((2, 3),)]


def test_capture_fills_its_nodes_and_holds_less_than_cuts_for_speed() -> None:
    """Two nodes of two devices; the first layer holds the most, so that the first node shares it out."""
    profile = profile_of_graph([(0, 1), (1, 2), (2, 3)], [1.0] * 4, weights=0)
    rows = [dataclasses.replace(row, saved_bytes=size) for row, size in zip(profile.layers, (90, 9, 1, 1), strict=True)]
    profile = dataclasses.replace(profile, layers=tuple(rows))
    answer = plan(profile, 4, "capture", run=RUN, link=Link(node_devices=2))
    placed = [(stage.layers, stage.rank) for stage in answer.stages]
    # replicas of the last stage have one call in flight; as two stages the former would have two
    assert placed == [(((0, 1),), 0), (((0, 1),), 1), (((1, 4),), 2), (((1, 4),), 3)]
    assert (answer.planner, answer.num_ranks, answer.schedule) == ("capture", 4, "1f1b")
    assert answer.step_seconds == pytest.approx(simulate_plan(profile, answer).step_seconds)
    alone = plan(profile, 4, "capture", run=RUN, link=Link(node_devices=1))  # no replicas then
    assert [stage.layers for stage in alone.stages] == [((at, at + 1),) for at in range(4)]


def test_a_plan_holds_what_the_fold_finds_and_one_that_does_not_fit_says_so() -> None:
    rows = profile_of(Model.random(random.Random(5), 8, True, 100), "cuda")
    costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, "parameter_bytes": 100}
    layers = [dataclasses.replace(row, **costs) for row in rows.layers]
    profile = dataclasses.replace(rows, layers=tuple(layers))
    free = plan(profile, 4, "pipedream", run=RUN, link=Link(1000.0))
    assert (free.fits, free.memory_model) == (True, "ranks")
    assert [rank.bytes for rank in free.ranks] == [fold.peak_bytes for fold in fold_plan(profile, free, RUN)]
    assert free.peak_bytes is not None
    for share, fits in ((1.0, True), (0.1, False)):
        limited = plan(profile, 4, "pipedream", capacity=int(free.peak_bytes * share), run=RUN, link=Link(1000.0))
        assert limited.fits is fits
        assert (limited.shortfall is None) == fits
    assert "does not fit: rank" in limited.notes[0]


def test_calls_of_a_table_in_flight_follow_the_longest_way_where_nothing_has_replicas() -> None:
    """The limits are the schedule's own then, so that the file says nothing of them."""
    profile = towers([2, 1])
    frame = Plan(4, (PlanStage(((0, 4),), (0,)),), Units(8, 1, 1), "1f1b", routes="direct")
    parts = [ReplicatedStage((0,)), ReplicatedStage((1,)), ReplicatedStage((2, 3))]
    made = plan_of_stages(frame, parts, 1, profile.edges)
    assert ([stage.in_flight for stage in made.stages], made.actions) == ([None] * 3, None)
    parts[1] = ReplicatedStage((1,), 2)
    made = plan_of_stages(frame, parts, 8, profile.edges)
    # Table 3.2 for calls of 1, 2 and 1: 1; 1 - 1 + 2 x 2 = 4 on two replicas (rounded up); 4 + 2
    assert [stage.in_flight for stage in made.stages] == [6, 2, 2, 1]


@pytest.mark.parametrize(
    ("planner", "change", "sentence"),
    [
        ("graphpipe", "tensors", "the profile has no tensors, by which planner 'graphpipe' knows which layers read"),
        ("piper", "tensors", "the profile has no tensors, by which planner 'piper' knows which layers read"),
        ("pipedream", "seconds", "the profile has no forward_seconds for layers[0] (layer0)"),
        ("capture", "saved", "the profile has no saved_bytes for layers[0] (layer0)"),
        ("capture", "nodes", "pipeline.node_devices=3 does not divide pipeline.devices=2; all nodes must have"),
        ("graphpipe", "seconds", "the profile has no forward_seconds for layers[0] (layer0)"),
        ("grafpipe", "", "unknown planner 'grafpipe'; did you mean 'graphpipe'?"),
        ("pipdream", "", "unknown planner 'pipdream'; did you mean 'pipedream'?"),
    ],
)
def test_what_a_profile_lacks_is_said_by_the_name_of_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planner: str, change: str, sentence: str
) -> None:
    profile = towers([2, 1])
    if change == "tensors":
        profile = dataclasses.replace(profile, tensors=())
    if change == "seconds":
        bare = [dataclasses.replace(row, forward_seconds=None) for row in profile.layers]
        profile = dataclasses.replace(profile, layers=tuple(bare))
    if change == "saved":
        bare = [dataclasses.replace(row, saved_bytes=None) for row in profile.layers]
        profile = dataclasses.replace(profile, layers=tuple(bare))
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    words = ["plan", "--profile", str(path), "--devices", "2", "--planner", planner]
    assert cli._run([*words, *(["pipeline.node_devices=3"] if change == "nodes" else [])]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_other_memory_models_are_refused() -> None:
    with pytest.raises(CapslogError, match="memory is 'gpipe', but stages of planner 'piper' have several replicas"):
        plan(towers([2, 1]), 2, "piper", "gpipe", run=RUN)
