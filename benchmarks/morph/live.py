"""An elastic run on this machine that a script observes and disturbs: supervisor, store, fork server and members.

`Live` runs a `Host` in a thread and takes orders (leave, join, kill). The members are ordinary ones with one addition:
the entry point below writes a line whenever a step has been applied, with the machine's monotonic clock, to a file that
survives the member. All times of the live benchmarks come from these lines.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.engine.executor import Observer

from varuna_capslog.membership.entries import NoticeEntry

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

__all__ = [
    "SLEEPING",
    "Clock",
    "Live",
    "Mark",
    "Pause",
    "append_result",
    "losses",
    "main",
    "pauses",
    "quantiles",
    "step_ends",
]

SLEEPING = (
    "model.blocks=16",
    "model.block_seconds=0.004",
    "train.epochs=null",
    "train.minibatch_size=64",
    "train.microbatch_size=8",
    "train.accumulation_blocks=1",
    "profile.source=measured",
    "pipeline.planner=budget",
    "pipeline.schedule=auto",
)
"""Overrides of `small.yaml`: 16 blocks that sleep 4 ms in each forward, steps of about 200 ms on four members."""


class Clock:
    """Seconds that a script has run, and whether its minutes are over (0: no limit)."""

    def __init__(self, minutes: float = 0.0) -> None:
        self.began = time.monotonic()
        self._until = self.began + 60 * minutes if minutes else float("inf")

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until


class Mark(NamedTuple):
    """Step that a member has applied: the generation's number and the end, in seconds of the monotonic clock."""

    member: str
    generation: int
    step: int
    end: float


def main(arguments: Sequence[str], work: type[PipelineWork] | None = None, observer: Observer | None = None) -> int:
    """Entry point of a member: `elastic.worker.main`, with its steps marked in `<run_dir>/marks/<member>`.

    Args:
        work: class that trains; None: `PipelineWork`.
        observer: observer of the member's engines.
    """
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.start import member_worker as worker

    folder = Path(arguments[0]) / "marks"
    folder.mkdir(exist_ok=True)
    file = os.open(folder / os.environ["CAPSLOG_MEMBER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Marked(work or PipelineWork):  # type: ignore[misc]
        def apply(self, step: int) -> None:
            super().apply(step)
            os.write(file, f"{self._begun[0]} {step} {time.monotonic():.6f}\n".encode())

    return worker.main(arguments[:1], worker.MemberParts(work=Marked, observer=observer))


class Live:
    """A run in progress; a context manager that ends with it.

    Args:
        config: a file.
        overrides: of the config's keys.
        devices: number of workers at the start.
        entry: entry point of the members.
    """

    def __init__(
        self, config: Path, overrides: Sequence[str], devices: int, entry: str = "live:main", folder: Path | None = None
    ) -> None:
        from varuna_capslog.config.reading import load_config

        self._holder = None if folder else tempfile.TemporaryDirectory(prefix="capslog-live-")
        self.folder = folder or Path(self._holder.name)  # type: ignore[union-attr]
        self.config = load_config(
            config, [f"run_dir={self.folder}", f"pipeline.devices={devices}", "elastic.enabled=true", *overrides]
        )
        self._entry = entry
        self._offsets: dict[Path, int] = {}
        self._found: list[Mark] = []
        self.said: list[str] = []
        self.ended: BaseException | object | None = None

    def __enter__(self) -> Live:
        from varuna_capslog.elastic.host.host import Host, HostOptions
        from varuna_capslog.start.elastic_host import member_modules, starting_point
        from varuna_capslog.start.prepare import prepare_run

        prepare_run(self.config, show=False)
        keys, stamp = starting_point(self.config)
        path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.host = Host(
            HostOptions(
                self.folder,
                self._entry,
                num_workers=self.config.world_size,
                name="h",
                keys=keys,
                first=stamp,
                environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                settings=self.config.elastic,
                say=self.said.append,
                sources=(),
                modules=member_modules(self.config),
            )
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.ended = self.host.run()
        except BaseException as error:
            self.ended = error

    def __exit__(self, *raised: object) -> None:
        if self._thread.is_alive():
            self.host.stop()
            self._thread.join(20)
        if self._thread.is_alive():
            self.host.stop()
            self._thread.join(20)
        if self._holder is not None:
            self._holder.cleanup()

    def finish(self, seconds: float) -> object:
        """Wait until the run ends by itself; raise the error that ended it otherwise."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the run has not ended within {seconds:g} s; {self.describe()}")
        if isinstance(self.ended, BaseException):
            raise self.ended
        return self.ended

    # -- orders --------------------------------------------------------------------------------------------------------

    def leave(self, member: str, urgent: bool = False) -> float:
        """Send a preemption notice to a member; return its time."""
        now = time.monotonic()
        self.host.link.store.append(NoticeEntry(member, urgent, source="program").to_json())
        return now

    def join(self) -> float:
        """Add a worker; return the time of the order."""
        now = time.monotonic()
        self.host.add_worker()
        return now

    def kill(self, member: str, number: int = signal.SIGKILL) -> float:
        """Kill a worker's process; return the time."""
        pid = json.loads((self.folder / "workers" / f"{member}.json").read_text())["pid"]
        now = time.monotonic()
        os.kill(pid, number)
        return now

    # -- observation ---------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the newest generation."""
        return self.host.roster.generation.number

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the newest generation, by rank."""
        return self.host.roster.generation.members

    def marks(self) -> list[Mark]:
        """Return all steps that members have applied so far."""
        for path in sorted((self.folder / "marks").glob("*")):
            at = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = at + len(text)
            for line in text.splitlines():
                generation, step, end = line.split()
                self._found.append(Mark(path.name, int(generation), int(step), float(end)))
        return self._found

    def wait(self, condition: Callable[[list[Mark]], bool], seconds: float = 60.0, goal: str = "") -> None:
        """Wait until `condition` holds for the marks."""
        until = time.monotonic() + seconds
        while not condition(self.marks()):
            if not self._thread.is_alive():
                if isinstance(self.ended, BaseException):
                    raise self.ended
                raise RuntimeError(f"the run has ended: {self.ended}")
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:g} s: {goal or condition}; {self.describe()}")
            time.sleep(0.003)

    def wait_steps(self, members: int, steps: int, seconds: float = 60.0, after: int = 0) -> int:
        """Wait until a generation newer than `after`, of `members` members, has applied `steps` steps; return it."""

        def there(marks: list[Mark]) -> bool:
            newest = self.host.roster.generation
            if len(newest.members) != members or newest.number <= after:
                return False
            last = newest.members[-1]
            return sum(mark.generation == newest.number and mark.member == last for mark in marks[-4000:]) >= steps

        self.wait(there, seconds, f"{steps} steps of {members} members after generation {after}")
        return self.generation

    def describe(self) -> str:
        """Return the generation, the last messages and the ends of the workers' logs, for errors."""
        logs = [
            f"{path.name}: {path.read_text()[-600:]}"
            for path in sorted((self.folder / "workers").glob("*.log"))
            if path.stat().st_size
        ]
        return f"generation {self.host.roster.generation}; {self.said[-5:]}; " + "; ".join(logs[-4:])

    def events(self) -> list[dict[str, Any]]:
        """Return the events of events.jsonl."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, from the newest generation that computed it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in sorted(rows, key=lambda row: row["generation"])}


# -- from marks to numbers ---------------------------------------------------------------------------------------------


class Pause(NamedTuple):
    """Pause of a change, from the end of the last step before it to the end of the first after it.

    Attributes:
        whole: seconds between these ends.
        net: `whole` less the median step of the new layout.
    """

    generation: int
    step: int
    whole: float
    net: float


def step_ends(marks: Sequence[Mark]) -> dict[int, dict[int, tuple[float, float]]]:
    """Return by generation and step the times at which the first and the last member had applied it."""
    ends: dict[int, dict[int, tuple[float, float]]] = {}
    for mark in marks:
        first, last = ends.setdefault(mark.generation, {}).get(mark.step, (mark.end, mark.end))
        ends[mark.generation][mark.step] = min(first, mark.end), max(last, mark.end)
    return ends


def pauses(marks: Sequence[Mark]) -> list[Pause]:
    """Return the pause of every change to a generation with at least four steps, which its median step needs."""
    ends = step_ends(marks)
    changes = []
    order = sorted(ends)
    for old, new in itertools.pairwise(order):
        steps = ends[new]
        numbers = sorted(steps)
        if len(numbers) < 4:
            continue
        usual = statistics.median(steps[b][1] - steps[a][1] for a, b in itertools.pairwise(numbers))
        seconds = steps[numbers[0]][1] - ends[old][max(ends[old])][1]
        changes.append(Pause(new, numbers[0], seconds, seconds - usual))
    return changes


def quantiles(values: Sequence[float], scale: float = 1e3, digits: int = 1) -> dict[str, float | int]:
    """Return count, p50, p90, p99 and maximum, in thousandths by default. With few values p99 is the maximum."""
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    summary: dict[str, float | int] = {"count": len(ordered)}
    if ordered:
        named = {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}
        summary |= {name: round(scale * value, digits) for name, value in named.items()}
    return summary


def append_result(claim: str, result: Mapping[str, Any]) -> None:
    """Append a line to the claim's results.jsonl, with date, versions and commit."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    line = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        **result,
    }
    with (HERE / claim / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    sys.stdout.write(json.dumps(line, indent=1) + "\n")
