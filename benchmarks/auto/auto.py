"""Compares the default planner with every other one, on random small graphs: see README.md."""

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

from tests.memory.machine import Model, profile_of
from tests.planners.replicas.graphs import draw_tree
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.profiles.record import Profile, TensorRecord
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

RUN = RunShape(8, AUTO_SCHEDULE)


def draw(dice: random.Random) -> tuple[Profile, int, int | None, Link]:
    """Draw a chain of layers or, as often, a graph of branches; its devices, their capacity (or none), and the link."""
    layers = dice.randrange(4, 10)
    base = profile_of(Model.random(dice, layers, True, 1000), "cuda")
    rows = tuple(
        dataclasses.replace(
            row,
            forward_seconds=(took := dice.uniform(0.2, 1.0)),
            backward_seconds=2 * took,
            parameter_bytes=(row.static_bytes or 0) // 4,
        )
        for row in base.layers
    )
    tensors = base.tensors
    if dice.random() < 0.5:
        edges, last = draw_tree(dice, layers - 1)
        edges += [(layer, layers - 1) for layer in last]
        readers: dict[int, set[int]] = defaultdict(set)
        for writer, reader in edges:
            readers[writer].add(reader)
        readers[layers - 1].add(layers)
        size = rows[0].boundary_bytes or 1
        tensors = tuple(
            TensorRecord(f"t{writer}", size, True, writer, tuple(sorted(readers[writer]))) for writer in range(layers)
        )
    profile = dataclasses.replace(base, layers=rows, tensors=tensors)
    devices, link = dice.randrange(2, min(5, layers)), Link(10 ** dice.uniform(4.5, 6.5))
    capacity = None
    if dice.random() < 0.6:
        lacks = compare(Problem.of(profile, devices, 1, RUN, link), ["exact"])[0].plan
        assert lacks is not None
        capacity = int((lacks.peak_bytes or 1) * dice.uniform(0.6, 1.6))
    return profile, devices, capacity, link


def main() -> None:
    """Draw the problems, run the planners, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", type=Path, default=None)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    ratios: dict[str, list[float]] = defaultdict(list)
    lost, winners, search = Counter[str](), Counter[str | None](), list[float]()
    names = [name for name in REGISTRY if name != "mcap-bo"]
    fitted = proven = 0
    for number in range(args.graphs):
        profile, devices, capacity, link = draw(dice)
        rows = {row.planner: row for row in compare(Problem.of(profile, devices, capacity, RUN, link), names)}
        ours = rows.pop(BUDGET)
        fits = ours.plan is not None and ours.plan.fits
        fitted += bool(fits)
        proven += bool(fits and ours.proven)
        search.append(ours.search_seconds or 0.0)
        if fits and ours.plan is not None:
            winners[ours.plan.planner] += 1
        for name, row in rows.items():
            if row.plan is None or not row.plan.fits or row.step_seconds is None:
                continue
            if not fits or ours.step_seconds is None or ours.step_seconds > row.step_seconds * (1 + 1e-9):
                lost[name] += 1
                print(f"graph {number}: {name} {row.step_seconds} is faster than {ours.step_seconds}")
            else:
                ratios[name].append(row.step_seconds / ours.step_seconds)
    print(f"{args.graphs} graphs: the default fits on {fitted}, proven {proven}; ", end="")
    print(f"its search takes {sum(search) / len(search):.2f} s on average, {max(search):.2f} s at most")
    print(f"taken from: {dict(winners.most_common())}")
    print("| planner | fits | the default is slower | step / the default's, geometric mean | largest |")
    print("|---|---|---|---|---|")
    for name, values in sorted(ratios.items(), key=lambda pair: _mean(pair[1])):
        print(f"| {name} | {len(values) + lost[name]} | {lost[name]} | {_mean(values):.3f} | {max(values):.2f} |")
    if args.o is not None:
        write_json(args.o, {"ratios": ratios, "lost": lost, "winners": winners})


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


if __name__ == "__main__":
    main()
