"""Simulates the membership protocol with many members through thousands of changes; appends the run's sizes and costs.

Every call appends a JSON line per sample to a results file: changes so far, the largest record, the sizes of the state
of members and of the log, processor seconds. A broken rule, or a run that stalls, ends the program with an error.
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

from tests.rig.search.churn import Sizes, draw_crowd, play_crowd

RESULTS = Path(__file__).with_name("results.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="changes between two looks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"seed": args.seed, "commit": commit.stdout.strip(), "python": platform.python_version()}

    def note(**found: object) -> None:
        seconds = round(time.process_time(), 1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        line = json.dumps({**about, "at_first": args.members, **found, "cpu_seconds": seconds, "peak_mib": peak})
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def look(sizes: Sizes) -> None:
        note(**asdict(sizes))

    outcome = play_crowd(draw_crowd(args.seed, args.members, args.changes), look, args.every)
    note(ended=outcome.ended, generations=outcome.generations, events=outcome.events,
         went_back_to_checkpoint=outcome.went_back, faults=dict(outcome.faults))  # fmt: skip


if __name__ == "__main__":
    main()
