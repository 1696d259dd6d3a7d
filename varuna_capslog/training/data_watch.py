"""Limits how long a process waits for its data, where no neighbour waits for the process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.threads import OwnedThread, logged
from varuna_capslog.model.workload import Minibatch

__all__ = ["DataLate", "DataWatch"]

_LOOK_SECONDS = 0.25


class DataLate(CapslogError):
    """Samples were not read in time. Exit status 1, as where a neighbour notices it."""

    exit_status = 1
    kind = "hang"


class DataWatch:
    """Notices that this process waits for its data longer than a rank waits for its neighbours.

    A rank that stands in a data set is noticed by the ranks that wait for it, but alone it would stand there for ever.

    Args:
        limit_seconds: `pipeline.timeout_seconds`.

    Attributes:
        late: called in a thread of the watch's own; it ends the process, since no exception gets into code that hangs.
            None: nothing is watched.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self.late: Callable[[DataLate], object] | None = None
        self._waiting: tuple[Minibatch, int] | None = None
        self._thread: OwnedThread | None = None

    @contextlib.contextmanager
    def waiting(self, minibatch: Minibatch, microbatch: int) -> Iterator[None]:
        """Context around a wait for the samples of a microbatch."""
        if self._thread is None and self.late is not None:
            self._thread = OwnedThread("data-watch", self._run, logged)
            self._thread.start()
        self._waiting = minibatch, microbatch  # each wait is an object of its own
        try:
            yield
        finally:
            self._waiting = None

    def _run(self) -> None:
        pause, seconds, before = min(_LOOK_SECONDS, self._limit / 8), 0.0, self._waiting
        while before is None or seconds < self._limit:
            time.sleep(pause)
            # counted in pauses: a process that was stopped (SIGSTOP) has not waited meanwhile
            seconds = seconds + pause if self._waiting is before else 0.0
            before = self._waiting
        minibatch, microbatch = before
        samples = f"the samples {minibatch.sample_ids[microbatch]}" if minibatch.sample_ids else "samples"
        assert self.late is not None
        self.late(
            DataLate(
                f"it waits for its data: {samples} were not read within pipeline.timeout_seconds={self._limit:g}; the "
                "data set hangs, or is so slow that the limit must be raised"
            )
        )
