"""A member that checks, after every event, that its memory has the states that it holds by the protocol.

The fork server that imports this traces the tiny chain's shapes once for all its members: that alone took most of the
time of a run of twelve steps.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engine import models
from tests.engine.shapes import SharedShapes, trace_tiny
from tests.rig import faults
from tests.rig.drawing import DrawingWork
from varuna_capslog.elastic.member import pipeline_work
from varuna_capslog.elastic.member.runtime import End, Runtime
from varuna_capslog.membership.messages import ProtocolEvent
from varuna_capslog.start.member_worker import MemberParts

trace_tiny(models.build_chain(), 2)


class CheckedRuntime(Runtime):
    """Runtime that raises AssertionError where memory and protocol differ, in either direction, or where the chain has
    values as well.
    """

    def feed(self, *events: ProtocolEvent) -> None:
        outer = not self._feeding
        super().feed(*events)
        if not outer or self.ended:
            return
        for layer, stamp in self.state.held:
            self.parts.holdings.at(layer, stamp)  # KeyError where it is not there
        work = self.parts.work
        assert isinstance(work, pipeline_work.PipelineWork)
        if work.engine is not None:
            parameters = work.chain.named_parameters().items()
            assert not (real := [name for name, parameter in parameters if not parameter.is_meta]), (
                f"held twice: {real}"
            )
        surplus = self.parts.holdings._kept.keys() - self.state.held
        assert not surplus, f"kept without need: {sorted(surplus)} beside {sorted(self.state.held)}"

    def run(self) -> End:
        end = super().run()
        folder = Path(os.environ["CAPSLOG_RUN_DIR"]) / "left"
        folder.mkdir(exist_ok=True)
        names = sorted(thread.name for thread in threading.enumerate())
        descriptors = len(os.listdir("/proc/self/fd"))
        (folder / f"{self.me}.txt").write_text("\n".join([str(descriptors), *names]))
        return end


def slowed(work: Callable[..., Any], kind: str, seconds: float) -> Callable[..., Any]:
    """Return `work` delayed by `seconds`. Every call writes a line: kind, the thread's name, the first argument."""
    path = Path(os.environ["CAPSLOG_RUN_DIR"]) / "slow" / f"{os.environ['CAPSLOG_MEMBER']}.txt"
    path.parent.mkdir(exist_ok=True)

    def slow(*arguments: Any, **named: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{kind} {threading.current_thread().name} {arguments[0] if arguments else ''}\n")
        time.sleep(seconds)
        return work(*arguments, **named)

    return slow


def main(arguments: Sequence[str]) -> int:
    """Run `faults.main`. The variables SLOW_NAMES and SLOW_DISK are the seconds that each look-up of a name, and each
    sync or rename of a file takes.
    """
    if names := float(os.environ.get("SLOW_NAMES", 0)):
        for name in ("getaddrinfo", "gethostbyname"):
            setattr(socket, name, slowed(getattr(socket, name), "name", names))
    if disk := float(os.environ.get("SLOW_DISK", 0)):
        for name in ("fsync", "replace", "rename"):
            setattr(os, name, slowed(getattr(os, name), "disk", disk))
    pipeline_work.ShapeTable = SharedShapes  # type: ignore[misc]
    return faults.main(arguments, parts=MemberParts(work=DrawingWork, runtime=CheckedRuntime))
