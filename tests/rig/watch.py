"""A member under observation: an ordinary one that writes a line for every generation it opens and step it applies.

The lines outlive the member, however it ends; `judge` reads them. A fault may be armed in it while it runs, at a point
that it has not come to yet. On SIGUSR2 it writes the stacks of all its threads into its log. Otherwise it behaves like
every member, except that it draws plans if it is told to (`drawing`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rig import nccl_failures, relayed
from tests.rig.drawing import DrawingWork
from tests.rig.faults import Fault, Instructions, JumpedClock
from varuna_capslog.base import clock
from varuna_capslog.elastic.member.work import LayerState, Opening
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.start import member_worker as worker
from varuna_capslog.start.member_worker import MemberParts
from varuna_capslog.training.layer_state import digest

__all__ = ["SEGMENT", "WatchedWork", "arm", "armed", "main", "records_folder"]

SEGMENT = "CAPSLOG_CHAOS_SEGMENT"
"""Names the part of the run between two losses of the store, in which no member's name is used twice."""

DIGEST_BYTES = 4 << 20
"""Models up to this size have every layer's state compared after every step; larger ones at the end only."""


def records_folder(run_dir: Path) -> Path:
    """Folder of the members' lines: a file `<segment>-<member>.jsonl` for each."""
    return run_dir / "chaos" / "records"


class WatchedWork(DrawingWork):
    """See the module."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        folder = records_folder(self.start.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.environ.get(SEGMENT, '0')}-{self.start.me}.jsonl"
        self._records = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._opened = 0
        self._openings = deque([0.0, 0.0], maxlen=2)
        self._own: Sequence[int] = ()
        self._digests = sum(self.layer_bytes) <= DIGEST_BYTES

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        super().open(opening, communicator, states)
        self._opened, self._own = opening.number, sorted(states)
        ways = self._running.layout.layers_of_ways
        # groups from before the last but one opening belong to generations that ended before the last opening
        about = {"ways": ways, "left": nccl_failures.left_open(self._openings[0])}
        self._openings.append(time.monotonic())
        self._record("open", generation=opening.number, base=list(opening.base), members=list(opening.members), **about)

    def apply(self, step: int) -> None:
        verdict = self.loop.verdict
        assert verdict is not None
        super().apply(step)
        digests = {index: digest(self.state(index, copy=False)).hex() for index in self._own} if self._digests else {}
        loss = verdict.parts["loss"]
        self._record(
            "step", generation=self._opened, step=step, loss=loss, grad_norm=verdict.grad_norm, digests=digests
        )

    def _record(self, kind: str, **what: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), "member": self.start.me, **what}, separators=(",", ":"))
        os.write(self._records, line.encode() + b"\n")  # at once, so that no line is torn by a kill


def arm(run_dir: Path, segment: str, fault: Fault) -> Path:
    """Has a fault wait in a member: at the next time that it comes to the fault's point. Returns the file that is there
    until then.
    """
    folder = run_dir / "chaos" / "armed"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{segment}-{fault.member}.new"
    fresh.write_text(json.dumps(fault.to_json()))
    return fresh.replace(fresh.with_suffix(".json"))


def armed(member: str, run_dir: Path) -> Callable[[str], None]:
    """A function that is told every point that `member` comes to, and looks whether a fault waits for it there."""
    path = run_dir / "chaos" / "armed" / f"{os.environ.get(SEGMENT, '0')}-{member}.json"

    def probe(point: str) -> None:
        if not path.exists():
            return
        try:
            fault = Fault(**json.loads(path.read_text()))
        except FileNotFoundError:  # taken back
            return
        if fault.point != point:
            return
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, path.with_suffix(".fired"))
            fault.happen(run_dir / "chaos")

    return probe


def main(arguments: Sequence[str]) -> int:
    """The entry of a watched member; like `elastic.worker.main`."""
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    member, folder = os.environ["CAPSLOG_MEMBER"], Path(arguments[0])
    probe = armed(member, folder)
    clock.use(JumpedClock(folder / "chaos", os.environ.get("CAPSLOG_HOST", "").partition(".")[0]))
    observer, open_store = Instructions(probe, folder / "chaos", member), relayed.opener()
    return worker.main(arguments, MemberParts(probe=probe, observer=observer, work=WatchedWork, open_store=open_store))
