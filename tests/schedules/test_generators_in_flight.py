"""The limits of calls of different sizes beside every smaller limit; benchmarks/schedules/in_flight.py plays more."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import StageGraph, StageSeconds, find_deadlock, lower, schedule_of, simulate
from varuna_capslog.schedules.generators import in_flight_microbatches, table_3_2

SAMPLES = 16


def step(graph: StageGraph, limit: int) -> float:
    """Seconds of a step in which stage 0 may have so many calls in flight; inf where it waits for ever."""
    try:
        rows = schedule_of("1f1b", graph, in_flight=[limit])
    except CapslogError:
        return float("inf")
    assert find_deadlock(lower(rows, graph=graph)) is None
    sizes = [float(grain) for grain in graph.grains]
    return simulate(rows, StageSeconds(sizes, [2 * size for size in sizes]), graph=graph).step_seconds


def chain_of(*grains: int) -> StageGraph:
    ranks = tuple(range(len(grains)))
    return StageGraph(ranks, (ranks,) * SAMPLES, grains=grains)


def steps_of(graph: StageGraph) -> tuple[int, list[float]]:
    """The limit of stage 0, and the step under every limit from 1 on."""
    most = SAMPLES // graph.grains[0]
    limit = min(most, in_flight_microbatches(graph)[0] // graph.grains[0])
    return limit, [step(graph, calls) for calls in range(1, most + 1)]


@pytest.mark.parametrize("grains", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4), (1, 1, 2), (2, 1, 2)])
def test_no_smaller_limit_gives_as_short_a_step(grains: tuple[int, ...]) -> None:
    limit, steps = steps_of(chain_of(*grains))
    assert limit == 1 + steps.index(min(steps))


@pytest.mark.parametrize("grains", [(1, 1, 4), (1, 2, 4), (2, 2, 4), (4, 1, 2), (4, 2, 4), (1, 4, 1), (1, 1, 1, 2)])
def test_no_larger_limit_gives_a_shorter_step(grains: tuple[int, ...]) -> None:
    limit, steps = steps_of(chain_of(*grains))
    assert steps[limit - 1] == min(steps)


def test_the_ten_cases_of_the_table() -> None:
    """GraphPipe's Table 3.2, line by line; (k_x, b_x, k_y, b_y, i_y)."""
    lines = {(4, 1, 3, 2, 6): 10, (2, 1, 2, 2, 4): 6, (4, 2, 3, 2, 6): 12, (4, 2, 1, 4, 4): 12, (4, 2, 3, 1, 3): 12}
    lines |= {(4, 2, 2, 1, 2): 10, (1, 2, 1, 2, 2): 4, (2, 2, 2, 2, 4): 8, (1, 1, 1, 4, 4): 8, (1, 4, 2, 1, 2): 8}
    assert {line: table_3_2(*line) for line in lines} == lines
