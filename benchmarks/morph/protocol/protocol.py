"""Runs the membership protocol through random histories, large worlds and exhaustive searches; appends what it found.

Every call appends one JSON line per part to a results file, with seeds, versions and outcome; totals are the sums of
that file (`--total`). A broken rule or a run that gets stuck ends the program with the history or the path to it.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from varuna_capslog.elastic.rig.explore import Scenario, explore
from varuna_capslog.elastic.rig.histories import draw, play
from varuna_capslog.elastic.rig.world import make_job

RESULTS = Path(__file__).with_name("results.jsonl")

SCENARIOS: dict[str, dict[str, Any]] = {
    "2 crashes, sync": {"faults": 2, "kinds": ("crash",)},
    "2 crashes, async": {"faults": 2, "kinds": ("crash",), "sync": False},
    "2 crashes, 3 steps": {"faults": 2, "kinds": ("crash",), "steps": 3},
    "2 crashes, value by value": {"faults": 2, "kinds": ("crash",), "singly": True},
    "2 crashes, stale watches": {"faults": 2, "kinds": ("crash",), "stale": True},
    "2 crashes, one hasty tick": {"faults": 2, "kinds": ("crash",), "hasty": 1},
    "2 of crash, store": {"faults": 2, "kinds": ("crash", "store")},
    "2 of crash, hiccup": {"faults": 2, "kinds": ("crash", "hiccup")},
    "1 hang": {"faults": 1, "kinds": ("hang",)},
    "1 cut": {"faults": 1, "kinds": ("cut",)},
    "crash and notice": {"faults": 1, "kinds": ("crash",), "leaves": 1},
    "crash and 2 notices": {"faults": 1, "kinds": ("crash",), "leaves": 2},
    "2 crashes and notice": {"faults": 2, "kinds": ("crash",), "leaves": 1},
    "crash and join": {"faults": 1, "kinds": ("crash",), "members": 2},
    "2 crashes and join": {"faults": 2, "kinds": ("crash",), "members": 2},
    "crash, hiccup, store and notice": {"faults": 1, "kinds": ("crash", "hiccup", "store"), "leaves": 1},
    "2 of crash, hang": {"faults": 2, "kinds": ("crash", "hang")},
    "2 of crash, cut": {"faults": 2, "kinds": ("crash", "cut")},
    "2 of all": {"faults": 2},
}


def commit() -> str:
    """The version under test."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def append(path: Path, line: dict[str, Any]) -> None:
    """One more line of results."""
    full = {**line, "commit": commit(), "python": platform.python_version(), "time": round(time.time())}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(full) + "\n")
    print(json.dumps(full), flush=True)


def histories(first: int, count: int, seconds: float, members: int | None, path: Path) -> None:
    """Plays the seeds from `first` on until `count` are done or the processor seconds are spent."""
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    events = generations = back = done = 0
    began = time.process_time()
    for seed in range(first, first + count):
        outcome = play(draw(seed, members))
        ends[outcome.ended] += 1
        faults += outcome.faults
        events, generations = events + outcome.events, generations + outcome.generations
        back, done = back + outcome.went_back, done + 1
        if time.process_time() - began > seconds:
            break
    append(
        path,
        {
            "part": "histories",
            "first_seed": first,
            "histories": done,
            "members": members or "2 to 8",
            "events": events,
            "generations": generations,
            "went_back_to_checkpoint": back,
            "ended": dict(ends),
            "faults": dict(faults),
            "cpu_seconds": round(time.process_time() - began, 1),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        },
    )


def search(name: str, most: int, path: Path) -> None:
    """Explores one scenario, to its end or until `most` states."""
    options = dict(SCENARIOS[name])
    job = make_job(3, 1, sync=options.pop("sync", True))
    began = time.process_time()
    found = explore(Scenario(job=job, **options), most=most)
    line = {"part": "search", "scenario": name, "states": found.states, "transitions": found.transitions}
    line |= {"complete": found.complete, "stuck": found.stuck if found.complete else None}
    append(path, {**line, "cpu_seconds": round(time.process_time() - began, 1)})
    if found.stuck:
        raise SystemExit("no way on after\n" + "\n".join(map(str, found.trace)))


def total(path: Path) -> None:
    """Sums the results file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        if row["part"] == "histories":
            counts = sums.setdefault(f"histories of {row['members']} members", Counter())
            keys = ("histories", "events", "generations", "went_back_to_checkpoint", "cpu_seconds")
            counts.update({key: row[key] for key in keys})
            counts["faults"] += sum(row["faults"].values())
    for name, counts in sums.items():
        print(name, dict(counts))
    for row in rows:
        if row["part"] == "search":
            end = "complete, 0 stuck" if row["complete"] and not row["stuck"] else "cut off"
            print(f"| {row['scenario']} | {row['states']:,} | {row['transitions']:,} | {end} | {row['cpu_seconds']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--histories", type=int, default=0, help="how many seeds")
    parser.add_argument("--members", type=int, default=None, help="members of every history (default: 2 to 8)")
    parser.add_argument("--seconds", type=float, default=1e9, help="processor seconds after which seeds end")
    parser.add_argument("--search", nargs="*", default=[], help=f"scenarios: all, or of {list(SCENARIOS)}")
    parser.add_argument("--most", type=int, default=2_000_000, help="states after which a search is cut off")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--total", action="store_true", help="print the sums of the results file")
    given = parser.parse_args()
    if given.histories:
        histories(given.first, given.histories, given.seconds, given.members, given.results)
    for name in SCENARIOS if given.search == ["all"] else given.search:
        search(name, given.most, given.results)
    if given.total:
        total(given.results)


if __name__ == "__main__":
    main()
