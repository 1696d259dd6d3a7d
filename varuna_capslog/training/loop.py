"""The training of one rank: steps, and the work due between them, on the engine that runs at the moment.

Two classes drive it. `run.Run` makes a fixed number of steps with one engine; a member of an elastic run makes each
step when the protocol says so, and the engine changes with every generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.engine.interface import Engine, Verdict
from varuna_capslog.engine.probe import PeakProbe, held_inputs, resident_tensors
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.training.boundaries import Boundaries
from varuna_capslog.training.data_watch import DataWatch
from varuna_capslog.training.feed import Feed
from varuna_capslog.training.journal import Journal, peak_record, step_record
from varuna_capslog.training.run_setup import RunSetup

__all__ = ["PeakMeter", "TrainingLoop"]

_FIRST, _LATER = 2, 5
"""The step that is measured: in the first generation as soon as the moments exist; later generations may be short, and
a probe costs some ten milliseconds."""


class PeakMeter:
    """The measured peak of every stage, once per generation. It travels with the ballots of a vote only.

    A whole step is measured in two halves, one step's update and the next step's forward and backward, so that the peak
    is known when that next step is voted on. On an accelerator a peak holds what protection keeps on the device, too;
    where torch counts no bytes there, none is measured.

    Attributes:
        source: how peaks are measured; None before the first measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = self._steps = 0
        self._bytes: int | None = None
        self.source: str | None = None

    def begin(self, generation: int, rounds_moments: bool = False) -> None:
        """A new generation, numbered from 1 within the run; every member calls it with the same number.

        Args:
            rounds_moments: an update finds rounded moments beside those that it makes, but for the first one.
        """
        self._at, self._steps, self._bytes = _FIRST + rounds_moments if generation == 1 else _LATER, 0, None
        if not accelerator.counts_memory(self._device):
            self._at = 0  # no step has this number

    @contextlib.contextmanager
    def computing(self, engine: Engine) -> Iterator[bool]:
        """Context around forward and backward of a step; yields whether the step is measured."""
        self._steps += 1
        measured = self._steps == self._at
        with self._probed(engine) if measured else contextlib.nullcontext():
            yield measured

    @contextlib.contextmanager
    def applying(self, engine: Engine, skipped: bool) -> Iterator[None]:
        """Context around the update of a step. Each skipped step delays the step that is measured by one."""
        if skipped and self._steps < self._at:
            self._steps -= 1
        with self._probed(engine) if self._steps == self._at - 1 and not skipped else contextlib.nullcontext():
            yield

    def sealed(self, ballot: bytes) -> bytes:
        """The ballot, with this member's peak in front of it in the step that was measured."""
        if self._steps != self._at or self._bytes is None:
            return ballot
        return b"%d|%b" % (self._bytes, ballot)

    @staticmethod
    def opened(ballots: Sequence[bytes]) -> tuple[tuple[bytes, ...], list[int] | None]:
        """The ballots as they were before `sealed`, and the peaks by rank; None where they were not measured."""
        peaks, plain = [], []
        for ballot in ballots:
            peak, bar, inner = ballot.partition(b"|")
            if bar and peak.isdigit():
                peaks.append(int(peak))
                ballot = inner
            plain.append(ballot)
        return tuple(plain), peaks if peaks and len(peaks) == len(plain) else None

    @contextlib.contextmanager
    def _probed(self, engine: Engine) -> Iterator[None]:
        with PeakProbe(self._device, resident_tensors(engine.layers, engine.optimizer)) as probe:
            yield
        self._bytes = max(self._bytes or 0, probe.peak_bytes)
        self.source = probe.peak_source


class TrainingLoop:
    """The training of one rank.

    Args:
        offset: generation n of this process's run is n + offset in the run's files.
        stop_wished: asked once per step; True on any rank ends the run after that step.

    Attributes:
        watch: of the waits for data; the process sets its `DataWatch.late`, which ends the process.
        engine: of the present generation; None between two generations.
        step: the last one that was applied.
        step_seconds: that this step took here.
        minibatch: of the step under way.
        verdict: of the step that was voted on and neither applied nor discarded.
        run_began: on the monotonic clock; `max_seconds` counts from here. The driver sets it where the run began before
            this loop was made.
    """

    def __init__(
        self, setup: RunSetup, device: torch.device, offset: int = 0, stop_wished: Callable[[], bool] = lambda: False
    ) -> None:
        self.setup, self.offset, self._stop_wished = setup, offset, stop_wished
        train = setup.config.train
        self.log = Journal(setup.run_dir, setup.total_steps, train.log_every, train.loggers)
        self.watch = DataWatch(setup.config.pipeline.timeout_seconds)
        self.boundaries = Boundaries(setup, self.log, self.watch)
        self.engine: Engine | None = None
        self.step, self.step_seconds = 0, 0.0
        self.minibatch: Minibatch | None = None
        self.verdict: Verdict | None = None
        self._feed: Feed = setup.feed()
        self._meter = PeakMeter(device)
        self._peaks: list[int] | None = None
        self.run_began = time.monotonic()
        self._step_began = 0.0

    # -- generations --------------------------------------------------------------------------------------------------

    def begin(self, engine: Engine, number: int, base: int, writes: bool, saved: bool = False) -> None:
        """Trains with this engine from now on.

        Args:
            number: of the generation, from 1 within this process's run.
            base: the step after which it goes on.
            writes: this rank keeps the run's record.
            saved: this run's folder is known to hold the checkpoint of step `base`.
        """
        generation = number + self.offset
        self.engine, self.step = engine, base
        self._feed = self.setup.feed(engine.loaded_microbatches, engine.judged_microbatches, self.watch)
        self._meter.begin(number, engine.options.recipe.rounds_moments)
        self.boundaries.begin(engine, generation, base, saved)
        self.log.begin(writes, base, generation, engine.communicator.world_size)

    def end(self) -> None:
        """Drops the engine, and the step under way."""
        if self.engine is not None:
            self.engine.forget()
        self.engine = self.minibatch = self.verdict = None
        self.boundaries.end()
        self._feed.close()

    def close(self) -> None:
        """Stops the loading threads, a checkpoint that is still written, and the progress bar."""
        self.boundaries.end()
        self._feed.close()
        self.log.close()

    @property
    def running(self) -> Engine:
        """The engine, where a generation has begun."""
        assert self.engine is not None
        return self.engine

    # -- a step -------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        """True where the run ends with this step."""
        return self.setup.total_steps is not None and step >= self.setup.total_steps

    def compute(self, step: int) -> None:
        """Forwards, backwards and sums; nothing of the model changes."""
        self.minibatch, engine = self._feed.minibatch(step), self.running
        self._step_began = time.perf_counter()
        self._feed.begin(step)
        with self._meter.computing(engine) as measured:
            load: Callable[[int], dict[str, Tensor]] = lambda microbatch: {}  # noqa: E731
            if loaded := engine.loaded_microbatches:
                load = self._feed.loader(step)
                if measured:
                    load = held_inputs(load, loaded)
            engine.compute(step, self.minibatch, load)

    def vote(self, step: int, ballot: bytes = b"") -> Verdict:
        """Votes on the step with all ranks.

        Args:
            ballot: handed to all ranks with the verdict.

        Returns:
            The verdict with all ranks' ballots. One with a `refusal` must be discarded, not applied.
        """
        assert self.minibatch is not None
        limit, engine = self.setup.config.train.max_seconds, self.running
        late = limit is not None and time.monotonic() - self.run_began > limit
        stops, sealed = late or self._stop_wished(), self.boundaries.sealed(self._meter.sealed(ballot))
        verdict = engine.vote(step, self.minibatch, stops, sealed, self._feed.report())
        all_ballots = verdict.ballots or (b"",) * engine.communicator.world_size
        ballots, peaks = self._meter.opened(self.boundaries.opened(all_ballots))
        self._peaks = None if peaks is None else [peaks[rank] for rank in engine.layout.first_replica]
        self.verdict = dataclasses.replace(verdict, ballots=ballots)
        return self.verdict

    def apply(self) -> None:
        """Makes the step that was voted for, and writes its line."""
        engine, verdict, minibatch = self.running, self.verdict, self.minibatch
        assert verdict is not None
        assert minibatch is not None
        with self._meter.applying(engine, verdict.skipped):
            rate = engine.apply(verdict)
        self.verdict = self.minibatch = None
        self.step = verdict.step
        self.step_seconds, size = time.perf_counter() - self._step_began, self.setup.config.train.minibatch_size
        record = step_record(verdict, rate, self.step_seconds, self._feed.epoch(self.step), size)
        if self._peaks is not None:
            count = engine.options.num_microbatches // engine.layout.replicas
            record |= peak_record(self._peaks, self._meter.source, minibatch.inputs[:count])
        self.log.step(record)

    def discard(self, step: int) -> str:
        """Drops a step that was voted down; returns why, in a sentence."""
        verdict, self.verdict, self.minibatch = self.verdict, None, None
        assert verdict is not None
        self.running.forget()
        return verdict.refusal or f"step {step} was voted down"

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, step: int, stopped: bool) -> bool:
        """Ends the run after this step, together with all ranks: last checkpoint, last evaluation.

        Args:
            stopped: some rank wished to stop.

        Returns:
            True where a person requested the stop, not the clock; the same on every rank.
        """
        requested = stopped and any(self.running.communicator.gather(self._stop_wished()))
        self.boundaries.finish(step, judges=not requested)
        self.log.event("stop", step=step, asked=requested)
        self.log.close()
        return requested
