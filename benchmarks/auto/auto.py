"""Planner `auto` beside every planner that it asks, on random small graphs: see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import write_json
from varuna_capslog.planning.automatic import automatic_plan

from tests.memory.machine import Model, profile_of
from tests.planners.replicas.graphs import draw_tree
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.profiles.record import Profile, TensorRecord
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

RUN = RunShape(8, AUTO_SCHEDULE)


def draw(dice: random.Random) -> tuple[Profile, int, int | None, Link]:
    """A line of layers or, as often, a graph of branches; its devices, their capacity (or none), and the link."""
    layers = dice.randrange(4, 10)
    found = profile_of(Model.random(dice, layers, True, 1000), "cuda")
    rows = tuple(
        dataclasses.replace(
            row,
            forward_seconds=(took := dice.uniform(0.2, 1.0)),
            backward_seconds=2 * took,
            parameter_bytes=(row.static_bytes or 0) // 4,
        )
        for row in found.layers
    )
    tensors = found.tensors
    if dice.random() < 0.5:
        edges, last = draw_tree(dice, layers - 1)
        edges += [(one, layers - 1) for one in last]
        readers: dict[int, set[int]] = defaultdict(set)
        for one, other in edges:
            readers[one].add(other)
        readers[layers - 1].add(layers)
        size = rows[0].boundary_bytes or 1
        tensors = tuple(TensorRecord(f"t{one}", size, True, one, tuple(sorted(readers[one]))) for one in range(layers))
    profile = dataclasses.replace(found, layers=rows, tensors=tensors)
    devices, link = dice.randrange(2, min(5, layers)), Link(10 ** dice.uniform(4.5, 6.5))
    capacity = None
    if dice.random() < 0.6:
        rows_of = compare(profile, devices, names=["budget"], run=RUN, capacity=1, link=link)
        lacks = rows_of[0].plan
        assert lacks is not None
        capacity = int((lacks.peak_bytes or 1) * dice.uniform(1.0, 2.0))
    return profile, devices, capacity, link


def main() -> None:
    """Draws, asks, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", type=Path, default=None)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    gains: dict[str, list[float]] = defaultdict(list)
    of_budget: dict[str, list[float]] = defaultdict(list)
    lost, without, budget_lost = Counter[str](), Counter[str](), Counter[str]()
    winners, proven, nothing = Counter[str | None](), 0, 0
    over_bound: list[float] = []
    for number in range(given.graphs):
        profile, devices, capacity, link = draw(dice)
        found = automatic_plan(profile, devices, "auto", capacity, RUN, link)
        rows = compare(profile, devices, run=RUN, capacity=capacity, link=link)
        if not found.fits:
            nothing += 1
            assert not any(row.plan is not None and row.plan.fits for row in rows), number
            continue
        step = simulate_plan(profile, found, run=RUN.settled(), link=link).step_seconds
        winners[found.planner] += 1
        proven += bool(found.proven)
        over_bound.append(step / (found.bound_seconds or math.nan))
        (own,) = (row for row in rows if row.planner == "budget")
        budget = own.step_seconds if own.plan is not None and own.plan.fits else None
        for row in rows:
            if row.planner == "mcap-bo":
                continue
            if row.plan is None or not row.plan.fits or row.step_seconds is None:
                without[row.planner] += 1
                continue
            gains[row.planner].append(row.step_seconds / step)
            budget_lost[row.planner] += budget is None or budget > row.step_seconds * (1 + 1e-9)
            if budget is not None:
                of_budget[row.planner].append(row.step_seconds / budget)
            if step > row.step_seconds * (1 + 1e-9):
                lost[row.planner] += 1
                print(f"graph {number}: {row.planner} {row.step_seconds} is faster than {step}")
    fitted = given.graphs - nothing
    print(f"{given.graphs} graphs: something fits on {fitted}; proven {proven}; step / bound {_mean(over_bound):.3f}")
    print(f"taken from: {dict(winners.most_common())}")
    print("| planner | fits | auto slower | budget slower | step / auto's step, geometric mean | largest | ", end="")
    print("step / budget's step, geometric mean | smallest |\n|---|---|---|---|---|---|---|---|")
    for name, ratios in sorted(gains.items(), key=lambda pair: _mean(pair[1])):
        print(f"| {name} | {len(ratios)} | {lost[name]} | {budget_lost[name]} | {_mean(ratios):.3f} ", end="")
        print(f"| {max(ratios):.2f} | {_mean(of_budget[name]):.3f} | {min(of_budget[name]):.3f} |")
    if given.o is not None:
        write_json(given.o, {"gains": gains, "winners": winners, "without": without})


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


if __name__ == "__main__":
    main()
