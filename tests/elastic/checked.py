"""A member that looks, after all that happened to it, whether it has in memory what the protocol says it holds."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from varuna_capslog.elastic import worker
from varuna_capslog.elastic.messages import Event
from varuna_capslog.elastic.runtime import End, Runtime


class CheckedRuntime(Runtime):
    """Raises AssertionError where memory and protocol differ, in either direction."""

    def feed(self, *events: Event) -> None:
        outer = not self._feeding
        super().feed(*events)
        if not outer or self.ended:
            return
        for layer, stamp in self.state.held:
            self.holdings.at(layer, stamp)  # KeyError where it is not there
        surplus = self.holdings.kept() - self.state.held
        assert not surplus, f"kept without need: {sorted(surplus)} beside {sorted(self.state.held)}"

    def run(self) -> End:
        end = super().run()
        folder = Path(os.environ["CAPSLOG_RUN_DIR"]) / "left"
        folder.mkdir(exist_ok=True)
        names = sorted(thread.name for thread in threading.enumerate())
        descriptors = len(os.listdir("/proc/self/fd"))
        (folder / f"{self.me}.txt").write_text("\n".join([str(descriptors), *names]))
        return end


def main(arguments: Sequence[str]) -> int:
    """Like `worker.main`."""
    from varuna_capslog.elastic import runtime

    runtime.Runtime = CheckedRuntime  # type: ignore[misc]
    return worker.main(arguments)
