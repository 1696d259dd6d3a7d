"""Runs the membership protocol through random histories, large worlds and exhaustive searches; appends the results.

Every call appends one JSON line per part to a results file, with seeds, versions and outcome; the tables of the README
are the sums of that file (`--total`). A broken rule or a run that gets stuck ends the program and shows the history or
the path to it.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from tables import fill, table

from tests.rig.search.explore import Scenario, explore
from tests.rig.search.histories import draw, play
from tests.rig.search.places import make_job
from varuna_capslog.membership import generation

RESULTS = Path(__file__).with_name("results.jsonl")
README = Path(__file__).with_name("README.md")

Row = Mapping[str, Any]

SCENARIOS: dict[str, dict[str, Any]] = {
    "2 crashes, sync": {"faults": 2, "kinds": ("crash",)},
    "2 crashes, async": {"faults": 2, "kinds": ("crash",), "sync": False},
    "2 crashes, 3 steps": {"faults": 2, "kinds": ("crash",), "steps": 3},
    "2 crashes, value by value": {"faults": 2, "kinds": ("crash",), "singly": True},
    "crash and hang, stale watches": {"faults": 2, "kinds": ("crash", "hang"), "once": True, "stale": True},
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
    "notice, shadows": {"faults": 0, "leaves": 1, "shadows": True},
    "notice and join, 3 steps, shadows, no copies": {
        "faults": 0,
        "leaves": 1,
        "members": 2,
        "steps": 3,
        "shadows": True,
        "redundancy": 0,
    },
    "2 hints, shadows": {"faults": 0, "hints": 2, "shadows": True},
    "hint and notice, shadows": {"faults": 0, "hints": 1, "leaves": 1, "shadows": True},
    "crash and hint, shadows": {"faults": 1, "kinds": ("crash",), "hints": 1, "shadows": True},
    "late notice, 3 steps, shadows": {"faults": 0, "late": 1, "steps": 3, "shadows": True},
    "late notice, value by value": {"faults": 0, "late": 1, "singly": True},
    "hint and late notice, shadows": {"faults": 0, "hints": 1, "late": 1, "shadows": True},
    "crash and late notice": {"faults": 1, "kinds": ("crash",), "late": 1},
    "crash and late notice, async": {"faults": 1, "kinds": ("crash",), "late": 1, "sync": False},
    "hiccup and late notice": {"faults": 1, "kinds": ("hiccup",), "late": 1},
    "loss of the store and late notice": {"faults": 1, "kinds": ("store",), "late": 1},
    "late notice and join": {"faults": 0, "late": 1, "members": 2},
    "2 crashes and late notice": {"faults": 2, "kinds": ("crash",), "late": 1},
    "crash, join and late notice": {"faults": 1, "kinds": ("crash",), "late": 1, "members": 2},
    "damage and notice, shadows": {"faults": 1, "kinds": ("damage",), "leaves": 1, "shadows": True},
    "damage, hiccup and notice, shadows, no copies": {
        "faults": 2,
        "kinds": ("damage", "hiccup"),
        "once": True,
        "leaves": 1,
        "shadows": True,
        "redundancy": 0,
    },
    "damage, crash and notice, shadows, no copies": {
        "faults": 2,
        "kinds": ("damage", "crash"),
        "once": True,
        "leaves": 1,
        "shadows": True,
        "redundancy": 0,
    },
    "2 crashes, small motions": {"faults": 2, "kinds": ("crash",), "steps": 3, "plans": True, "motions": True},
    "2 of hiccup, store": {"faults": 2, "kinds": ("hiccup", "store")},
    "crash and hang": {"faults": 2, "kinds": ("crash", "hang"), "once": True},
    "crash and cut": {"faults": 2, "kinds": ("crash", "cut"), "once": True},
    "hang and store": {"faults": 2, "kinds": ("hang", "store"), "once": True},
    "cut and store": {"faults": 2, "kinds": ("cut", "store"), "once": True},
    "hang and hiccup": {"faults": 2, "kinds": ("hang", "hiccup"), "once": True},
    "cut and hiccup": {"faults": 2, "kinds": ("cut", "hiccup"), "once": True},
    "2 hangs, 1 step": {"faults": 2, "kinds": ("hang",), "steps": 1},
    "2 hangs": {"faults": 2, "kinds": ("hang",)},
    "hang and cut, 1 step": {"faults": 2, "kinds": ("hang", "cut"), "once": True, "steps": 1},
    "hang and cut": {"faults": 2, "kinds": ("hang", "cut"), "once": True},
    "2 cuts, 1 step": {"faults": 2, "kinds": ("cut",), "steps": 1},
    "2 cuts": {"faults": 2, "kinds": ("cut",)},
}


def commit() -> str:
    """Return the commit under test."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line to the results file and print it."""
    full = {**line, "commit": commit(), "python": platform.python_version(), "time": round(time.time())}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(full) + "\n")
    print(json.dumps(full), flush=True)


def histories(first: int, count: int, seconds: float, members: int | None, ladder: bool, path: Path) -> None:
    """Simulate the seeds from `first` on until `count` are done or the processor seconds are spent.

    Args:
        ladder: see `draw`; a seed then draws a different history.
    """
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    events = generations = back = done = 0
    began = time.process_time()
    for seed in range(first, first + count):
        outcome = play(draw(seed, members, ladder))
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
            "ladder": ladder,
            "events": events,
            "generations": generations,
            "went_back_to_checkpoint": back,
            "ended": dict(ends),
            "faults": dict(faults),
            "cpu_seconds": round(time.process_time() - began, 1),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        },
    )


def search(name: str, most: int, deep: bool, path: Path, lineage: int | None = None) -> None:
    """Explore one scenario, to its end or until `most` states; `deep`: see `explore`.

    Args:
        lineage: most entries of a record's lineage; None: the limit of a run.
    """
    if lineage is not None:
        generation.LINEAGE_ENTRIES = lineage
    options = dict(SCENARIOS[name])
    redundancy = options.get("redundancy", 1)
    job = make_job(3, redundancy, sync=options.pop("sync", True), shadows=options.pop("shadows", False))
    began = time.process_time()

    def tell(states: int, waiting: int) -> None:
        seconds = time.process_time() - began
        print(f"{name}: {states:,} states, {waiting:,} waiting, {seconds:,.0f} s", file=sys.stderr, flush=True)

    exploration = explore(Scenario(job=job, **options), most=most, deep=deep, tell=tell)
    label = name if lineage is None else f"{name}, lineage of {lineage}"
    line = {"part": "search", "scenario": label, "states": exploration.states, "transitions": exploration.transitions}
    line |= {"complete": exploration.complete, "stuck": exploration.stuck if exploration.complete else None}
    line |= {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
    append(path, {**line, "cpu_seconds": round(time.process_time() - began, 1)})
    if exploration.stuck:
        raise SystemExit("no way on after\n" + "\n".join(map(str, exploration.trace)))


def seeds(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """Return each range of seeds once, and the text of the union: "0 to 9,999", with a comma at each gap.

    Raises:
        SystemExit: different ranges overlap, so that histories would count twice.
    """
    kept = {(row["first_seed"], row["histories"]): row for row in rows}
    ends: list[tuple[int, int]] = []
    for first, count in sorted(kept):
        if ends and first < ends[-1][1]:
            raise SystemExit(f"seeds from {first} on are in two ranges of the results; leave one line out")
        if ends and first == ends[-1][1]:
            ends[-1] = (ends[-1][0], first + count)
        else:
            ends.append((first, first + count))
    return list(kept.values()), ", ".join(f"{first:,} to {end - 1:,}" for first, end in ends)


def tables(rows: Sequence[Row]) -> str:
    """Return the README's tables, from the lines of the results file."""
    names = ("seeds", "histories", "events", "generations", "faults", "back to a checkpoint", "commits", "CPU s")
    played: list[list[object]] = []
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row["part"] == "histories":
            groups.setdefault((str(row["members"]), row.get("ladder", False)), []).append(row)
    for (members, ladder), group in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        kept, covered = seeds(group)
        keys = ("histories", "events", "generations", "faults", "went_back_to_checkpoint")
        counts = [sum(sum(row[key].values()) if key == "faults" else row[key] for row in kept) for key in keys]
        cells = [members, "all" if ladder else "leaves only", covered, *(f"{count:,}" for count in counts)]
        cells += [str(len({row["commit"] for row in kept})), f"{sum(row['cpu_seconds'] for row in kept):,.0f}"]
        played.append(list(cells))
    searched: list[list[object]] = []
    newest = {row["scenario"]: row for row in rows if row["part"] == "search"}
    for name, row in newest.items():
        end = f"complete, {row['stuck']} stuck" if row["complete"] else "cut off"
        sizes = [f"{row['states']:,}", f"{row['transitions']:,}"]
        searched.append([name, *sizes, end, row["cpu_seconds"], row["commit"]])
    first = table(["members", "notices", *names], played)
    return first + "\n" + table(["scenario", "states", "transitions", "outcome", "CPU s", "commit"], searched)


def total(path: Path, readme: Path) -> None:
    """Write the tables between the README's marks."""
    text = tables([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    fill(readme, text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--histories", type=int, default=0, help="how many seeds")
    parser.add_argument("--members", type=int, default=None, help="members of every history (default: 2 to 8)")
    parser.add_argument("--ladder", action="store_true", help="histories with hints and checkpoints before a leave")
    parser.add_argument("--seconds", type=float, default=1e9, help="processor seconds after which seeds end")
    parser.add_argument("--search", nargs="*", default=[], help=f"scenarios: all, or of {list(SCENARIOS)}")
    parser.add_argument("--most", type=int, default=2_000_000, help="states after which a search is cut off")
    parser.add_argument("--deep", action="store_true", help="search depth first: far less memory, no shortest path")
    parser.add_argument("--lineage", type=int, help="entries of a record's lineage at most (default: 64)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--total", action="store_true", help="write the sums of the results file into the README")
    args = parser.parse_args()
    if args.histories:
        histories(args.first, args.histories, args.seconds, args.members, args.ladder, args.results)
    for name in SCENARIOS if args.search == ["all"] else args.search:
        search(name, args.most, args.deep, args.results, args.lineage)
    if args.total:
        total(args.results, README)


if __name__ == "__main__":
    main()
