"""Runs every fault at every point, or some of them: see README.md.

Each scenario is a run of real processes whose results must equal the uninterrupted run's bit by bit. Appends a line per
scenario to `results.jsonl`; ends with an error if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each connection to a closed store would log an error

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.elastic.live import Cradle, truth_of  # noqa: E402
from tests.elastic.scenarios import all_scenarios, many_changes  # noqa: E402

KINDS = {
    r"kill .* of 3x1": "at each point of a step, three stages",
    r"kill .* of 2x2": "at each point of a step, two replicas of two stages",
    r"async: kill": "in a step, copies one step late (`async`)",
    r"leave .*(of four|: kill)": "in a planned leave",
    r"crash": "during the recovery from a crash",
    r"join": "during a join",
    r"async: (leave|crash|join)": "in these three, copies one step late",
    r"\d+ changes": "many changes in one run",
    r".*": "stops, hangs, several at once, store, disk, refusal",
}


def print_totals(path: Path) -> None:
    """Print a row per kind (scenarios, runs, failed runs, most steps computed again) and the runs by revision."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows: dict[str, list[dict]] = {title: [] for title in KINDS.values()}
    for line in lines:
        rows[next(title for pattern, title in KINDS.items() if re.match(pattern, line["name"]))].append(line)
    write = sys.stdout.write
    write("| a member is lost | scenarios | runs | failed | most steps made again |\n|---|---|---|---|---|\n")
    for title, of_kind in rows.items():
        names, bad = {line["name"] for line in of_kind}, [line for line in of_kind if line["outcome"] == "FAILED"]
        again = max((line.get("steps_again", 0) for line in of_kind), default=0)
        write(f"| {title} | {len(names)} | {len(of_kind)} | {len(bad)} | {again} |\n")
    bad = [line for line in lines if line["outcome"] == "FAILED"]
    write(f"| all | {len({line['name'] for line in lines})} | {len(lines)} | {len(bad)} | |\n")
    revisions = Counter((line["revision"], line["python"], line["torch"]) for line in lines)
    for (revision, python, torch_version), count in revisions.items():
        write(f"{revision}, Python {python}, torch {torch_version}: {count}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that names must hold")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th scenario")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="... beginning with this one")
    parser.add_argument("--changes", type=int, default=0, metavar="N", help="instead: N changes within one run")
    parser.add_argument("--total", action="store_true", help="run nothing: the sums of the results")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    args = parser.parse_args()
    if args.total:
        print_totals(args.results)
        return
    base = Path(tempfile.mkdtemp(prefix="capslog-faults-"))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "revision": revision.stdout.strip()}
    truth = truth_of(base / "truth")
    cradle = Cradle(base)
    failed, done, beyond = [], 0, set()
    chosen = [(name, run) for name, run in all_scenarios() if re.search(args.only, name)][args.first :: args.every]
    if args.changes:
        chosen = [(f"{args.changes} changes", lambda *arguments: many_changes(*arguments, count=args.changes))]
    try:
        for number, (name, run) in enumerate(chosen):
            stem, _, action = name.partition("action ")
            if stem in beyond and action:
                continue
            folder, began = base / f"run-{number}", time.monotonic()
            line = {"name": name, "outcome": "as it should", **versions, "time": time.time()}
            try:
                outcome = run(cradle, truth, folder)
                if outcome is None:
                    line["outcome"] = "no such point"
                    beyond.add(stem)
                else:
                    line |= {"steps_again": len(outcome.rows) - len(outcome.accepted()), **outcome.notes}
            except Exception as error:
                line["outcome"], text = "FAILED", "".join(traceback.format_exception(error))
                failed.append(name)
                sys.stderr.write(f"{name}\n{text}\n")
            cradle.sweep()
            done += 1
            line["seconds"] = round(time.monotonic() - began, 1)
            sys.stdout.write(f"{line['outcome']:>14}  {line['seconds']:5.1f} s  {name}\n")
            sys.stdout.flush()
            if line["outcome"] != "no such point":
                with open(args.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        cradle.close()
        shutil.rmtree(base, ignore_errors=True)
    sys.stdout.write(f"{done} scenarios, {len(failed)} failed\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
