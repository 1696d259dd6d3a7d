"""Compares the limits of 1f1b-star with every vector of limits, and with MadPipe's groups, on random pipelines.

A vector keeps a period T if its lists have a periodic schedule: the dependency graph, with seconds d and distances h in
microbatches, has no cycle on which the sum of d - T h is above 0. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import pairwise, product

from varuna_capslog.planning.cuts import in_flight_of_period

Edge = tuple[tuple[str, int], tuple[str, int], float, int]


def edges_of(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], limits: Sequence[int]
) -> list[Edge]:
    """Return (from, to, seconds, distance in microbatches) for lists of g forwards, then a backward and a forward."""
    edges: list[Edge] = []
    last = len(forward) - 1
    for stage, limit in enumerate(limits):
        edges.append((("B", stage), ("F", stage), backward[stage], limit))
        edges.append((("F", stage), ("B", stage), forward[stage], 1 - limit))
        if stage == last:
            edges.append((("F", stage), ("B", stage), forward[stage], 0))
            continue
        seconds = transfer[stage + 1]
        for link, source, target, took in (
            ("there", ("F", stage), ("F", stage + 1), forward[stage]),
            ("back", ("B", stage + 1), ("B", stage), backward[stage + 1]),
        ):
            message = (link, stage)
            edges += [(source, message, took, 0), (message, message, seconds, 1), (message, target, seconds, 0)]
    return edges


def keeps(edges: Sequence[Edge], period: float) -> bool:
    """Check that no cycle takes longer than the period allows (Bellman and Ford)."""
    begins = {node: 0.0 for edge in edges for node in edge[:2]}
    for _ in range(len(begins) + 1):
        changed = False
        for source, target, seconds, distance in edges:
            least = begins[source] + seconds - period * distance
            if least > begins[target] + 1e-9:
                begins[target], changed = least, True
        if not changed:
            return True
    return False


def groups(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], period: float) -> list[int]:
    """Return MadPipe's limits (Sec. 4.1): from the last stage, stages and links in groups of at most a period."""
    limits, group, total = [0] * len(forward), 1, 0.0
    for stage in reversed(range(len(forward))):
        for seconds in (forward[stage] + backward[stage], 2 * transfer[stage]):
            if total + seconds > period * (1 + 1e-9):
                group, total = group + 1, 0.0
            total += seconds
            limits[stage] = limits[stage] or group
    return limits


def main() -> None:
    """Draw pipelines of 2 to 5 stages and compare their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    differ = more = 0
    for number in range(arguments.draws):
        stages = draw.choice([2, 3, 4]) if number % 4 else 5
        forward = [draw.randint(1, 5) for _ in range(stages)]
        backward = [draw.randint(1, 8) for _ in range(stages)]
        transfer = [0, *(draw.choice([0, 0, 1, 2, 3, 5, 9]) for _ in range(stages - 1))]
        shortest = max([*(f + b for f, b in zip(forward, backward, strict=True)), *transfer])
        period = shortest + draw.choice([0, 0, 1, 2.5])
        ours = in_flight_of_period(forward, backward, transfer, period)
        # a stage never has more in flight than the one before it
        vectors = [
            vector
            for vector in product(*(range(1, limit + 2) for limit in ours))
            if all(earlier >= later for earlier, later in pairwise(vector))
            and keeps(edges_of(forward, backward, transfer, vector), period)
        ]
        smallest = [min(column) for column in zip(*vectors, strict=True)]
        differ += ours != smallest or tuple(ours) not in vectors
        more += sum(groups(forward, backward, transfer, period)) > sum(ours)
    print("| drawn pipelines | ours differ from the smallest vector | MadPipe's groups ask for more |")
    print("|---|---|---|")
    print(f"| {arguments.draws} | {differ} | {more} |")


if __name__ == "__main__":
    main()
