"""Times the way from a config.json to a plan on eight devices, a new process with an empty cache for each row.

The columns from `imports` on are seconds of the processor, which other programs on the machine change less than those
of the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sizes import SIZES, write_config

PHASES = {
    "capture": [("varuna_capslog.profiling.estimate", "StageEstimator.of_config")],
    "estimate": [("varuna_capslog.profiling.estimate", "_profile")],
    "search": [("varuna_capslog.planning.fastest", "fastest_plan")],
    "rehearsal": [("varuna_capslog.profiling.rehearsal", "rank_peaks")],
}
"""Phase -> the functions in which its seconds are spent; what is missing of the whole is start-up and output."""
HEADINGS = ("model", "devices", "fits", "seconds", "processor", "imports", *PHASES, "GiB", "answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--kinds", nargs="*", default=["h100-80gb", "h200"])
    parser.add_argument("--limit", type=int, default=900, help="seconds of one row")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row:
        print(json.dumps(_row(*flags.row)))
        return
    print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
    for name in flags.models:
        for kind in flags.kinds:
            print(_line(name, kind, flags.limit), flush=True)


def _line(name: str, kind: str, limit: int) -> str:
    """Return the row of the table for one model and kind of GPU, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, Path(folder))
        command = [sys.executable, __file__, "--row", folder, kind]
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            return f"| {name} | 8 x {kind} | no answer within {limit} s |"
    if run.returncode:
        return f"| {name} | 8 x {kind} | {run.stderr.splitlines()[-1][:200]} |"
    row = json.loads(run.stdout.splitlines()[-1])
    cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row]
    return "| " + " | ".join([name, f"8 x {kind}", *cells]) + " |"


def _row(folder: str, kind: str) -> list[Any]:
    """Plan in this process; return the cells from `fits` on."""
    begun, begun_processor = time.perf_counter(), time.process_time()
    from varuna_capslog import cli

    for name in ("torch", "transformers", "varuna_capslog.start.prepare"):
        importlib.import_module(name)
    spent = dict.fromkeys(PHASES, 0.0)
    open_phases: list[str] = []
    for phase, places in PHASES.items():
        for module, function in places:
            _time(importlib.import_module(module), function, phase, spent, open_phases)
    imports = time.process_time() - begun_processor
    plan = Path(folder) / "plan.json"
    arguments = ["plan", "--hf", folder, "--devices", "8", "--device", f"cuda:{kind}", "--sequence", "4096"]
    sys.argv = ["capslog", *arguments, "--model-arg", "dtype=bfloat16", "-o", str(plan)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli.main()
    seconds, usage = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    fits, answer = "-", " ".join(said.getvalue().split())[-160:]
    if plan.exists():
        content = json.loads(plan.read_text())
        fits, answer = content["fits"], _in_short(content)
    gib = usage.ru_maxrss / (1 << 20)
    whole = [seconds, usage.ru_utime + usage.ru_stime, imports]
    return [fits, *whole, *spent.values(), f"{gib:.2f}", answer]


def _in_short(plan: dict[str, Any]) -> str:
    ends = [stage["layers"][0] for stage in plan["stages"]] if isinstance(plan["stages"], list) else []
    return ", ".join(str(end - first) for first, end in ends) + " layers"


def _time(module: Any, function: str, phase: str, spent: dict[str, float], open_phases: list[str]) -> None:
    """Count the seconds of a function under a phase, without those of other phases inside it."""
    owner, _, name = function.rpartition(".")
    holder = getattr(module, owner) if owner else module
    made = vars(holder)[name]
    inner = made.__func__ if isinstance(made, classmethod) else made

    @functools.wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        before, begun = sum(spent.values()), time.process_time()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[phase] += time.process_time() - begun - (sum(spent.values()) - before)

    setattr(holder, name, classmethod(timed) if isinstance(made, classmethod) else timed)


if __name__ == "__main__":
    main()
