"""Training loop of one rank: steps, and the work between them, on the engine of the current generation.

Called by `run.Run`, with one engine for the whole run, or in an elastic run by `elastic/member`, where the protocol
starts each step and each generation has a new engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.interface import Engine, Verdict
from varuna_capslog.engine.probe import PeakProbe, held_inputs, resident_tensors
from varuna_capslog.model.workload import LateTargets, Minibatch
from varuna_capslog.plans.parts import grains_of
from varuna_capslog.training.checkpoint import prune
from varuna_capslog.training.checkpoint_writer import CheckpointWriter, HostCopies
from varuna_capslog.training.feed import DataWatch, Feed, evaluation_groups
from varuna_capslog.training.journal import Journal, evaluated_steps, goodness, peak_record, step_record
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.manifest import read_best, run_constants
from varuna_capslog.training.run_setup import RunSetup

__all__ = ["Boundaries", "PeakMeter", "TrainingLoop", "verify_copies"]


# -- The work at the boundaries between steps: checkpoints, evaluations, comparisons of copies.
#
# All ranks of a generation call these methods together, and each rank records which work is done.


class Boundaries:
    """Boundary work of a run on this rank. scores: of the last evaluation in this process; None before the first."""

    def __init__(self, setup: RunSetup, log: Journal, watch: DataWatch) -> None:
        self._setup, self._log, self._watch = setup, log, watch
        self._val: Any = None  # opened at the first evaluation
        self._engine: Engine  # of the current generation
        self._generation = self._base = self._evaluated = 0
        self._named = 0  # newest step whose checkpoint is complete
        self._saving: CheckpointWriter | None = None  # of the checkpoint in progress
        self._copies = HostCopies()
        self._all_written = self._broken_off = False
        self._best: tuple[float, int] | None = None
        self._without_better: set[int] = set()  # steps of the evaluations since the best one
        self._counts_alike = True  # all ranks have records of the same evaluations
        self.scores: Mapping[str, Any] | None = None

    def begin(self, engine: Engine, generation: int, base: int, saved: bool) -> None:
        """Start a generation after step `base`. saved: this run's folder holds the checkpoint of that step."""
        self.end()
        self._engine, self._generation, self._base = engine, generation, base
        self._named = base if saved else self._named if self._named <= base else 0
        self._evaluated = self._evaluated if self._evaluated <= base else 0
        self._best = read_best(self._setup.checkpoints) if base else None
        best_step = 0 if self._best is None else self._best[1]
        evaluated = evaluated_steps(self._setup.run_dir) if base else []
        self._without_better = {step for step in evaluated if best_step < step <= base}
        # files of an earlier generation may still be incomplete, or not yet visible on another host
        self._counts_alike = not (base and self._setup.config.elastic.enabled)

    def end(self) -> None:
        """End the generation and give up a checkpoint in progress; the next generation writes its own."""
        if self._saving is not None:
            self._saving.give_up()
            self._saving, self._broken_off = None, True
        self._copies = HostCopies()  # the old copies may still be read by the thread of the given-up checkpoint
        self._all_written = False

    def marked(self, ballot: bytes) -> bytes:
        """Ballot, marked if this rank has written its part of a checkpoint."""
        return ballot if self._saving is None else self._saving.marked(ballot)

    def unmarked(self, ballots: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the ballots without the marks of `marked`."""
        plain, self._all_written = CheckpointWriter.unmarked(ballots)
        return plain

    @property
    def is_stuck(self) -> bool:
        """True where the last `train.stop_after_evaluations` evaluations did not improve on the best one."""
        limit = self._setup.config.train.stop_after_evaluations
        return limit is not None and self._counts_alike and len(self._without_better) >= limit

    def why_stuck(self) -> str:
        """Sentence that tells the user why a run that `is_stuck` ends."""
        count = len(self._without_better)
        last = "evaluation" if count == 1 else f"{count} evaluations"
        best = "" if self._best is None else f", which is that of step {self._best[1]}"
        return f"stopped early: the last {last} did not improve on the best one{best} (train.stop_after_evaluations)"

    def between(self, step: int, save: bool = False) -> int | None:
        """Do the work that is due after this step; return the newest step whose checkpoint it completed, or None.

        save: write a checkpoint regardless of the settings; training waits until it is complete. Raises DiskFailed on
        every rank when any rank could not write.
        """
        train = self._setup.config.train
        self._verify(step)
        completed = self._complete(in_thread=True) if self._all_written else None
        must_rewrite = self._agree(step) if step == self._base > 0 else False
        evaluates = _due(train.evaluate_every, step) and self._evaluated < step
        if evaluates or must_rewrite or _due(train.checkpoint_every, step) or (save and step > 0):
            # complete before an evaluation, so that a failed or interrupted evaluation loses no step
            completed = self._save(step, train.checkpoint_background and not (save or evaluates)) or completed
            if evaluates:
                self._evaluate_and_record(step)
        return completed

    def finish(self, step: int, evaluates: bool) -> None:
        """Do the remaining work of the last boundary: comparison, checkpoint and, if `evaluates`, evaluation."""
        self._verify(step)
        if step == self._base:
            self._agree(step)
        self.save_new(step)
        if self._setup.config.train.evaluate_every is not None and self._evaluated != step and evaluates:
            self._evaluate_and_record(step)

    def save_new(self, step: int) -> bool:
        """Complete this step's checkpoint; False if it was complete before. Raises as `between`."""
        return self._save(step, background=False) is not None

    def _save(self, step: int, background: bool) -> int | None:
        """Complete the previous checkpoint and begin this step's, unless it was begun; return as `between`."""
        if self._saved >= step:
            return None if background else self._complete()
        completed = self._complete()
        extra = {
            "constants": run_constants(self._setup.config, grains_of(self._engine.layout.stages)),
            "data": dict(self._setup.facts),
            "cuts": self._engine.layout.layers_of_ways[0],
        }
        folder, number, engine = self._setup.checkpoints, self._generation, self._engine
        self._saving = CheckpointWriter(folder, step, number, engine, extra, self._copies if background else None)
        return completed if background else self._complete()

    @property
    def _saved(self) -> int:
        """Newest step whose checkpoint was begun."""
        return self._named if self._saving is None else max(self._named, self._saving.step)

    def _complete(self, in_thread: bool = False) -> int | None:
        """Complete the checkpoint in progress; return its step, or None. in_thread: remove old ones in a thread."""
        saving, self._saving, self._all_written = self._saving, None, False
        if saving is None:
            return None
        self._named = saving.step

        def tidy() -> None:
            spare = () if self._best is None else (self._best[1],)
            prune(self._setup.checkpoints, self._setup.config.train.checkpoint_keep, spare, in_thread)

        saving.complete(tidy)
        if self._log.writes:
            seconds, stall = round(saving.seconds, 3), round(saving.stall_seconds, 3)
            self._log.event("checkpoint", step=saving.step, seconds=seconds, stall_seconds=stall)
        return saving.step

    def evaluate(self, engine: Engine) -> Mapping[str, Any] | None:
        """Return the validation scores, equal on all ranks; None without evaluator or data. Raises PeerLost."""
        evaluator = self._setup.workload.evaluator()
        if evaluator is None:
            return None
        communicator, config = engine.communicator, self._setup.config
        # called by all ranks, also by those that opened the data in an earlier generation
        self._val = communicator.together(lambda: self._setup.workload.val_data() if self._val is None else self._val)
        if self._val is None:
            return None
        results: list[Any] = []
        if engine.layers:  # False on idle ranks
            val, ways = self._val, len(engine.layout.ways)
            groups = evaluation_groups(len(val), config.train.microbatch_size, config.num_microbatches)
            for begin in range(0, len(groups), ways):
                minibatches = [self._watched(val.minibatch(group, 0)) for group in groups[begin : begin + ways]]

                def load(way: int, index: int, batches: Sequence[Minibatch] = minibatches) -> dict[str, Tensor]:
                    with self._watch.waiting(batches[way], index):
                        inputs: dict[str, Tensor] = val.load(batches[way], index)
                    return inputs

                def take(
                    way: int, index: int, outputs: dict[str, Tensor], batches: Sequence[Minibatch] = minibatches
                ) -> None:
                    host = {name: tensor.cpu() for name, tensor in outputs.items()}
                    results.extend(evaluator.collect(host, batches[way], index))

                with engine.optimizer.averaged():
                    engine.evaluate(minibatches, load, take)
        # without a timeout: ranks finish at different times, and scoring may be slow
        communicator.together(lambda: None)
        everything = [result for theirs in communicator.gather(results) for result in theirs]
        mine = communicator.together(lambda: evaluator.summarize(everything) if communicator.rank == 0 else None)
        return communicator.gather(mine)[0]

    def _watched(self, minibatch: Minibatch) -> Minibatch:
        """Minibatch with a `DataWatch` over the waits for its late targets."""

        def read(microbatch: int, targets: LateTargets) -> Any:
            with self._watch.waiting(minibatch, microbatch):
                return targets.read()

        for microbatch, targets in enumerate(minibatch.targets):
            if isinstance(targets, LateTargets):
                minibatch.targets[microbatch] = LateTargets(functools.partial(read, microbatch, targets))
        return minibatch

    def _verify(self, step: int) -> None:
        if _due(self._setup.config.pipeline.verify_every, step):
            verify_copies(self._engine)

    def _agree(self, step: int) -> bool:
        """Exchange the records of earlier checkpoints and evaluations at a generation's first boundary.

        A rank that joined has no records, so all ranks take the newest. True where the earlier generation gave up a
        checkpoint that must be written again.
        """
        mine = self._named, self._evaluated, self._broken_off, self._best, self._without_better
        named, evaluated, broken_off, best, without_better = zip(*self._engine.communicator.gather(mine), strict=True)
        self._named, self._evaluated, self._broken_off = max(named), max(evaluated), False
        self._best = max((record for record in best if record is not None), default=None)
        best_step = 0 if self._best is None else self._best[1]
        self._without_better = {earlier for earlier in set().union(*without_better) if earlier > best_step}
        self._counts_alike = True
        return self._saved < step and any(broken_off)

    def _evaluate_and_record(self, step: int) -> None:
        """Evaluate, log the scores, and record the best step."""
        scores = self.evaluate(self._engine)
        self._evaluated = step
        if scores is None:
            return
        self.scores = scores
        self._log.scores(step, scores)
        numbers = ((name, value) for name, value in scores.items() if isinstance(value, (int, float)))
        value = next((goodness(name, value) for name, value in numbers), None)
        self._without_better.add(step)
        if value is not None and not math.isnan(value) and (self._best is None or value > self._best[0]):
            self._best = (float(value), step)
            self._without_better.clear()
            if self._log.writes:
                self._setup.checkpoints.mkdir(parents=True, exist_ok=True)
                files.write_json(self._setup.checkpoints / "best.json", {"step": step, "value": self._best[0]})


def verify_copies(engine: Engine) -> None:
    """Compare by digest every parameter, or its master, that several ranks have (shared parameters, replicas).

    Raises CapslogError, with parameter and ranks, where two ranks have different values.
    """
    layout = engine.layout
    digests = {address: digest({address: value}) for address, value in engine.optimizer.values.items()}
    reference: dict[str, tuple[int, bytes]] = {}
    for rank, theirs in enumerate(engine.communicator.gather(digests)):
        for address, value_digest in theirs.items():
            first, first_digest = reference.setdefault(address, (rank, value_digest))
            if first_digest != value_digest:
                raise CapslogError(
                    f"parameter {address!r} differs between {layout.describe(first)} and {layout.describe(rank)}; the "
                    "run is damaged: resume from the last checkpoint"
                )


def _due(interval: int | None, step: int) -> bool:
    return bool(interval) and step > 0 and step % (interval or 1) == 0


# -- the steps


_FIRST, _LATER = 2, 5
"""Number of the measured step: in the first generation the first step with moments; in a later generation a later step,
so that short generations do not spend some ten milliseconds on a measurement."""


class PeakMeter:
    """Meter of the peak of every stage, once per generation; peaks are exchanged with the ballots of a vote.

    A step is measured in two parts, one step's update and the next step's forward and backward, so that the peak is
    known at the vote of the next step. On an accelerator a peak includes copies that protection keeps on the device; no
    peak is measured where torch counts no bytes. source: how peaks are measured; None before the first measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = self._steps = 0
        self._bytes: int | None = None
        self.source: str | None = None

    def begin(self, generation: int, rounds_moments: bool = False) -> None:
        """Start a generation, numbered from 1 within the run; every member calls this with the same number.

        rounds_moments: each update except the first has old rounded moments in memory besides the new ones.
        """
        self._at, self._steps, self._bytes = _FIRST + rounds_moments if generation == 1 else _LATER, 0, None
        if not accelerator.counts_memory(self._device):
            self._at = 0  # no step has this number

    @contextlib.contextmanager
    def computing(self, engine: Engine) -> Iterator[bool]:
        """Context around forward and backward of a step; yields True if the step is measured."""
        self._steps += 1
        measured = self._steps == self._at
        with self._probed(engine) if measured else contextlib.nullcontext():
            yield measured

    @contextlib.contextmanager
    def applying(self, engine: Engine, skipped: bool) -> Iterator[None]:
        """Context around the update of a step. Each skipped step delays the measured step by one."""
        if skipped and self._steps < self._at:
            self._steps -= 1
        with self._probed(engine) if self._steps == self._at - 1 and not skipped else contextlib.nullcontext():
            yield

    def with_peak(self, ballot: bytes) -> bytes:
        """Ballot, preceded by this member's peak if the step was measured."""
        if self._steps != self._at or self._bytes is None:
            return ballot
        return b"%d|%b" % (self._bytes, ballot)

    @staticmethod
    def without_peaks(ballots: Sequence[bytes]) -> tuple[tuple[bytes, ...], list[int] | None]:
        """Return the ballots without the peaks of `with_peak`, and the peaks by rank; None if none were measured."""
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
    """Training loop of one rank.

    Args:
        offset: generation n of this process's run is n + offset in the run's files.
        stop_wished: called once per step; True on any rank ends the run after that step.

    Attributes:
        watch: over the waits for data; the process sets its `DataWatch.late`.
        engine: of the current generation; None between two generations.
        step, step_seconds: last step that was applied, and its duration on this rank.
        minibatch, verdict: of the current step, until it is applied or discarded.
        run_began: start of `max_seconds`, on the monotonic clock; the caller sets it if the run began before this loop.
    """

    def __init__(
        self, setup: RunSetup, device: torch.device, offset: int = 0, stop_wished: Callable[[], bool] = lambda: False
    ) -> None:
        self.setup, self.offset, self._stop_wished = setup, offset, stop_wished
        train = setup.config.train
        self.log = Journal(setup.run_dir, setup.total_steps, train.log_every, train.loggers, train.max_seconds)
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
        """Begin a generation: train with this engine after step `base`. number: counted from 1 in this process's run.

        writes: this rank writes the run's record. saved: this run's folder holds the checkpoint of step `base`.
        """
        generation = number + self.offset
        self.engine, self.step = engine, base
        self._feed = self.setup.feed(engine.loaded_microbatches, engine.judged_microbatches, self.watch)
        self._meter.begin(number, engine.options.recipe.rounds_moments)
        self.boundaries.begin(engine, generation, base, saved)
        self.log.begin(writes, base, generation, engine.communicator.world_size)

    def end(self) -> None:
        """End the generation: drop the engine and the current step."""
        if self.engine is not None:
            self.engine.forget()
        self.engine = self.minibatch = self.verdict = None
        self.boundaries.end()
        self._feed.close()

    def close(self) -> None:
        """Stop the loading threads, a checkpoint in progress, and the progress bar."""
        self.boundaries.end()
        self._feed.close()
        self.log.close()

    @property
    def running(self) -> Engine:
        """Engine of the current generation."""
        assert self.engine is not None
        return self.engine

    # -- a step -------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        """True where the run ends with this step."""
        return self.boundaries.is_stuck or (self.setup.total_steps is not None and step >= self.setup.total_steps)

    def compute(self, step: int) -> None:
        """Run forward and backward, and sum the gradients; the model does not change."""
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
        """Vote on the step with all ranks. A step whose verdict has a `refusal` must be discarded, not applied."""
        assert self.minibatch is not None
        limit, engine = self.setup.config.train.max_seconds, self.running
        late = limit is not None and time.monotonic() - self.run_began > limit
        stops, marked = late or self._stop_wished(), self.boundaries.marked(self._meter.with_peak(ballot))
        verdict = engine.vote(step, self.minibatch, stops, marked, self._feed.report())
        all_ballots = verdict.ballots or (b"",) * engine.communicator.world_size
        ballots, peaks = self._meter.without_peaks(self.boundaries.unmarked(all_ballots))
        self._peaks = None if peaks is None else [peaks[rank] for rank in engine.layout.first_replica]
        self.verdict = dataclasses.replace(verdict, ballots=ballots)
        return self.verdict

    def apply(self) -> None:
        """Apply the step as the vote decided, and log it."""
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
        """Drop a refused step; return the reason, in a sentence."""
        verdict, self.verdict, self.minibatch = self.verdict, None, None
        assert verdict is not None
        self.running.forget()
        return verdict.refusal or f"step {step} was voted down"

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, step: int, stopped: bool) -> bool:
        """End the run after this step, together with all ranks: last checkpoint, last evaluation.

        stopped: some rank requested to stop. Returns True, on every rank, if a person requested it, not a time limit.
        """
        requested = stopped and any(self.running.communicator.gather(self._stop_wished()))
        self.boundaries.finish(step, evaluates=not requested)
        why = {"why": self.boundaries.why_stuck()} if self.boundaries.is_stuck else {}
        self.log.event("stop", step=step, asked=requested, **why)
        for sentence in why.values():
            self.log.say(sentence)
        self.log.close()
        return requested
