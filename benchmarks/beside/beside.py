"""Runs the benchmarks of the engine, the start and the search in two versions of the source, interleaved.

Every round runs each benchmark's script once in both source trees; the tree that runs first alternates. Where a script
also measures a reference that both trees run alike (a plain loop, torch's schedule, a bare interpreter), the ratios to
the reference are compared, so that a change of the machine's speed cancels out. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[2]
AIM = 1.02
SEARCH = """
import json, random, statistics, sys, time
sys.path.insert(0, "benchmarks/search")
import search
from varuna_capslog.memory.additive import AdditiveCosts
found = {}
for layers, devices, trials in ((48, 24, 100), (1000, 100, 3)):
    for kind in search.KINDS:
        rng = random.Random(kind.__name__)
        costs = [AdditiveCosts.of_statistics(*kind(rng, layers)) for _ in range(trials)]
        for name in ("capslog", "capslog-tb", "exact"):
            seconds = []
            for one in costs:
                begun = time.thread_time()
                search.PLANNERS[name](one, devices)
                seconds.append(time.thread_time() - begun)
            found[f"{name}, {layers} layers"] = found.get(f"{name}, {layers} layers", 0) + statistics.median(seconds)
json.dump(found, open(sys.argv[1], "w"))
"""


def of_one_stage(result: dict[str, Any]) -> dict[str, float]:
    return {row["model"]: row["cpu_ratio"][0] for row in result["rows"]}


def of_engine_overhead(result: dict[str, Any]) -> dict[str, float]:
    return {f"{row['model']}, {row['ranks']} ranks": row["cpu_ratio"][0] for row in result["rows"]}


def of_startup(result: dict[str, Any]) -> dict[str, float]:
    return {row["command"]: row["median_seconds"] for row in result["rows"][1:]}


BENCHMARKS = {
    "one_stage": (["benchmarks/one_stage/one_stage.py", "--rounds", "12", "--output"], of_one_stage),
    "engine_overhead": (
        ["benchmarks/engine_overhead/engine_overhead.py", "--rounds", "12", "--output"],
        of_engine_overhead,
    ),
    "startup": (["benchmarks/startup/startup.py", "--rounds", "20", "--output"], of_startup),
    "search": (["-c", SEARCH], dict),
}
"""Name: its script and arguments, to which a file for the result is added, and what of the result is compared."""


def run(tree: Path, name: str) -> dict[str, float]:
    """Return the numbers of a benchmark run in a source tree."""
    command, numbers = BENCHMARKS[name]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *command, str(output)], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return numbers(json.loads(output.read_text()))


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the bounds of 95 % of the medians of samples drawn from these ratios with replacement."""
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="source tree of the older version, such as a `git worktree` of it")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--output", type=Path, help="write all numbers as JSON")
    arguments = parser.parse_args()
    trees = {"now": HERE, "base": arguments.base.resolve()}
    times: dict[str, dict[str, list[dict[str, float]]]] = {name: {"now": [], "base": []} for name in arguments.only}
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: the rounds that are done are shown
        for number in range(arguments.rounds):
            order = ["now", "base"] if number % 2 == 0 else ["base", "now"]
            for name in arguments.only:
                pair = {which: run(trees[which], name) for which in order}
                for which, values in pair.items():
                    times[name][which].append(values)
                print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
    print(
        f"| benchmark | case | base | now | now / base, aim {AIM} | its 95 % interval | rounds |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, rows in times.items():
        for case in rows["now"][0] if rows["now"] else ():
            now, base = ([row[case] for row in rows[which]] for which in ("now", "base"))
            ratios = [a / b for a, b in zip(now, base, strict=True)]
            low, high = interval(ratios)
            middle = f"{statistics.median(base):.4g} | {statistics.median(now):.4g} | {statistics.median(ratios):.3f}"
            print(f"| {name} | {case} | {middle} | {low:.3f}-{high:.3f} | {len(ratios)} |", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
