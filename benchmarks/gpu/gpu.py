"""Measures this software on the GPUs of this machine, in at most five minutes.

`launch/gpu.sh` runs it. Every part runs in separate processes (`parts/`): on the GPU with real sizes or, without a GPU,
on the CPU with small ones. A JSON file is rewritten after each row, and a table is printed at the end; a row that was
not run gives the reason. This process never uses a GPU itself.
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
from running import Ended, Part, raise_when_ended, run_parts  # noqa: E402

TURNS = (
    {"equality": 100, "estimates": 100, "ranks": 100},
    {"seconds": 80},
    {"costs": 30},
    {"morph": 40},
    {"overheads": 30},
    {"nccl": 30},
)
"""Parts by name, in the order of their value, with the seconds of each where the command has `SECONDS`; more where
those after it do not need all that is left. Parts of one turn run side by side on a GPU: none measures seconds."""
PARTS = tuple(part for turn in TURNS for part in turn)
DEVICES = ("cuda", "cpu")
SECONDS = 280.0
"""Of all parts; what is left of the five minutes is for starting and ending them."""


class Tell:
    """Writes the rows of a part.

    Attributes:
        facts: facts of this machine by `parts/facts.py`.
    """

    def __init__(self, path: Path, part: str, device: str, facts: Mapping[str, Any]) -> None:
        self._path, self._of, self.facts = path, {"part": part, "device": device}, facts

    def __call__(self, name: str, result: str, passed: bool | None = None, **numbers: Any) -> None:
        """Write a measured row."""
        self._write({"name": name, "result": result, "passed": passed, "numbers": numbers})

    def not_run(self, name: str, why: str, lacks: bool = True) -> None:
        """Write a row that was not run.

        Args:
            lacks: the machine lacks what the row needs.
        """
        self._write({"name": name, "not_run": why, "lacks": lacks})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._of | line) + "\n")


def main() -> int:
    """Run all parts; return 0 if every row met its aim, was measured without one, or needs what this machine lacks."""
    args = arguments()
    if args.part is not None:
        return one_part(args)
    chosen = [part for part in PARTS if not args.only or part in args.only]
    report = Report(args.output)
    for part in chosen:
        for device in DEVICES:
            rows = importlib.import_module(f"parts.{part}").ROWS[device]
            report.rows += [Row(part, device, name, aim) for name, aim in rows.items()]
    status = 0
    raise_when_ended()
    with tempfile.TemporaryDirectory(prefix="capslog-gpu-") as name:
        try:
            run_all(report, args.devices, Path(name), args.seconds)
        except Ended as error:
            status = 128 + error.number
            report.close(report.rows, error.why)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        report.machine["seconds"] = round(time.monotonic() - report.began, 1)
        report.machine["processor_seconds"] = round(used.ru_utime + used.ru_stime, 1)
        report.write()
    sys.stdout.write(report.table() + f"\n\n{report.path} has all numbers\n")
    return status or int(any(row.is_failure for row in report.rows))


def run_all(report: Report, devices: list[str], folder: Path, seconds: float) -> None:
    """Run the parts in turn within `seconds`, on a GPU where there is one.

    Args:
        devices: devices to choose from; with both, the CPU's rows run only where there is no GPU.
    """
    until, share = time.monotonic() + seconds, seconds / SECONDS
    report.write()
    facts = folder / "facts"
    facts.mkdir()
    told = Part([*command("facts"), "--rows", str(facts / "rows")], facts, 60.0, report.machine.update)
    (failed,) = run_parts([told])
    if failed is not None:
        raise SystemExit(f"torch cannot be used here: {failed}")
    why = {"cuda": report.machine["no_cuda"], "cpu": "there is a GPU; ask for these rows by --devices cpu"}
    usual = "cpu" if why["cuda"] else "cuda"
    why = {device: why[device] if device in devices else "not asked for" for device in DEVICES}
    chosen = [usual] if usual in devices else [device for device in devices if device == "cpu"]
    for device in DEVICES:
        if device not in chosen:
            report.close([row for row in report.rows if row.device == device], why[device], lacks=True)
    report.write()
    turns = [
        turn
        for full_turn in turns_of(chosen)
        if (turn := {key: part_seconds for key, part_seconds in full_turn.items() if report.of(*key)})
    ]
    for number, turn in enumerate(turns):
        remaining = until - time.monotonic()
        rows = [row for key in turn for row in report.of(*key)]
        if remaining < 5:
            report.close(rows, "the time was spent")
            continue
        spare = remaining - share * sum(max(later.values()) for later in turns[number + 1 :])
        limit = min(max(share * max(turn.values()), spare), remaining)
        say(f"{', '.join(f'{part} on {device}' for part, device in turn)} ...")
        parts = [one_of_turn(report, part, device, folder, limit) for part, device in turn]
        for (part, device), reason in zip(turn, run_parts(parts), strict=True):
            report.close(report.of(part, device), reason or "its part ended without it")
        report.write()


def turns_of(devices: list[str]) -> list[dict[tuple[str, str], float]]:
    """Return the seconds by part and device of each turn; on a CPU every part has its own turn."""
    turns: list[dict[tuple[str, str], float]] = []
    for device in devices:
        for turn in TURNS:
            full_turn = {(part, device): float(seconds) for part, seconds in turn.items()}
            turns += [full_turn] if device == "cuda" else [{key: seconds} for key, seconds in full_turn.items()]
    return turns


def one_of_turn(report: Report, part: str, device: str, folder: Path, seconds: float) -> Part:
    """Return the part as a command whose rows go into the report."""
    part_folder = folder / f"{part}-{device}"
    part_folder.mkdir()
    files = ["--rows", str(part_folder / "rows"), "--facts", str(folder / "facts" / "rows")]

    def take(line: dict[str, Any]) -> None:
        say(told(report.take(line)))
        report.write()

    return Part([*command(part), "--device", device, *files], part_folder, seconds, take)


def command(part: str) -> list[str]:
    """Return the command line that runs a part."""
    return [sys.executable, str(Path(__file__).resolve()), "--part", part]


def one_part(args: argparse.Namespace) -> int:
    """Run one part in this process."""
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"parts.{args.part}")
    if args.part == "facts":
        args.rows.write_text(json.dumps(module.found()) + "\n")
        return 0
    facts = json.loads(args.facts.read_text())
    module.measure(torch.device(args.device), Tell(args.rows, args.part, args.device, facts))
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/gpu/result.json", help="file for the JSON")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument(
        "--devices", nargs="+", choices=DEVICES, default=list(DEVICES), help="default: the GPU, else the CPU"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    # for the processes of the parts
    parser.add_argument("--part", choices=["facts", *PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def told(row: Row) -> str:
    """Return a row as a line of progress."""
    return f"    {row.name}: {row.result or 'not run: ' + row.not_run}"


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
