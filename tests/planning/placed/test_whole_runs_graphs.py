"""Planner `budget` beyond one line of stages: branches and replicas, with memory intervals where these are needed."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import defaultdict
from collections.abc import Sequence

from tests.memory.machine import Model, profile_of
from tests.planning.asking import layerwise_plan, plan
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.whole_runs import faster_plan
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, TensorRecord
from varuna_capslog.schedules import RunShape

RUN = RunShape(8, "auto")
TOWERS = [(0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6)]
KEEPING = ("graphpipe", "pipedream")
LINE = [(at, at + 1) for at in range(6)]


def drawn(dice: random.Random, edges: Sequence[tuple[int, int]]) -> Profile:
    """A model of seven layers with all runs, the seconds of each, and the graph of the layers."""
    profile = profile_of(Model.random(dice, 7, True, 1000), "cuda")
    readers = defaultdict[int, set[int]](set, {6: {7}})
    for writer, reader in edges:
        readers[writer].add(reader)
    rows = []
    for row in profile.layers:
        took = dice.uniform(0.5, 1.0)
        weights = (row.static_bytes or 0) // 4
        rows.append(dataclasses.replace(row, forward_seconds=took, backward_seconds=2 * took, parameter_bytes=weights))
    size = rows[0].boundary_bytes or 1
    tensors = tuple(TensorRecord(f"t{at}", size, True, at, tuple(sorted(readers[at]))) for at in range(7))
    return dataclasses.replace(profile, layers=tuple(rows), tensors=tensors)


def test_what_is_taken_fits_is_faster_than_a_line_and_never_slower_than_planners_that_keep_everything() -> None:
    """Models with two towers and lines, under shrinking capacities; every step is simulated again, all bytes folded.
    Without a known cost of messages only branches are searched.
    """
    forms = set()
    for seed, edges, devices, priced in ((0, TOWERS, 3, False), (0, TOWERS, 4, True), (1, LINE, 4, True)):
        dice = random.Random(seed)
        profile = drawn(dice, edges)
        link = Link(10 ** dice.uniform(5, 6.5) if priced else None)
        first = plan(profile, devices, "budget", run=RUN, link=link)
        free = max(fold.peak_bytes for fold in fold_plan(profile, first, RUN))
        for part in (None, 0.95, 0.8):
            capacity = None if part is None else int(part * free)
            budget_plan = plan(profile, devices, "budget", capacity=capacity, run=RUN, link=link)
            line = layerwise_plan(profile, devices, "budget", capacity, RUN, link)
            if not budget_plan.fits:
                assert line.step_seconds is None
                continue
            step = simulate_plan(profile, budget_plan, run=RUN.settled(), link=link).step_seconds
            assert step == budget_plan.step_seconds
            assert budget_plan.planner == "budget"
            if capacity is not None:
                folds = fold_plan(profile, budget_plan, dataclasses.replace(RUN, schedule=budget_plan.schedule))
                assert max(fold.peak_bytes for fold in folds) <= capacity
            kept = dataclasses.replace(RUN, schedule="1f1b")
            others = [plan(profile, devices, name, capacity=capacity, run=kept, link=link) for name in KEEPING * priced]
            steps = [
                candidate.step_seconds
                for candidate in (line, *others)
                if candidate.fits is not False and candidate.step_seconds
            ]
            assert all(step <= other_step * (1 + 1e-9) for other_step in steps)
            assert budget_plan.bound_seconds is not None
            if budget_plan.search_space == f"all plans on {devices} devices":
                assert budget_plan.bound_seconds <= min(steps)
                assert budget_plan.proven == (step <= budget_plan.bound_seconds * (1 + 1e-9))
                treated = any(stage.memory for stage in budget_plan.stages)
                forms.add((budget_plan.routes, budget_plan.actions is not None, treated))
    assert any(routes == "direct" and treated for routes, _, treated in forms), "intervals with branches"
    assert any(listed for _, listed, _ in forms), "replicas"
    assert {treated for *_, treated in forms} == {True, False}


def free_plan(profile: Profile, devices: int, run: RunShape, link: Link | None = None) -> Plan:
    """The plan of planner `budget` itself, whose blocks are open where the run has one."""
    return plan(profile, devices, "budget", run=run, link=link)


def test_replicas_share_blocks_that_are_open_or_several() -> None:
    profile, link = drawn(random.Random(1), LINE), Link(1e7)
    for price in (link, None):
        free = free_plan(profile, 3, RUN, price)
        assert (free.units.blocks, free.actions is not None) == (8, True)
    four_blocks = dataclasses.replace(RUN, num_blocks=4)
    assert free_plan(profile, 3, four_blocks, link).units.blocks == 4
    fixed = dataclasses.replace(Problem.of(profile, 3, None, RUN, link), blocks_open=False, members_change=True)
    assert solve(fixed, "budget").units.blocks == 1
    several = dataclasses.replace(fixed, run=four_blocks)
    assert solve(several, "budget").units.blocks == 4
    one_way = dataclasses.replace(RUN, schedule="1f1b")
    assert free_plan(profile, 3, one_way, link).units.blocks == 8, "their lists are those of 1f1b"
    assert free_plan(profile, 3, dataclasses.replace(RUN, schedule="gpipe"), link).units.blocks == 1
    unknown = free_plan(profile, 3, dataclasses.replace(RUN, num_microbatches=None), link)
    assert (unknown.units.per_step, unknown.actions is not None) == (12, True)


def test_branches_keep_the_blocks_of_the_run_and_lines_are_left_as_they_are() -> None:
    profile, two_blocks = drawn(random.Random(0), TOWERS), dataclasses.replace(RUN, num_blocks=2)
    free = layerwise_plan(profile, 3, "budget", None, two_blocks)
    capacity = int(0.8 * max(fold.peak_bytes for fold in fold_plan(profile, free, two_blocks)))
    branched = plan(profile, 3, "budget", capacity=capacity, run=two_blocks)
    assert (branched.routes, branched.units.blocks) == ("direct", 2)
    profile, priced = drawn(random.Random(5), LINE), Link(1e7)
    line = layerwise_plan(profile, 4, "budget", None, two_blocks, priced)
    problem = Problem.of(profile, 4, None, two_blocks, priced)
    assert faster_plan(problem, line) is not line
    assert faster_plan(problem, line, time.perf_counter()) is line, "there is no time left"
    one_block = dataclasses.replace(problem, run=RUN, blocks_open=False)
    assert faster_plan(one_block, line) is line, "a line of layers, and nothing to share"
