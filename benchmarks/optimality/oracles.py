"""Counts how often each planner's answer differs from that of its oracle: see README.md.

The oracles are those of the tests: every plan of a small instance, or the printed algorithm step by step.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from tests.planners import test_baselines_gpipe, test_capslog, test_dawnpiper, test_mcap, test_throughput, test_vpipe
from tests.planners.instances import exhaustive, instances
from tests.planners.madpipe import test_allocation
from tests.planners.replicas import test_graphpipe, test_pipedream, test_piper
from tests.planners.replicas.graphs import draw_costs, draw_tree, slowest, splits
from tests.planners.timed import cut_lists, seconds_of
from varuna_capslog.planners.baselines import block_partition
from varuna_capslog.planners.capslog import capslog_cuts, capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.mcap import mcap_bf_cuts
from varuna_capslog.planners.replicas.graphpipe import Series, graphpipe_stages, tree_of
from varuna_capslog.planners.replicas.pipedream import pipedream_stages
from varuna_capslog.planners.replicas.piper import piper_stages
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.throughput import fastest_cuts

KINDS = ("any", "negative", "ties", "monotone")
CLOSE = 1 + 1e-9


def of_cuts(dice: random.Random) -> Iterator[tuple[str, bool]]:
    """Yield planner and whether it is wrong, for a chain of each kind of statistics."""
    for kind in KINDS:
        isolated, added, costs, devices = next(instances(dice, kind, 1, 9))
        lists = [(sorted(costs.peaks(cuts), reverse=True), cuts) for cuts in exhaustive(costs, devices)]
        yield "exact", exact_cuts(costs, devices) != min(lists)[1]
        yield "mcap-bf", mcap_bf_cuts(costs, devices) != test_mcap.by_rounds(isolated, added, devices)
        if kind == "monotone":
            yield "capslog", max(costs.peaks(capslog_cuts(costs, devices))) > min(lists)[0][0]
            yield "capslog-tb", capslog_tb_cuts(costs, devices) != test_capslog.recursion(isolated, added, devices)


def of_throughput(dice: random.Random) -> Iterator[tuple[str, bool]]:
    profile, costs, run, stages, link = test_throughput.instance(dice)
    capacities = [dice.randint(20, 150) for _ in range(stages)] if dice.random() < 0.7 else None
    lists, speeds = list(cut_lists(profile.num_layers, stages)), [dice.choice([0.5, 1.0, 2.0]) for _ in range(stages)]
    if capacities is not None:
        lists = [cuts for cuts in lists if all(np.array(costs.peaks(cuts)) <= capacities)]
    fastest = fastest_cuts(costs, seconds_of(profile, link), run, stages, capacities, speeds)
    if fastest is None or not lists:
        yield "throughput", bool(lists) or fastest is not None
        return
    best = test_throughput.best_by_trying_all(profile, costs, run, lists, link, speeds)
    yield "throughput", fastest.step_seconds > best * CLOSE or list(fastest.cuts) not in lists


def of_gpipe(dice: random.Random) -> Iterator[tuple[str, bool]]:
    sequence = [2 ** dice.randrange(8) for _ in range(dice.randrange(1, 14))]
    count = dice.randrange(1, len(sequence) + 1)
    cuts = [*block_partition(sequence, count), len(sequence)]
    sizes = [end - first for first, end in itertools.pairwise(cuts)]
    yield "gpipe", sizes != [len(block) for block in test_baselines_gpipe.read_again(sequence, count)]


def of_replicas(dice: random.Random) -> Iterator[tuple[str, bool]]:
    """The slowest stage of each planner beside that of every plan in its space; links are free or slow."""
    link, layers, devices = dice.choice([Link(), Link(3.0, 0.1)]), dice.randrange(1, 6), dice.randrange(1, 5)
    line = [(layer, layer + 1) for layer in range(layers - 1)]
    costs = draw_costs(dice, line, layers, devices, True, link)
    plans = test_pipedream.every(layers, devices, costs.most_replicas)
    best, stages = min(test_pipedream.value(costs, plan) for plan in plans), pipedream_stages(costs)
    if math.isfinite(best):
        ranges = [(stage.layers[0], stage.layers[-1] + 1, stage.replicas) for stage in stages or ()]
        yield "pipedream", not ranges or test_pipedream.value(costs, ranges) > best * CLOSE
    edges = test_piper.draw_edges(dice, layers)
    costs = draw_costs(dice, edges, layers, devices, True, link)
    best, stages = math.inf, piper_stages(costs)
    for sets in test_piper.chains(frozenset(range(layers)), edges):
        if len(sets) <= devices:
            best = min(best, *(test_piper.value(costs, sets, degrees) for degrees in splits(devices, len(sets))))
    ours = math.inf
    if stages is not None:
        ours = test_piper.value(
            costs, [frozenset(stage.layers) for stage in stages], tuple(stage.replicas for stage in stages)
        )
    yield "piper", ours > best * CLOSE
    edges, _ = draw_tree(dice, layers)
    costs, tree = draw_costs(dice, edges, layers, devices, True, link), tree_of(layers, edges)
    parts = tree.parts if isinstance(tree, Series) else (tree,)
    ways = [list(sets) for sets in {frozenset(sets) for sets in test_graphpipe.every_series(parts)}]
    best = min(
        slowest(costs, list(zip(sets, replicas, strict=True)))
        for sets in ways
        if len(sets) <= devices
        for replicas in splits(devices, len(sets))
    )
    rows = [[(frozenset(stage.layers), stage.replicas) for stage in graph] for graph in graphpipe_stages(costs)]
    yield "graphpipe (within 1.01)", min((slowest(costs, row) for row in rows), default=math.inf) > best * 1.0101


def of_checks(dice: random.Random) -> Iterator[tuple[str, bool]]:
    """Checks of the tests that take a seed, or draw for themselves."""
    seed = dice.randrange(10**6)
    yield "madpipe (allocation)", fails(test_allocation.check_against_every_allocation, dice)
    yield "dawnpiper (as printed)", fails(test_dawnpiper.test_algorithm_1_line_by_line, seed)
    rising = test_dawnpiper.test_what_fits_fits_whatever_the_speed_of_the_tier_and_without_one
    yield "dawnpiper (a faster tier never fits less)", fails(rising, seed)
    yield "vpipe (its passes)", fails(test_vpipe.test_the_passes_read_again_end_at_the_same_cuts, seed)


def fails(check: Callable[[object], object], argument: object) -> bool:
    """Return whether a check raises AssertionError."""
    try:
        check(argument)
    except AssertionError:
        return True
    return False


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instances", type=int, default=300, help="of every planner")
    arguments = parser.parse_args()
    print("| planner | instances | wrong | seconds |\n|---|---|---|---|")
    for questions in (of_cuts, of_throughput, of_gpipe, of_replicas, of_checks):
        counts, began = dict[str, list[bool]](), time.process_time()
        for number in range(arguments.instances):
            for planner, wrong in questions(random.Random(f"{questions.__name__} {arguments.seed} {number}")):
                counts.setdefault(planner, []).append(wrong)
        seconds = time.process_time() - began
        for planner, wrong_ones in counts.items():
            print(f"| {planner} | {len(wrong_ones):,} | {sum(wrong_ones)} | {seconds / len(counts):.0f} |", flush=True)


if __name__ == "__main__":
    main()
