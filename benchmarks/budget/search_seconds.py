"""Processor seconds of planner `budget`'s own search with one accumulation block, the schedule open: the paper's six
models on 8 devices.

Every search runs in a new process, so that no cache of an earlier one helps; a small search before has loaded the
modules. With `--before` each search runs in another checkout too, in turn. Prints README.md's table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))  # behind PYTHONPATH, which may name another checkout

from common import plan, write_json
from questions import link_of, questions

from varuna_capslog.base.units import format_bytes, parse_bytes
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.profiles.record import read_profile, write_profile
from varuna_capslog.schedules import RunShape

DEVICES, HERE = 8, Path(__file__).resolve()


def ask(path: str, capacity: int, rate: str, microbatches: int) -> dict[str, Any]:
    """Search once in this process."""
    profile, link = read_profile(path), link_of(rate)
    run = RunShape(microbatches, "auto", True, num_blocks=1)
    plan(profile, 2, "budget", capacity=1 << 60, run=RunShape(4, "auto", True, num_blocks=1))
    problem = replace(Problem.of(profile, DEVICES, capacity, run, link), blocks_open=False)
    begun = time.process_time()
    solution = solve(problem, "budget", weighs_others=False)
    seconds = time.process_time() - begun
    step, bound = solution.step_seconds, solution.bound_seconds
    return {
        "search": seconds,
        "fits": solution.fits,
        "step": step if solution.fits else None,
        "gap": None if step is None or bound is None or not solution.fits else step / bound - 1,
        "peak": max(rank.bytes or 0 for rank in solution.ranks),
        "schedule": solution.schedule,
        "stages": [[list(stage.layers), [str(part) for part in stage.memory or ()]] for stage in solution.stages],
    }


def asked(root: Path, *question: object) -> dict[str, Any]:
    """Search once with a checkout, in a new process."""
    command = [sys.executable, str(root / HERE.relative_to(HERE.parents[2])), "--one", *map(str, question)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = questions(__doc__ or "")
    parser.add_argument("--before", type=Path, help="another checkout, which is asked the same")
    parser.add_argument("--profiles", type=Path, help="a folder where the estimates are kept, or are already")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        path, capacity, rate, microbatches = args.one
        print(json.dumps(ask(path, int(capacity), rate, int(microbatches))))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.profiles or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        models = sorted(path.stem for path in folder.glob("*.json"))
        if not models:
            from paper_models import paper_profiles

            for model, profile in paper_profiles():
                write_profile(folder / f"{model}.json", profile)
                models.append(model)
        rows, roots = [], [*([args.before.resolve()] if args.before else []), HERE.parents[2]]
        columns = ["search before, s", "after", "step before, s", "after"] if args.before else ["search, s", "step, s"]
        print(f"| model | capacity | links and host | {' | '.join(columns)} | gap |")
        print("|---" * (len(columns) + 4) + "|")
        for capacity in map(parse_bytes, args.capacities.split(",")):
            for rate in args.bandwidths.split(","):
                for model in models:
                    question = folder.resolve() / f"{model}.json", capacity, rate, args.microbatches
                    by_checkout = [asked(root, *question) for root in roots]
                    rows.append({"model": model, "capacity_bytes": capacity, "bandwidth": rate, "answers": by_checkout})
                    seconds = [f"{answer['search']:.2f}" for answer in by_checkout]
                    steps = ["-" if answer["step"] is None else f"{answer['step']:.3f}" for answer in by_checkout]
                    gap = "-" if by_checkout[-1]["gap"] is None else f"{100 * by_checkout[-1]['gap']:.1f} %"
                    cells = model, format_bytes(capacity), rate, *seconds, *steps, gap
                    print(f"| {' | '.join(cells)} |", flush=True)
        answers = [row["answers"] for row in rows]
        for number in range(len(roots)):
            searches = [row[number]["search"] for row in answers]
            within = sum(search <= 1 for search in searches)
            name = "before" if number + 1 < len(roots) else "here"
            print(
                f"\n{name}: {sum(searches):.1f} s in all, {within} of {len(searches)} within a second", file=sys.stderr
            )
        if len(roots) == 2:
            same = sum({**before, "search": 0} == {**after, "search": 0} for before, after in answers)
            print(f"the same plans, peaks and gaps: {same} of {len(answers)}", file=sys.stderr)
        write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
