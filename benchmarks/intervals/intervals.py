"""Compares the search over memory intervals with all choices of random stages, and times it on long chains."""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import write_json

from tests.planners.intervals.stages import random_handling, random_profile, weighed
from varuna_capslog.config.reading import load_config
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals import Handling, IntervalSearch, stage_bytes
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.profiling.estimate import estimate_config

ROOT = Path(__file__).parents[2]
SHARES = {1: 0.1, 2: 0.2, 3: 0.28, 4: 0.3, 5: 0.105, 6: 0.0125, 7: 0.002, 8: 0.0005}
"""Layers -> share of the instances. A chain of eight layers has 230,000 choices."""
IN_FLIGHT = range(1, 9)
READS = ("saved", "moved", "staying", "only_entered", "bare", "read_with_gradient", "passed", "shared", "statistics")


def remembered(ranges: RangeBytes) -> RangeBytes:
    """Cache the answers of the range bytes, in place."""
    for name in READS:
        setattr(ranges, name, functools.cache(getattr(ranges, name)))
    return ranges


def one_instance(draw: random.Random, size: int) -> tuple[int, int]:
    """Return (choices, questions) of a random stage of `size` layers; fails at the first answer that is not optimal."""
    profile = random_profile(draw, size)
    handling = random_handling(draw, profile)
    ranges = remembered(RangeBytes(profile, "ranks", True))
    search = IntervalSearch(ranges, LayerSeconds.of_profile(profile), handling)
    choices = weighed(profile, ranges, 0, size, handling, len(IN_FLIGHT))
    seconds, bytes_ = np.array([choice.seconds for choice in choices]), np.array([choice.bytes for choice in choices])
    questions = 0
    for number, in_flight in enumerate(IN_FLIGHT):
        column = bytes_[:, number]
        least = int(column.min())
        assert search.least_bytes(0, size, in_flight) == (least, least)
        assert search.cheapest(0, size, in_flight, least - 1) is None
        for budget in {least, int(column.max()), *draw.choices(column.tolist(), k=6)}:
            fit = column <= budget
            best = seconds[fit].min()
            fewest = column[fit & (seconds == best)].min()
            choice = search.cheapest(0, size, in_flight, budget)
            assert choice is not None
            assert (choice.seconds, choice.bound_seconds, choice.bytes) == (best, best, fewest)
            assert choice.bytes == stage_bytes(ranges, 0, size, choice.intervals, in_flight, handling)
            questions += 1
    return len(choices), questions


def beside_all_choices(instances: int, seed: int) -> dict[str, object]:
    draw = random.Random(seed)
    sizes = [size for size, share in SHARES.items() for _ in range(round(share * instances))]
    counts, choices, questions, began = Counter(sizes), 0, 0, time.process_time()
    for size in sizes:
        new = one_instance(draw, size)
        choices, questions = choices + new[0], questions + new[1]
    took = time.process_time() - began
    print(
        f"{len(sizes)} instances ({dict(counts)} by layers), {choices} choices, {questions} questions: all answers best"
    )
    print(f"{took:.0f} s of one core")
    return {"instances": dict(counts), "choices": choices, "questions": questions, "processor_seconds": took}


def of_all_ranges(name: str, profile: Profile, handling: Handling, labels: int) -> dict[str, object]:
    """Measure seconds of the search and of the queries for all ranges and calls in flight, and the optimality gaps."""
    ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
    began = time.process_time()
    search = IntervalSearch(ranges, seconds, handling, labels)
    searched = time.process_time()
    budgets = [stage_bytes(ranges, 0, profile.num_layers, (), 1, handling) // part for part in (2, 4, 8)]
    gaps, missed, fits = [], 0, 0
    for budget in budgets:
        for in_flight in IN_FLIGHT:
            achieved, bounds = search.seconds(in_flight, budget)
            there = np.isfinite(achieved)
            gaps += (achieved[there] / bounds[there]).tolist()
            fits += int(there.sum())
            missed += int((np.isfinite(bounds) & ~there).sum())
    ask_seconds = (time.process_time() - searched) / len(budgets)
    exact = sum(gap <= 1 + 1e-9 for gap in gaps) / len(gaps)
    print(
        f"| {name} | {'yes' if handling.recomputed else 'no'} | {'yes' if handling.later else 'no'} | {labels} | "
        f"{searched - began:.1f} s | {ask_seconds:.2f} s | {exact:.0%} | {statistics.median(gaps) - 1:.1%} | "
        f"{np.quantile(gaps, 0.95) - 1:.1%} | {missed / (missed + fits):.1%} |"
    )
    return {
        "name": name,
        "labels": labels,
        "search_seconds": searched - began,
        "ask_seconds": ask_seconds,
        "proven": exact,
    }


def slower(layer: LayerProfile, factor: float) -> LayerProfile:
    """Return the layer with its seconds scaled, so that no two layers take equally long."""
    return replace(layer, forward_seconds=factor * (layer.forward_seconds or 0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--labels", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result: dict[str, object] = {}
    if options.instances:
        result["instances"] = beside_all_choices(options.instances, options.seed)
    if options.labels:
        chain = estimate_config(load_config(ROOT / "configs" / "paper" / "rn101_d_e12.yaml"))
        draw = random.Random(options.seed)
        drawn = replace(chain, layers=tuple(slower(layer, draw.uniform(0.5, 2.0)) for layer in chain.layers))
        rows = []
        print("| chain | R | O | labels | search | all ranges, 8 counts | proven | gap, median | 95 % | maybe missed |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for name, profile in (("RN101-D-E12", chain), ("the same, seconds drawn", drawn)):
            for handling in (Handling(True), Handling(True, True, host_bandwidth=12e9)):
                rows += [of_all_ranges(name, profile, handling, labels) for labels in options.labels]
        result["ranges"] = rows
    write_json(options.json, result)


if __name__ == "__main__":
    main()
