"""Counts the questions for which a planner finds no plan that fits though `exact` or `budget` has one: see README.md.

Random profiles of 3 to 5 layers on 2 devices, each with 0.7, 0.85 and 1 times what the most even cuts need. Exit status
1 where the answer does not name the other planner.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.memory.machine import Model, profile_of
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.schedules import RunShape

RUN = RunShape(4, "1f1b", False)
PLANNERS = ("vpipe", "dawnpiper")


def questions(count: int) -> list[Problem]:
    """Return the questions, three for each profile."""
    problems = []
    for seed in range(count // 3):
        draw = random.Random(seed)
        drawn = profile_of(Model.random(draw, draw.randrange(3, 6), True), "cuda")
        rows = [
            dataclasses.replace(row, forward_seconds=draw.uniform(0.1, 1.0), backward_seconds=draw.uniform(0.1, 2.0))
            for row in drawn.layers
        ]
        profile = dataclasses.replace(drawn, layers=tuple(rows))
        largest = solve(Problem.of(profile, 2, None, RUN), "exact").peak_bytes or 0
        problems += [Problem.of(profile, 2, int(share * largest), RUN) for share in (0.7, 0.85, 1.0)]
    return problems


def main() -> int:
    """Print the table of README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=240)
    problems = questions(parser.parse_args().questions)
    others = [
        any(solve(problem, other, weighs_others=False).fits for other in ("exact", "budget")) for problem in problems
    ]
    silent = 0
    print(
        "| planner | questions | finds none | of which another has one | of which it names it |\n|---|---|---|---|---|"
    )
    for name in PLANNERS:
        answers = [solve(problem, name) for problem in problems]
        missed = [answer.fits is False for answer in answers]
        known = [answer for answer, miss, other in zip(answers, missed, others, strict=True) if miss and other]
        named = sum(any(note.startswith("this planner found none; planner") for note in plan.notes) for plan in known)
        silent += len(known) - named
        print(f"| {name} | {len(problems)} | {sum(missed)} | {len(known)} | {named} |", flush=True)
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main())
