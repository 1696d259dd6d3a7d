"""Plays the membership protocol with many members through thousands of changes; appends what the run keeps and costs.

Every call appends one JSON line for each look to a results file: changes so far, the largest record, the sizes of what
members and the log keep, processor seconds. A broken rule, or a run that stands still, ends the program with an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.rig.search.crowd import Sizes, draw_crowd, play_crowd

RESULTS = Path(__file__).with_name("results.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="changes between two looks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"seed": given.seed, "commit": commit.stdout.strip(), "python": platform.python_version()}

    def note(**found: object) -> None:
        seconds = round(time.process_time(), 1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        line = json.dumps({**about, "at_first": given.members, **found, "cpu_seconds": seconds, "peak_mib": peak})
        with open(given.results, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def look(sizes: Sizes) -> None:
        note(**asdict(sizes))

    outcome = play_crowd(draw_crowd(given.seed, given.members, given.changes), look, given.every)
    note(ended=outcome.ended, generations=outcome.generations, events=outcome.events,
         went_back_to_checkpoint=outcome.went_back, faults=dict(outcome.faults))  # fmt: skip


if __name__ == "__main__":
    main()
