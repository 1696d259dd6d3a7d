"""One command that tells what this software does on the GPUs of this machine, in at most eight minutes.

`launch/gpu.sh` runs it. Every part runs in a process of its own (`parts/`), on the CPU with small sizes and, where
there is a GPU, on the GPU with real ones. One JSON is written again after each part, and one table is printed at the
end; a row that was not run says why. This process never uses a GPU itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _folder in ("morph", "truth", "step_equality", "one_stage", ""):  # the benchmarks that parts share code with
    sys.path.insert(0, str(ROOT / "benchmarks" / _folder))
sys.path[:0] = [str(ROOT), str(HERE)]

from report import Report, Row  # noqa: E402 (the command runs from a bare checkout)
from running import Ended, raise_when_ended, run_part  # noqa: E402

PARTS = {"equality": 60, "estimates": 90, "ranks": 150, "nccl": 45, "morph": 90, "overheads": 60, "costs": 60}
"""By name, in the order of their turns: the seconds of each on one device, where the command has `SECONDS`. A part gets
more where those after it do not need all that is left."""
DEVICES = ("cuda", "cpu")
SECONDS = 450.0
"""Of all parts; what is left of the eight minutes is for ending them."""


class Tell:
    """What a part gets to tell its rows with.

    Attributes:
        facts: what `parts/facts.py` found.
    """

    def __init__(self, path: Path, part: str, device: str, facts: Mapping[str, Any]) -> None:
        self._path, self._of, self.facts = path, {"part": part, "device": device}, facts

    def __call__(self, name: str, result: str, passed: bool | None = None, **numbers: Any) -> None:
        """A row was measured."""
        self._write({"name": name, "result": result, "passed": passed, "numbers": numbers})

    def not_run(self, name: str, why: str, lacks: bool = True) -> None:
        """A row was not.

        Args:
            lacks: since the machine has not what it needs.
        """
        self._write({"name": name, "not_run": why, "lacks": lacks})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._of | line) + "\n")


def main() -> int:
    """Runs all parts; 0 where every row was measured, met its aim, or lacks what this machine does not have."""
    given = arguments()
    if given.part is not None:
        return one_part(given)
    began = time.monotonic()
    chosen = [part for part in PARTS if not given.only or part in given.only]
    report = Report(given.output)
    for part in chosen:
        for device in given.devices:
            rows = importlib.import_module(f"parts.{part}").ROWS[device]
            report.rows += [Row(part, device, name, aim) for name, aim in rows.items()]
    status = 0
    raise_when_ended()
    with tempfile.TemporaryDirectory(prefix="capslog-gpu-") as name:
        try:
            run_all(report, chosen, Path(name), given.seconds)
        except Ended as error:
            status = 128 + error.number
            report.close(report.rows, error.why)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        report.machine["seconds"] = round(time.monotonic() - began, 1)
        report.machine["processor_seconds"] = round(used.ru_utime + used.ru_stime, 1)
        report.write()
    sys.stdout.write(report.table() + f"\n\n{report.path} has all numbers\n")
    return status or int(any(row.is_failure for row in report.rows))


def run_all(report: Report, chosen: list[str], folder: Path, seconds: float) -> None:
    """Runs the parts in turn, those of the GPU first, in so many seconds."""
    until, share = time.monotonic() + seconds, seconds / SECONDS
    report.write()
    facts = folder / "facts"
    facts.mkdir()
    failed = run_part([*command("facts"), "--rows", str(facts / "rows")], facts, 60.0, report.machine.update)
    if failed is not None:
        raise SystemExit(f"torch cannot be used here: {failed}")
    if why := report.machine["no_cuda"]:
        report.close([row for row in report.rows if row.device == "cuda"], why, lacks=True)
    report.write()
    turns = [(device, part) for device in DEVICES for part in chosen]
    turns = [(device, part) for device, part in turns if any(row.is_open for row in report.of(part, device))]
    for number, (device, part) in enumerate(turns):
        rows, left = report.of(part, device), until - time.monotonic()
        if left < 5:
            report.close(rows, "the time was spent")
            continue
        own = folder / f"{part}-{device}"
        own.mkdir()
        files = ["--rows", str(own / "rows"), "--facts", str(facts / "rows")]
        say(f"{part} on {device} ...")
        spare = left - share * sum(PARTS[later] for _, later in turns[number + 1 :])
        limit = min(max(share * PARTS[part], spare), left)
        whole = [*command(part), "--device", device, *files]
        why = run_part(whole, own, limit, lambda line: say(told(report.take(line))))
        report.close(rows, why or "its part ended without it")
        report.write()


def command(part: str) -> list[str]:
    """What runs one part."""
    return [sys.executable, str(Path(__file__).resolve()), "--part", part]


def one_part(given: argparse.Namespace) -> int:
    """The process of one part."""
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"parts.{given.part}")
    if given.part == "facts":
        given.rows.write_text(json.dumps(module.found()) + "\n")
        return 0
    facts = json.loads(given.facts.read_text())
    module.measure(torch.device(given.device), Tell(given.rows, given.part, given.device, facts))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/gpu/result.json", help="file for the JSON")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES), help="rows of these alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    # for the processes of the parts
    parser.add_argument("--part", choices=["facts", *PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def told(row: Row) -> str:
    """A row as a line for whoever watches."""
    return f"    {row.name}: {row.result or 'not run: ' + row.not_run}"


def say(text: str) -> None:
    """A line for whoever watches."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
