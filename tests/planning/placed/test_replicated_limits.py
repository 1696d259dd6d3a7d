"""The least limits in flight of plans with replicas, beside every vector of limits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from tests.planning.asking import plan as planned
from tests.planning.placed.test_replicated import profile_of_graph, towers
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.costs import ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import plan_of_stages, with_least_limits, with_lists, with_wider_limits
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape


def drawn_plan(seed: int) -> tuple[Profile, Plan, RunShape, Link | None]:
    """Draw a played plan of 2 or 3 stages of one layer, in line or two before a join, with up to 3 replicas."""
    dice = random.Random(seed)
    count = dice.randrange(2, 4)
    joined, even = count == 3 and dice.random() < 0.4, dice.random() < 0.5
    edges = [(0, 2), (1, 2)] if joined else [(at, at + 1) for at in range(count - 1)]
    replicas = [dice.randrange(1, 4) for _ in range(count)]
    if max(replicas) == 1:
        replicas[dice.randrange(count)] = 2
    seconds = [float(3 * number if even else dice.randrange(1, 9)) for number in replicas]
    profile = profile_of_graph(edges, seconds, dice.choice([1, 10]))
    microbatches, of_block = dice.choice([4, 6, 8]), dice.choice([1, 1, 1, 2])
    blocks = microbatches // of_block if microbatches // of_block >= max(replicas) else microbatches
    units = Units(microbatches, 1, 1)
    frame = Plan(count, (PlanStage(((0, count),), (0,)),), units, "1f1b", routes="direct" if joined else "relay")
    stages = [ReplicatedStage((layer,), number) for layer, number in enumerate(replicas)]
    run, link = RunShape(microbatches, "1f1b", False), dice.choice([None, Link(10.0)])
    plan = plan_of_stages(frame, stages, blocks, profile.edges)
    return profile, with_step_seconds(profile, plan, run, link), run, link


def held(plan: Plan) -> int:
    """Return the calls that all ranks of a plan may have in flight together, at most those that they have."""
    blocks, of_block = plan.units.blocks or 1, plan.units.of_block
    calls = [of_block * (blocks if stage.blocks is None else len(stage.blocks)) for stage in plan.stages]
    return sum(min(stage.in_flight or most, most) for stage, most in zip(plan.stages, calls, strict=True))


def fewest_held(profile: Profile, plan: Plan, run: RunShape, link: Link | None) -> int:
    """Return the fewest calls in flight of all vectors of limits, one for each stage, that keep the step."""
    assert plan.step_seconds is not None
    kinds = list(dict.fromkeys(stage.layers for stage in plan.stages))
    fewest = held(plan)
    for limits in itertools.product(range(1, run.microbatches + 1), repeat=len(kinds)):
        try:
            limited = _with_limits(plan, dict(zip(kinds, limits, strict=True)))
            step = with_step_seconds(profile, limited, run, link).step_seconds
        except CapslogError:  # the lists wait for ever
            continue
        if step is not None and step <= plan.step_seconds * (1 + 1e-9):
            fewest = min(fewest, held(limited))
    return fewest


def _with_limits(plan: Plan, limits: dict[tuple[tuple[int, int], ...], int]) -> Plan:
    stages: Sequence[PlanStage] = [dataclasses.replace(stage, in_flight=limits[stage.layers]) for stage in plan.stages]
    return with_lists(dataclasses.replace(plan, stages=tuple(stages), actions=None))


def test_no_smaller_limits_keep_the_step() -> None:
    """Table 3.2 takes calls for equally long and messages for free, so every third plan held more."""
    more = 0
    for seed in range(12):
        profile, plan, run, link = drawn_plan(seed)
        limited = with_least_limits(profile, plan, run, link)
        assert limited.step_seconds is not None
        assert plan.step_seconds is not None
        assert limited.step_seconds <= plan.step_seconds * (1 + 1e-9)
        assert held(limited) == fewest_held(profile, limited, run, link), seed
        more += held(plan) > held(limited)
    assert more >= 3


def test_plans_of_planners_have_the_least_limits_and_without_replicas_those_of_the_schedule() -> None:
    profile, run = profile_of_graph([(0, 1)], [8.0, 5.0], 1), RunShape(4, "1f1b", False)
    answer = planned(profile, 3, "pipedream", run=run, link=Link(10.0))
    assert any(stage.blocks for stage in answer.stages)
    assert with_least_limits(profile, answer, run, Link(10.0)) is answer
    alone = planned(towers([2, 2]), 4, "graphpipe", run=RunShape(12, "1f1b", False), link=Link(10000.0))
    assert [stage.in_flight for stage in alone.stages] == [None] * 4


SHAPES = ([(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 1), (0, 2), (1, 3), (2, 3)], [(0, 1), (2, 3), (1, 4), (3, 4)])


def drawn_graph(seed: int, most: int = 5) -> tuple[Profile, Plan, Link]:
    """Draw a played plan of one layer a stage, in line or with branches, of up to `most` stages; 8 microbatches."""
    dice = random.Random(seed)
    edges = dice.choice([edges for edges in SHAPES if edges[-1][1] < most])
    count = edges[-1][1] + 1
    profile = profile_of_graph(edges, [float(dice.randrange(1, 9)) for _ in range(count)], 10)
    link = Link(dice.choice([None, 20.0]), dice.choice([0, 0, 0.5, 1, 2]))
    stages = tuple(PlanStage(((at, at + 1),), (at,), memory=()) for at in range(count))
    plan = Plan(count, stages, Units(8, 1, 1), "1f1b", routes="direct")
    return profile, with_step_seconds(profile, plan, RunShape(8, "1f1b", False), link), link


def shortest_in_groups(profile: Profile, plan: Plan, link: Link) -> float:
    """Return the shortest step of all microbatches per call (1, 2, 4) of every stage, with groups of 1, 2 or 4 calls
    (kFkB).
    """
    steps = []
    for grains in itertools.product((1, 2, 4), repeat=len(plan.stages)):
        stages = tuple(
            dataclasses.replace(stage, grain=grain) for stage, grain in zip(plan.stages, grains, strict=True)
        )
        for k, schedule in ((1, "1f1b"), (2, "kfkb"), (4, "kfkb")):
            try:
                grained = dataclasses.replace(plan, stages=stages, schedule=schedule)
                run = RunShape(8, schedule, False, k=k)
                steps.append(with_step_seconds(profile, grained, run, link).step_seconds or 0.0)
            except CapslogError:  # a grain that does not divide its neighbour's
                continue
    return min(steps)


def test_grains_and_groups_of_calls_are_hardly_faster_than_wider_limits() -> None:
    """GraphPipe hides messages by k forwards in a row; 1F1B with more calls in flight does it as well."""
    faster = 0
    for seed in range(10):
        profile, plan, link = drawn_graph(seed, 4)
        wider = with_wider_limits(profile, plan, RunShape(8, "1f1b", False), link)
        assert wider.step_seconds is not None
        assert plan.step_seconds is not None
        assert wider.step_seconds <= shortest_in_groups(profile, plan, link) * 1.02, seed
        faster += wider.step_seconds < plan.step_seconds
    assert faster > 3


def test_graphpipe_takes_wider_limits_where_messages_take_time_and_its_devices_hold_them() -> None:
    profile, run, link = profile_of_graph([(0, 1), (1, 2)], [3.0, 3.0, 3.0], 1), RunShape(12, "1f1b", False), Link(1.0)
    profile = dataclasses.replace(
        profile, layers=tuple(dataclasses.replace(layer, parameter_bytes=10**6) for layer in profile.layers)
    )
    answer = planned(profile, 3, "graphpipe", run=run, link=link)
    bare = dataclasses.replace(
        answer, stages=tuple(dataclasses.replace(stage, in_flight=None) for stage in answer.stages)
    )
    step = with_step_seconds(profile, bare, run, link).step_seconds
    assert step is not None
    assert answer.step_seconds is not None
    assert answer.step_seconds < 0.9 * step
    assert planned(profile, 3, "pipedream", run=run, link=link).stages[0].in_flight is None  # as published
