"""Memory intervals of stages with replicas and of pieces of branches, beside every list of intervals of small plans."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from tests.planning.placed.test_whole_runs_graphs import RUN, drawn
from varuna_capslog.planners.replicas import ReplicatedStage
from varuna_capslog.planning.nearby import _every_list
from varuna_capslog.planning.placed.replicated import PlacedIntervals, frame_of, plan_of_stages, with_lists
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge_by_fold
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile

SHAPE = dataclasses.replace(RUN, schedule="1f1b", recompute=False)
STAGES = {
    "replicas": ([(0, 1, 2), (3, 4, 5, 6)], [1, 2], 4),
    "branches": ([(0, 1, 2), (3, 4), (5, 6)], [1, 1, 1], 1),
    "pieces": ([(0, 1, 3), (2, 4, 5, 6)], [1, 1], 2),
}
"""Layers of every stage, its replicas, and the blocks of the step."""


def kept(profile: Profile, name: str, capacity: int | None) -> Plan:
    rows, replicas, blocks = STAGES[name]
    devices = sum(replicas)
    problem = Problem.of(profile, devices, capacity, SHAPE)
    frame = frame_of(problem, SHAPE, "budget", "relay" if name == "replicas" else "direct")
    stages = [ReplicatedStage(layers, count) for layers, count in zip(rows, replicas, strict=True)]
    return plan_of_stages(frame, stages, blocks, profile.known_edges)


def again(profile: Profile, plan: Plan) -> dict[tuple[tuple[int, int], ...], float]:
    """Return the seconds that each stage recomputes per call."""
    took = profile.column("forward_seconds")
    return {
        stage.layers: sum(sum(took[interval.first : interval.end]) for interval in stage.memory or ())
        for stage in plan.stages
    }


def every(plan: Plan, pieces: tuple[tuple[int, int], ...]) -> Iterator[Plan]:
    """Yield the plan with every list of intervals of the stages that hold these pieces."""
    for lists in itertools.product(*(list(_every_list(*piece, ["recompute"])) for piece in pieces)):
        memory: tuple[MemoryInterval, ...] = sum(lists, ())

        def changed(stage: PlanStage, memory: tuple[MemoryInterval, ...] = memory) -> PlanStage:
            return dataclasses.replace(stage, memory=memory) if stage.layers == pieces else stage

        yield with_lists(dataclasses.replace(plan, stages=tuple(map(changed, plan.stages)), actions=None))


@pytest.mark.parametrize("name", STAGES)
def test_what_runs_again_is_little_more_than_of_every_list_that_fits(name: str) -> None:
    """Checks the stage of the most bytes, under a capacity that forces recomputation, against all its lists, folded.
    Estimates distribute the bytes that several pieces must save together.
    """
    ratios, missed = [], 0
    for seed in range(5):
        profile = drawn(random.Random(seed), [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5), (5, 6)])
        free = judge_by_fold(profile, kept(profile, name, None), SHAPE)
        sizes = [rank.bytes or 0 for rank in free.ranks]
        fullest = free.stages[max(range(len(sizes)), key=lambda rank: sizes[rank])].layers
        for part in (0.95, 0.85):
            plan = kept(profile, name, int(part * max(sizes)))
            verdict = judge_by_fold(profile, plan, SHAPE)
            assert verdict.fits is False
            treated_plan = PlacedIntervals(profile, SHAPE).treated(
                plan, verdict, lambda candidate, profile=profile: judge_by_fold(profile, candidate, SHAPE), with_lists
            )
            fitting = [
                again(profile, candidate)[fullest]
                for candidate in every(dataclasses.replace(treated_plan or plan), fullest)
                if judge_by_fold(profile, candidate, SHAPE).fits
            ]
            if treated_plan is None:
                missed += bool(fitting)
                continue
            assert judge_by_fold(profile, treated_plan, SHAPE).fits
            assert len({stage.memory for stage in treated_plan.stages if stage.layers == fullest}) == 1
            ratios.append(again(profile, treated_plan)[fullest] / min(fitting))
    assert len(ratios) > 5
    assert not missed
    assert min(ratios) > 1 - 1e-9, "no list that fits runs less again"
    mean = math.prod(ratios) ** (1 / len(ratios))
    assert mean < (1.1 if name == "pieces" else 1 + 1e-9), ratios
