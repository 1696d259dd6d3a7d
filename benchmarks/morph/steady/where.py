"""Breaks the processor time of a protected step down by thread, and by function of the member's own thread.

A run of two devices with each kind of protection, one after the other. The members' entry point below puts a clock
around some functions of the runtime and writes the seconds between two steps. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, Live
from steady import PATIENT, PROTECTION, Turns

STEPS = "CAPSLOG_WHERE_STEPS"
"""Environment variable with the first and last step that members count."""
TICKS = os.sysconf("SC_CLK_TCK")


class Clocks:
    """Processor seconds of the calling thread inside the wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def put(self, owner: Any, name: str, label: str) -> None:
        """Put a clock around a function."""
        work: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds[label] += time.thread_time() - began

        setattr(owner, name, timed)


def threads() -> dict[str, float]:
    """Return the processor seconds of each thread of this process so far; threads unknown to Python are torch's."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()} | {os.getpid(): "the member's own"}
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in os.listdir("/proc/self/task"):
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
        name = names.get(int(task), "torch's own").split("-h-")[0]
        seconds[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def main_of_member(arguments: Sequence[str]) -> int:
    """Entry point of a member."""
    from varuna_capslog.elastic.member import holdings, inbox, pipeline_work, training
    from varuna_capslog.start import member_worker

    clocks = Clocks()
    work = pipeline_work.PipelineWork
    clocks.put(work, "compute", "forwards and backwards")
    clocks.put(work, "vote", "vote")
    clocks.put(work, "apply", "optimizer")
    clocks.put(holdings.Holdings, "keep_before", "keeps the boundary before")
    clocks.put(holdings.Holdings, "advance", "steps of copies")
    clocks.put(training.Training, "_send_updates", "hands out updates")
    clocks.put(inbox, "_write", "(peers-send) writes messages")
    clocks.put(inbox, "_read_tensors", "(peers-receive) reads tensors")
    first, last = map(int, os.environ[STEPS].split())
    applied = work.apply
    before: dict[str, float] = {}

    def apply(self: Any, step: int) -> None:
        applied(self, step)
        if step == first:
            clocks.seconds.clear()
            before.update(threads())
        if step == last:
            after = threads()
            told = {
                "threads": {name: after[name] - before.get(name, 0.0) for name in after},
                "functions": dict(clocks.seconds),
            }
            folder = Path(arguments[0]) / "where"
            folder.mkdir(exist_ok=True)
            (folder / f"{os.environ['CAPSLOG_MEMBER']}.json").write_text(json.dumps(told))

    work.apply = apply  # type: ignore[method-assign]
    return member_worker.main(arguments)


def measure(kind: str, config: Path, first: int, last: int, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of both members together per step, by thread and by function."""
    with Live(config, [*PROTECTION[kind], *PATIENT, *overrides], 2, "where:main_of_member") as run:
        turns = Turns(run.folder)
        turns.wait_for(last + 2, 1200.0)
        reports = [json.loads(path.read_text()) for path in (run.folder / "where").glob("*.json")]
    return {
        group: {
            name: 1e3 * sum(report[group].get(name, 0.0) for report in reports) / (last - first)
            for name in sorted({name for report in reports for name in report[group]})
        }
        for group in ("threads", "functions")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(PROTECTION), choices=list(PROTECTION))
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("--steps", type=int, nargs=2, default=[100, 500], help="between which to count")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ[STEPS] = " ".join(map(str, args.steps))
    first, last = args.steps
    by_kind = {kind: measure(kind, args.config, first, last, args.overrides) for kind in args.runs}
    for group in ("threads", "functions"):
        print(f"| {group}, ms of a step | {' | '.join(by_kind)} |\n|---|{'---|' * len(by_kind)}")
        names = sorted({name for row in by_kind.values() for name in row[group]})
        for name in names:
            values = [row[group].get(name, 0.0) for row in by_kind.values()]
            if max(values) >= 0.05:
                print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")
        print()


if __name__ == "__main__":
    main()
