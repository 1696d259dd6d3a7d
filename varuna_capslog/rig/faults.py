"""Faults at named points of a member's life, so that a test can lose it exactly there.

The variable `CAPSLOG_FAULTS` holds them; `main` runs a member that they may hit. A fault hits a member when it comes to
a point for the n-th time. Points are those that `Runtime` names, and `action <i>` before instruction i of a step's
program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.executor import Observer
from varuna_capslog.schedules.lower import Instruction
from varuna_capslog.start import member_worker as worker
from varuna_capslog.start.member_worker import Equipment

__all__ = ["VARIABLE", "Fault", "Instructions", "faults_of", "main", "prober"]

VARIABLE = "CAPSLOG_FAULTS"

_KINDS = ("kill", "stop", "raise", "hang", "full", "starve", "wait")
_LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Fault:
    """What happens to `member` when it comes to `point` for the `count`-th time.

    Attributes:
        do: "kill" and "stop" by signal; "raise" an error that nothing expects; "hang" for ever; "full": from now on
            nothing that this process writes finds room on the disk; "starve": an allocation of `name` bytes fails as
            torch's on a CPU does; "wait" until somebody creates `<name>.go` in the
            run's `faults/` (it creates `<name>.here` before), at most a minute.
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
        """As an entry of the variable's list."""
        return dict(vars(self))

    def happen(self, folder: Path) -> None:
        """Does it, in this process and thread."""
        match self.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError(f"a fault on purpose at {self.point!r}")
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            case "starve":
                why = "Error code 12 (Cannot allocate memory)"
                raise RuntimeError(
                    f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {self.name} bytes. {why}"
                )
            case _:
                _wait(folder, self.name)


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

    def probe(point: str) -> None:
        seen[point] += 1
        for fault in mine.get(point, ()):
            if fault.count == seen[point]:
                fault.happen(folder)

    return probe


class Instructions(Observer):
    """Tells a probe of every instruction that the engine comes to."""

    def __init__(self, probe: Callable[[str], None]) -> None:
        self._probe = probe

    def instruction(self, position: int, instruction: Instruction) -> None:
        self._probe(f"action {position}")


def main(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, equipment: Equipment | None = None
) -> int:
    """The entry of a member with faults: those of the variable; else as `worker.main`."""
    found = os.environ if environment is None else environment
    faults = faults_of(found.get(VARIABLE, "[]"))
    probe = prober(faults, found["CAPSLOG_MEMBER"], Path(arguments[0]) / "faults")
    equipment = dataclasses.replace(equipment or Equipment(), probe=probe, observer=Instructions(probe))
    return worker.main(arguments, equipment)
