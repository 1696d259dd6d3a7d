"""Chooses the samples of each step, and loads their tensors ahead of time.

The order is a pure function of (seed, step), so that a run resumes at any step. Every rank computes a minibatch's
description. Only ranks with a stage that reads the chain's inputs load tensors, and only ranks that compute losses read
targets that are not in the description. A `ReadingSource` reads both by itself; `load` of other sources is called in
background threads.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.interface import RankReport
from varuna_capslog.model.workload import DataSource, LateTargets, Minibatch, Reading, ReadingSource
from varuna_capslog.training.manifest import check_samples

__all__ = ["DataLate", "DataWatch", "Feed", "evaluation_groups"]


# -- A time limit on a process's waits for data, also where no other rank waits for the process.


_LOOK_SECONDS = 0.25


class DataLate(CapslogError):
    """Samples were not read in time. Exit status 1, as when another rank notices the hang."""

    exit_status = 1
    kind = "hang"


class DataWatch:
    """Watchdog over waits for data of `limit_seconds` (`pipeline.timeout_seconds`) or more.

    Other ranks notice a rank that hangs in a data set, but a process without other ranks would hang for ever. late:
    called in the watchdog's thread to end the process, since no exception reaches code that hangs; None: no watch.
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
        self._waiting = minibatch, microbatch  # a new tuple, by which `_run` recognizes this wait
        try:
            yield
        finally:
            self._waiting = None

    def _run(self) -> None:
        pause, seconds, before = min(_LOOK_SECONDS, self._limit / 8), 0.0, self._waiting
        while before is None or seconds < self._limit:
            time.sleep(pause)
            # sum of pauses, not clock time, so that the time of a stopped process (SIGSTOP) does not count
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


# -- the samples of each step


_SHUFFLE = 0x5348
_THREADS, _AHEAD = 2, 4
"""Loading threads, and microbatches that are loaded ahead."""


class Feed:
    """Training minibatches by step, counted from 1. Raises CapslogError for fewer samples than one minibatch.

    Args:
        minibatch_size, microbatch_size: in samples.
        local: global indices of the microbatches that this rank loads, each as often as the engine requests it.
        judged: global indices of the microbatches whose loss this rank computes.
        watch: watchdog over the waits for data; None: no time limit.
    """

    def __init__(
        self,
        source: DataSource,
        minibatch_size: int,
        microbatch_size: int,
        seed: int,
        local: Sequence[int],
        judged: Sequence[int] = (),
        watch: DataWatch | None = None,
    ) -> None:
        self._watch = watch or DataWatch(math.inf)
        self._source, self._seed = source, seed
        self._minibatch_size, self._microbatch_size = minibatch_size, microbatch_size
        self.steps_per_epoch = len(source) // minibatch_size
        check_samples(len(source), minibatch_size)
        reads = isinstance(source, ReadingSource)
        self._requests = Counter([*local, *judged] if reads else local)
        self._order = sorted(self._requests)
        self._ahead = source.ahead if isinstance(source, ReadingSource) else _AHEAD
        self._described = functools.lru_cache(maxsize=4)(self._describe)
        self._ordered = functools.lru_cache(maxsize=1)(self._shuffled)
        self._loads: dict[tuple[int, int], Reading] = {}
        self._requests_left: Counter[int] = Counter()
        self._pool = ThreadPoolExecutor(_THREADS, "load") if self._order and not reads else None
        self._waited = 0.0
        self._failure: str | None = None

    def epoch(self, step: int) -> int:
        """Epoch that a step belongs to, counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def minibatch(self, step: int) -> Minibatch:
        """Description of a step's minibatch; the last four are cached."""
        return self._described(step)

    def _describe(self, step: int) -> Minibatch:
        epoch, at = self.epoch(step), (step - 1) % self.steps_per_epoch * self._minibatch_size
        samples = self._ordered(epoch)[at : at + self._minibatch_size]
        minibatch = self._source.minibatch(_split(samples, self._microbatch_size), epoch)
        if isinstance(self._source, ReadingSource):
            late = (functools.partial(self._targets, step, index) for index in range(len(minibatch.inputs)))
            minibatch.targets = [LateTargets(read) for read in late]
        return minibatch

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(self._seed, _SHUFFLE, epoch))
        order: list[int] = torch.randperm(len(self._source), generator=generator).tolist()
        return order

    def begin(self, step: int) -> None:
        """Begin a step: start to load its first microbatches for this rank."""
        self._requests_left = self._requests.copy()
        self._loads = {key: load for key, load in self._loads.items() if key[0] >= step}
        if self._ahead and self._order:
            self._read_ahead(step, self._order[0])

    def loader(self, step: int) -> Callable[[int], dict[str, Tensor]]:
        """Return a function that maps a microbatch of this step to its inputs, and loads the next ones meanwhile.

        A microbatch is loaded once, and kept until the last stage that requests it has it. If it cannot be read, its
        inputs are zeros and `report` has the reason, so that all ranks reach the vote and refuse the step there.
        """
        self.begin(step)

        def load(microbatch: int) -> dict[str, Tensor]:
            try:
                return self._take(step, microbatch)[0]
            except CapslogError as error:
                self._failure = self._failure or str(error)
                specs = self.minibatch(step).inputs[microbatch]
                return {name: spec.zeros(torch.device("cpu")) for name, spec in specs.items()}

        return load

    def report(self) -> RankReport:
        """Report on this rank's data since the last report: seconds of waiting, and the first read failure."""
        report = RankReport(self._waited, self._failure)
        self._waited, self._failure = 0.0, None
        return report

    def _targets(self, step: int, microbatch: int) -> Any:
        try:
            return self._take(step, microbatch)[1]
        except CapslogError as error:
            self._failure = self._failure or str(error)
            raise StepRefused(str(error)) from error

    def _take(self, step: int, microbatch: int) -> tuple[dict[str, Tensor], Any]:
        """Wait for inputs and targets of a microbatch; the time counts for `report`."""
        self._read_ahead(step, microbatch)
        key = step, microbatch
        if key not in self._loads:
            self._loads[key] = self._begun(key)
        self._requests_left[microbatch] -= 1
        reading = self._loads[key] if self._requests_left[microbatch] > 0 else self._loads.pop(key)
        began = time.perf_counter()
        try:
            with self._watch.waiting(self.minibatch(step), microbatch):
                return reading.result()
        finally:
            self._waited += time.perf_counter() - began

    def _read_ahead(self, step: int, microbatch: int) -> None:
        """Begin to load the microbatches that are requested next, from this one on."""
        upcoming = ((step, index) for index in self._order if index >= microbatch and self._requests_left[index])
        following = ((step + 1, index) for index in self._order)
        for key in [*upcoming, *following][: self._ahead]:
            if key not in self._loads:
                self._loads[key] = self._begun(key)

    def _begun(self, key: tuple[int, int]) -> Reading:
        minibatch = self.minibatch(key[0])
        if isinstance(self._source, ReadingSource):
            return self._source.begin(minibatch, key[1])
        assert self._pool is not None
        return self._pool.submit(lambda: (self._source.load(minibatch, key[1]), None))

    def close(self) -> None:
        """Stop the loading threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def evaluation_groups(count: int, microbatch_size: int, per_minibatch: int) -> list[list[list[int]]]:
    """Minibatches of an evaluation, as [minibatch][microbatch][sample], each of at most `per_minibatch` microbatches.

    The layout does not change which samples share a minibatch, and so the padding of an image. count: of samples.
    """
    size = microbatch_size * per_minibatch
    return [_split(list(range(start, min(start + size, count))), microbatch_size) for start in range(0, count, size)]


def _split(samples: Sequence[int], size: int) -> list[list[int]]:
    return [list(samples[at : at + size]) for at in range(0, len(samples), size)]
