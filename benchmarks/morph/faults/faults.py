"""Runs every fault at every point, or some of them: see README.md.

Each scenario is a run of real processes that is held to the uninterrupted one, to the last bit. Appends a line per
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
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is closed, by each connection to it

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.elastic.live import Cradle, truth_of  # noqa: E402
from tests.elastic.scenarios import all_scenarios, many_changes  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that names must hold")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th scenario")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="... beginning with this one")
    parser.add_argument("--changes", type=int, default=0, metavar="N", help="instead: N changes within one run")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    given = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="capslog-faults-"))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "revision": revision.stdout.strip()}
    truth = truth_of(base / "truth")
    cradle = Cradle(base)
    failed, done, beyond = [], 0, set()
    chosen = [(name, run) for name, run in all_scenarios() if re.search(given.only, name)][given.first :: given.every]
    if given.changes:
        chosen = [(f"{given.changes} changes", lambda *them: many_changes(*them, count=given.changes))]
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
                with open(given.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        cradle.close()
        shutil.rmtree(base, ignore_errors=True)
    sys.stdout.write(f"{done} scenarios, {len(failed)} failed\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
