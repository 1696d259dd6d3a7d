"""The limits of `1f1b-star`, beside every vector of limits played with the schedule's own lists."""

from __future__ import annotations

import dataclasses
import random
from itertools import product

import pytest

from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.cuts import in_flight_of_period, with_limits
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord
from varuna_capslog.schedules import RunShape, StageGraph, StageSeconds, schedule_of, simulate

_COUNT, _FROM = 36, 20


def _played_period(seconds: StageSeconds, limits: list[int]) -> float:
    """Seconds of one microbatch in the steady state, where all ends repeat."""
    graph = StageGraph.line(len(limits), _COUNT)
    timeline = simulate(schedule_of("1f1b-star", graph, in_flight=limits), seconds, graph=graph)
    ends = [span.end_seconds for span in timeline.actions[0] if span.action.kind == "B"]
    return (ends[_FROM + 12] - ends[_FROM]) / 12


@pytest.mark.parametrize("seed", some(range(24), 12))
def test_they_are_the_smallest_of_all_vectors_that_keep_the_period(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.choice([2, 3, 3, 4])
    forward, backward = ([draw.randint(1, high) for _ in range(stages)] for high in (5, 8))
    transfer = [0, *(draw.choice([0, 0, 1, 2, 3, 6]) for _ in range(stages - 1))]
    period = max([*(f + b for f, b in zip(forward, backward, strict=True)), *transfer]) + draw.choice([0, 0, 1, 2.5])
    limits = in_flight_of_period(forward, backward, transfer, period)
    seconds = StageSeconds(forward, backward, transfer=transfer)
    assert _played_period(seconds, limits) <= period + 1e-9
    # a stage behind another never needs more in flight than that one
    for vector in product(*(range(1, limit + 2) for limit in limits)):
        falls = list(vector) == sorted(vector, reverse=True)
        if falls and any(smaller < limit for smaller, limit in zip(vector, limits, strict=True)):
            assert _played_period(seconds, list(vector)) > period + 1e-9, vector


def test_equal_stages_and_free_links_have_the_textbooks_limits() -> None:
    assert in_flight_of_period([1.0] * 5, [2.0] * 5, [0.0] * 5) == [5, 4, 3, 2, 1]
    assert in_flight_of_period([1.0, 1.0, 4.0], [2.0, 2.0, 8.0], [0.0] * 3) == [2, 2, 1]
    assert in_flight_of_period([0.0], [0.0], [0.0]) == [1]
    with pytest.raises(CapslogError, match="a period of 2 s is too short: the slowest stage or link takes 3"):
        in_flight_of_period([1.0, 1.0], [2.0, 1.0], [0.0, 1.0], 2)


def test_slow_links_are_played_shorter_than_with_1f1b() -> None:
    """The mean of 40 drawn pipelines of 8 stages and 32 microbatches; MadPipe's setting of Sec. 4.1."""
    draw, ratios = random.Random(0), []
    graph = StageGraph.line(8, 32)
    for _ in range(40):
        forward = [1 + 0.2 * draw.random() for _ in range(8)]
        slowest = 3 * max(forward)
        transfer = [0.0, *(0.4 * slowest * draw.random() for _ in range(7))]  # up to 0.8 of it in both directions
        seconds = StageSeconds(forward, [2 * duration for duration in forward], transfer=transfer)
        limits = in_flight_of_period(forward, seconds.backward, transfer)
        star = simulate(schedule_of("1f1b-star", graph, in_flight=limits), seconds, graph=graph).step_seconds
        ratios.append(star / simulate(schedule_of("1f1b", graph), seconds, graph=graph).step_seconds)
    assert sum(ratios) / len(ratios) < 0.85


def test_lines_of_a_graph_have_one_period() -> None:
    """Two towers, of two stages and of one slow stage, and their join: the slow one sets the period of both."""
    layers = [
        LayerProfile(f"layer{n}", 1, 1 if n else None, forward_seconds=2.0 if n == 2 else 1.0, backward_seconds=2.0)
        for n in range(4)
    ]
    tensors = [("a", None, (0,)), ("t", None, (2,)), ("b", 0, (1,)), ("c", 1, (3,)), ("d", 2, (3,)), ("e", 3, (4,))]
    records = tuple(TensorRecord(name, 100, writer is not None, writer, readers) for name, writer, readers in tensors)
    profile, run = Profile(layers, tensors=records), RunShape(8, "1f1b-star", False)
    stages = tuple(PlanStage(((n, n + 1),), (n,)) for n in range(4))
    plan = Plan(4, stages, Units(8, 1, 1), "1f1b-star", routes="direct")
    assert [stage.in_flight for stage in with_limits(profile, plan, run).stages] == [3, 2, 2, 1]
    slow = Link(bandwidth=100 / 2.0)  # two seconds for a message
    line, other_line = ([1.0] * 3, [2.0] * 3, [0.0, 2.0, 2.0]), ([2.0, 1.0], [2.0] * 2, [0.0, 2.0])
    line_limits, other_limits = in_flight_of_period(*line, 4.0), in_flight_of_period(*other_line, 4.0)
    limits = [stage.in_flight for stage in with_limits(profile, plan, run, slow).stages]
    assert limits == [*line_limits[:2], other_limits[0], max(line_limits[2], other_limits[1])]
    grained = dataclasses.replace(plan, stages=(dataclasses.replace(stages[0], grain=2), *stages[1:]))
    with pytest.raises(CapslogError, match="known for one microbatch per call"):
        with_limits(profile, grained, run)


def test_a_plan_gets_limits_for_every_way_through_its_stages() -> None:
    layers = [
        LayerProfile(f"layer{n}", 1, 1 if n else None, boundary_bytes=100, forward_seconds=1.0, backward_seconds=2.0)
        for n in range(6)
    ]
    profile, run = Profile(layers), RunShape(6, "1f1b-star", False)
    plan = Plan.of_cuts(6, (0, 2, 4), num_microbatches=6)
    assert [stage.in_flight for stage in with_limits(profile, plan, run).stages] == [3, 2, 1]
    slow = with_limits(profile, plan, run, Link(bandwidth=100 / 3.0))
    assert [stage.in_flight for stage in slow.stages] == in_flight_of_period([2.0] * 3, [4.0] * 3, [0.0, 3.0, 3.0])
    again = with_limits(profile, plan, RunShape(6, "1f1b-star", True))
    assert [stage.in_flight for stage in again.stages] == [3, 2, 1]
