"""Faults at named points of a member's life, so that a test can lose the member exactly there.

The variable `CAPSLOG_FAULTS` holds the faults; `main` runs a member that they may hit. A fault hits a member when it
comes to a point for the n-th time. `Runtime` names the points; `action <i>` is the point before instruction i of a
step's program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError, HostTierFailed
from varuna_capslog.engine.executor import Observer
from varuna_capslog.engine.stage import CallContext, Stage
from varuna_capslog.schedules.lower import Instruction
from varuna_capslog.start import member_worker as worker
from varuna_capslog.start.member_worker import MemberParts

__all__ = [
    "VARIABLE",
    "Fault",
    "Instructions",
    "JumpedClock",
    "Slowness",
    "faults_of",
    "main",
    "prober",
    "set_clock",
    "slow_down",
]

VARIABLE = "CAPSLOG_FAULTS"

_KINDS = ("kill", "stop", "raise", "device", "memory", "hang", "full", "starve", "copy", "slow", "wait")
_LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault that hits `member` when it comes to `point` for the `count`-th time.

    Attributes:
        do: "kill" and "stop": by signal; "raise": an error that nothing expects; "device": an error of a GPU;
            "memory": an allocation fails; "hang": the member hangs; "full": from now on the disk is full for this
            process; "starve": an allocation of `name` bytes fails as torch's on a CPU does, with "<bytes> <n>" in the
            n-th operation of torch from there on that changes a tensor in place; "copy": a copy to or from the host
            tier fails; "slow": from the next step on its work takes `name` times as long; "wait": creates
            `<name>.here` in the run's `faults/`, then waits at most a minute for a file `<name>.go` there.
    """

    member: str
    point: str
    do: str = "kill"
    count: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        fields.choice(self.do, "do", _KINDS)
        fields.whole(self.count, "count", minimum=1)

    def to_json(self) -> dict[str, Any]:
        """Return the fault as an entry of the variable's list."""
        return dict(vars(self))

    def happen(self, folder: Path) -> TorchDispatchMode | None:
        """Inject the fault in this process and thread; return the mode that must be exited at the next point."""
        match self.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError(f"a fault on purpose at {self.point!r}")
            case "device":
                raise RuntimeError("CUDA error: device-side assert triggered (a fault on purpose)")
            case "memory":
                raise MemoryError("a fault on purpose")
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            case "starve":
                size, _, operation = self.name.partition(" ")
                if operation:
                    return _Starving(size, int(operation)).__enter__()
                _starve(size)
            case "copy":
                raise HostTierFailed("a copy to or from the host tier (memory) failed: OSError: a fault on purpose")
            case "slow":
                slow_down(folder, self.member, float(self.name))
            case _:
                _wait(folder, self.name)
        return None


def _starve(size: str) -> None:
    why = "Error code 12 (Cannot allocate memory)"
    raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes. {why}")


class _Starving(TorchDispatchMode):
    """Lets the n-th operation that changes a tensor in place fail."""

    def __init__(self, size: str, operation: int) -> None:
        super().__init__()
        self._size, self._left = size, operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._left -= 1
            if not self._left:
                _starve(self._size)
        return func(*args, **(kwargs or {}))


def _wait(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.here").touch()
    until = time.monotonic() + _LONGEST_WAIT
    while not (folder / f"{name}.go").exists():
        if time.monotonic() > until:
            raise CapslogError(f"{folder / name}.go did not appear within {_LONGEST_WAIT:g} s")
        time.sleep(0.001)


def faults_of(text: str) -> list[Fault]:
    """The faults that the variable's value lists. Raises CapslogError."""
    try:
        return [Fault(**entry) for entry in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise CapslogError(f"{VARIABLE} is not a JSON list of faults: {error}") from error


def prober(faults: Sequence[Fault], member: str, folder: Path) -> Callable[[str], None]:
    """A function that is told every point that `member` comes to, and makes its faults happen."""
    mine: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.member == member:
            mine.setdefault(fault.point, []).append(fault)
    seen: Counter[str] = Counter()
    under_way: list[TorchDispatchMode] = []

    def probe(point: str) -> None:
        while under_way:
            under_way.pop().__exit__(None, None, None)
        seen[point] += 1
        for fault in mine.get(point, ()):
            if fault.count == seen[point] and (begun := fault.happen(folder)) is not None:
                under_way.append(begun)

    return probe


def slow_down(folder: Path, member: str, factor: float) -> None:
    """From its next step on, slow a member that `Slowness` observes from this folder by `factor`; 1: as before."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / f"{member}.slow", str(factor))


def set_clock(folder: Path, machine: str, seconds: float) -> None:
    """Set the time of day of a machine's processes, by `JumpedClock`, to the true time plus `seconds`."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / f"{machine}.clock", str(seconds))


class JumpedClock:
    """A machine's time of day, for `base/clock.use`.

    Args:
        folder: of the run's faults.
    """

    def __init__(self, folder: Path, machine: str) -> None:
        self._file = folder / f"{machine}.clock"

    def __call__(self) -> float:
        return time.time() + (float(self._file.read_text()) if self._file.exists() else 0.0)


class Slowness(Observer):
    """Makes the work of a member take longer, as `slow_down` says.

    Args:
        folder: of the run's faults.
    """

    def __init__(self, folder: Path, member: str) -> None:
        self._file, self._factor = folder / f"{member}.slow", 1.0

    def instruction(self, position: int, instruction: Instruction) -> None:
        if position == 0:
            self._factor = float(self._file.read_text()) if self._file.exists() else 1.0

    @contextlib.contextmanager
    def working(self, kind: str, stage: Stage, context: CallContext) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._factor > 1:
            time.sleep((self._factor - 1) * (time.perf_counter() - began))


class Instructions(Slowness):
    """Tells a probe of every instruction that the engine comes to."""

    def __init__(self, probe: Callable[[str], None], folder: Path, member: str) -> None:
        super().__init__(folder, member)
        self._probe = probe

    def instruction(self, position: int, instruction: Instruction) -> None:
        super().instruction(position, instruction)
        self._probe(f"action {position}")


def main(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, parts: MemberParts | None = None
) -> int:
    """Entry of a member with the faults of the variable; otherwise as `worker.main`."""
    variables = os.environ if environment is None else environment
    faults = faults_of(variables.get(VARIABLE, "[]"))
    folder, member = Path(arguments[0]) / "faults", variables["CAPSLOG_MEMBER"]
    probe = prober(faults, member, folder)
    observer = Instructions(probe, folder, member)
    parts = dataclasses.replace(parts or MemberParts(), probe=probe, observer=observer)
    return worker.main(arguments, parts)
