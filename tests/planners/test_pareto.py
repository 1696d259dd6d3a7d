"""The front of peak against step time, against every cut list."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.planners.timed import Positional, chain, cut_lists, seconds_of, simulated
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.throughput import fastest_cuts, pareto_front
from varuna_capslog.schedules import SCHEDULES, RunShape


def front_by_trying_all(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of (peak, step) those that no other has a smaller peak or step and neither larger; step times to 1e-9."""
    kept: list[tuple[int, float]] = []
    for peak, step in sorted(points):
        if not kept or step < kept[-1][1] * (1 - 1e-9):
            kept.append((peak, step))
    return kept


def test_every_point_of_the_front_and_no_other() -> None:
    rng = random.Random(1)
    sizes = []
    for _ in range(60):
        layers = rng.randint(2, 9)
        stages = rng.randint(1, min(layers, 4))
        profile = chain(rng, layers)
        costs = Positional([rng.randint(1, 30) for _ in range(layers)], [rng.randint(0, 9) for _ in range(layers)])
        schedule, microbatches, recompute = rng.choice(SCHEDULES), rng.choice([2, 6]), rng.random() < 0.5
        run = RunShape(microbatches, schedule, recompute)
        link = rng.choice([None, Link(20.0, 0.01)])
        capacities = [rng.randint(60, 150) for _ in range(stages)] if rng.random() < 0.5 else None
        lists = [
            one
            for one in cut_lists(layers, stages)
            if capacities is None or all(np.array(costs.peaks(one)) <= capacities)
        ]
        expected = front_by_trying_all(
            [
                (
                    max(costs.peaks(one)),
                    simulated(profile, one, run.schedule, run.num_microbatches, run.recompute, link),
                )
                for one in lists
            ]
        )
        front = pareto_front(costs, seconds_of(profile, link), run, stages, capacities)
        assert [point.peak_bytes for point in front] == [peak for peak, _ in expected]
        assert [point.step_seconds for point in front] == pytest.approx([step for _, step in expected])
        sizes.append(len(front))
        if front:
            assert front[-1] == fastest_cuts(costs, seconds_of(profile, link), run, stages, capacities)
    assert max(sizes) >= 4
    assert min(sizes) == 0, "no instance that fits nothing was drawn"


def test_a_hasty_front_holds_nothing_that_another_point_beats() -> None:
    """A beam of one list may find a faster list under a smaller limit; the slower, larger one must then go."""
    rng = random.Random(4)
    dropped = 0
    for _ in range(40):
        profile = chain(rng, 12)
        costs = Positional([rng.randint(1, 30) for _ in range(12)], [0] * 12)
        run, link = RunShape(6), Link(20.0, 0.01)
        front = pareto_front(costs, seconds_of(profile, link), run, 5, width=1)
        peaks, steps = [point.peak_bytes for point in front], [point.step_seconds for point in front]
        assert peaks == sorted(set(peaks))
        assert steps == sorted(set(steps), reverse=True)
        largest = fastest_cuts(costs, seconds_of(profile, link), run, 5, width=1)
        assert largest is not None
        dropped += front[-1].step_seconds < largest.step_seconds
    assert dropped > 0, "no point was ever beaten"
