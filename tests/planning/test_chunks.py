"""Stages that go round the devices: the fastest cuts, beside all cut lists."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from tests.planning.test_fastest_layerwise import profile_on
from varuna_capslog.planning import chunks
from varuna_capslog.planning.chunks import chunk_bound, fastest_chunks
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape


def profile_of(draw: random.Random, size: int) -> Profile:
    """Return layers of random seconds, the last one heavy."""
    profile = profile_on("cuda", size, draw.randrange(1000))
    seconds = [*(draw.uniform(0.5, 1.5) for _ in range(size - 1)), draw.uniform(1, 4)]
    rows = zip(profile.layers, seconds, strict=True)
    layers = (dataclasses.replace(row, forward_seconds=took, backward_seconds=2 * took) for row, took in rows)
    return dataclasses.replace(profile, layers=tuple(layers))


def problem_of(profile: Profile, ranks: int, count: int, capacity: int | None = None) -> Problem:
    run = RunShape(2 * ranks, "interleaved", recompute=False, microbatch_size=1)
    return dataclasses.replace(Problem.of(profile, ranks, capacity, run), stages_per_rank=count)


def with_cuts(problem: Problem, cuts: tuple[int, ...]) -> Plan:
    return solve(dataclasses.replace(problem, cuts=cuts), "throughput")


def all_cuts(size: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in itertools.combinations(range(1, size), stages - 1)]


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_list_of_a_small_chain_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    size, count = draw.randint(6, 8), 2 + seed % 2
    problem = problem_of(profile_of(draw, size), 2, count)
    plans = [with_cuts(problem, cuts) for cuts in all_cuts(size, 2 * count)]
    answer = solve(problem, "throughput")
    assert answer.step_seconds == min(plan.step_seconds or 0.0 for plan in plans)
    assert [stage.rank for stage in answer.stages] == [0, 1] * count
    assert chunk_bound(problem) <= answer.step_seconds
    capacity = sorted(max(rank.bytes or 0 for rank in plan.ranks) for plan in plans)[len(plans) // 3]
    limited = problem_of(problem.profile, 2, count, capacity)
    fitting = [plan for cuts in all_cuts(size, 2 * count) if (plan := with_cuts(limited, cuts)).fits]
    bounded = solve(limited, "throughput")
    assert bounded.fits
    assert bounded.step_seconds == min(plan.step_seconds or 0.0 for plan in fitting)


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe", "zb-h1"])
def test_no_step_undercuts_the_bound(schedule: str) -> None:
    """Of no cut list, also on devices of unequal speed; with a heavy head it is little less than that rank's work."""
    for seed in range(4):
        draw = random.Random(seed)
        ranks, count = draw.choice([(2, 2), (3, 1), (2, 1)] if schedule == "interleaved" else [(2, 1), (3, 1)])
        problem = problem_of(profile_of(draw, 7), ranks, count)
        devices = tuple(dataclasses.replace(rank, speed=draw.uniform(0.5, 1)) for rank in problem.devices)
        run = dataclasses.replace(problem.run, schedule=schedule)
        problem = dataclasses.replace(problem, run=run, devices=devices if count > 1 else problem.devices)
        steps = [with_cuts(problem, cuts).step_seconds or 0.0 for cuts in all_cuts(7, ranks * count)]
        assert chunk_bound(problem) <= min(steps) * (1 + 1e-9)
        head = dataclasses.replace(problem.profile.layers[-1], forward_seconds=10.0, backward_seconds=20.0)
        layers = (*problem.profile.layers[:-1], head)
        heavy = dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, layers=layers))
        best = min(with_cuts(heavy, cuts).step_seconds or 0.0 for cuts in all_cuts(7, ranks * count))
        assert 0.8 * best < chunk_bound(heavy) <= best * (1 + 1e-9)


def test_split_backwards_meet_their_bound_with_equal_layers() -> None:
    """A device makes a part of its backwards while those before it make theirs, so only forwards keep it waiting."""
    profile = profile_of(random.Random(0), 3)
    layers = (dataclasses.replace(row, forward_seconds=1.0, backward_seconds=2.0) for row in profile.layers)
    problem = problem_of(dataclasses.replace(profile, layers=tuple(layers)), 3, 1)
    problem = dataclasses.replace(problem, run=dataclasses.replace(problem.run, schedule="zb-h1"))
    assert with_cuts(problem, (0, 1, 2)).step_seconds == chunk_bound(problem) == 6 * 3 + 2


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (1, 1, 2), (1, 3)])
def test_no_cut_list_of_unequal_chunks_is_faster(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all lists, and near the best rounds of a chain that is taken for a long one."""
    size = 7
    problem = problem_of(profile_of(random.Random(sum(counts)), size), len(counts), 1)
    problem = dataclasses.replace(problem, stages_per_rank=counts)
    steps = [with_cuts(problem, cuts).step_seconds or 0.0 for cuts in all_cuts(size, sum(counts))]
    answer = solve(problem, "throughput")
    ranks = [stage.rank for stage in answer.stages]
    assert [ranks.count(rank) for rank in range(len(counts))] == list(counts)
    assert ranks[: len(counts)] == list(range(len(counts)))
    assert answer.step_seconds == min(steps)
    monkeypatch.setattr(chunks, "_ALL_LISTS", 0)
    assert (solve(problem, "throughput").step_seconds or 0.0) <= 1.05 * min(steps)


def test_the_number_of_chunks_is_the_one_of_the_shortest_step() -> None:
    for seed in range(3):
        profile = profile_of(random.Random(seed), 8)
        plans = [solve(problem_of(profile, 2, count), "throughput") for count in (1, 2, 4)]
        left_open = dataclasses.replace(problem_of(profile, 2, 1), stages_per_rank=None)
        answer = solve(left_open, "throughput")
        assert answer.step_seconds == min(plan.step_seconds or 0.0 for plan in plans)
        peak = min(max(rank.bytes or 0 for rank in plan.ranks) for plan in plans[1:])
        limited = dataclasses.replace(problem_of(profile, 2, 1, peak), stages_per_rank=None)
        assert solve(limited, "throughput").fits in (True, False)


def test_the_rounds_of_a_long_chain_have_the_smallest_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ALL_LISTS", 0)
    for seed in range(4):
        draw = random.Random(seed)
        size, count = draw.randint(7, 10), draw.choice([2, 3])
        problem = problem_of(profile_of(draw, size), 2, count)
        seconds = [3 * (layer.forward_seconds or 0.0) for layer in problem.profile.layers]

        def longest(cuts: tuple[int, ...], seconds: list[float] = seconds) -> float:
            stages = [sum(seconds[first:end]) for first, end in itertools.pairwise((*cuts, len(seconds)))]
            return sum(max(stages[start : start + 2]) for start in range(0, len(stages), 2))

        lists = all_cuts(size, 2 * count)
        rounds = chunks._Rounds(problem).shortest()
        assert longest(rounds) == pytest.approx(min(map(longest, lists)))
        steps = {cuts: with_cuts(problem, cuts).step_seconds or 0.0 for cuts in lists}
        step = steps[fastest_chunks(problem, lists[0])]
        assert min(steps.values()) <= step <= min(steps[rounds], steps[lists[0]])
        assert step <= 1.02 * min(steps.values())


def test_cuts_within_a_layouts_memory_are_not_slower_than_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the peak of equally many layers in each stage as its limit the search began with shorter rounds that do not
    fit, and ended in a step 5 % longer than that of these stages."""
    profile = profile_on("cuda", 17, 582)
    seconds = [0.02, *[0.6] * 1, *[1.0] * 14, 1.88]
    rows = zip(profile.layers, seconds, strict=True)
    layers = tuple(dataclasses.replace(row, forward_seconds=took, backward_seconds=2 * took) for row, took in rows)
    profile, run = dataclasses.replace(profile, layers=layers), RunShape(8, "interleaved", False, microbatch_size=1)
    problem = dataclasses.replace(Problem.of(profile, 2, run=run), stages_per_rank=4)
    even = (0, *range(3, 17, 2))
    theirs = with_cuts(problem, even)
    capacity = max(rank.bytes or 0 for rank in theirs.ranks)
    monkeypatch.setattr(chunks, "_ALL_LISTS", 0)
    ours = solve(problem.with_capacity(capacity), "throughput", weighs_others=False)
    assert ours.fits
    assert ours.step_seconds is not None
    assert theirs.step_seconds is not None
    assert ours.step_seconds <= theirs.step_seconds
