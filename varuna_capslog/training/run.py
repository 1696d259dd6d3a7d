"""A whole training run as one worker sees it: set up, resume, step, evaluate, save, stop.

Reads as the story of a run; the parts are in the other rooms of the engine. It takes a resolved config and a plan and
never decides where to cut.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import Engine, EngineParts, Engines
from varuna_capslog.engine.optimizer import LearningRate
from varuna_capslog.engine.options import EngineOptions, StepResult, layout_of
from varuna_capslog.engine.pipeline import CAPSLOG
from varuna_capslog.engine.probe import resident_tensors
from varuna_capslog.engine.stage_meter import StageMeter, held_inputs
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_layers,
    open_checkpoint,
    prune,
    save_checkpoint,
)
from varuna_capslog.training.constants import check_continues, check_folder, run_constants
from varuna_capslog.training.feed import Feed
from varuna_capslog.training.journal import Journal, peak_record, step_record
from varuna_capslog.training.judging import Judging

__all__ = [
    "Run",
    "RunEnd",
    "build_chain",
    "check_multipliers",
    "engine_options",
    "seed_weights",
    "total_steps",
]

_PEAK_STEP = 2
"""Steps of this process until the peak is measured: by then the optimizer's moments exist."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: the last committed step and whether somebody asked it to stop early."""

    step: int
    stopped: bool
    scores: Mapping[str, Any] | None


def engine_options(config: Config, steps_per_epoch: int | None, plan: Plan | None = None) -> EngineOptions:
    """The engine's constants of a run; `steps_per_epoch` turns `lr_drop_epochs` into steps."""
    train, pipeline = config.train, config.pipeline
    drop = train.lr_drop_steps
    if train.lr_drop_epochs is not None and steps_per_epoch is not None:
        drop = train.lr_drop_epochs * steps_per_epoch
    return EngineOptions(
        num_microbatches=config.num_microbatches,
        num_blocks=config.num_blocks,
        schedule=pipeline.schedule,
        recompute=pipeline.recompute,
        stage_inputs=pipeline.stage_inputs,
        transport=pipeline.transport,
        precision=train.precision,
        seed=train.seed,
        clip_norm=train.clip_norm,
        weight_decay=train.weight_decay,
        rate=LearningRate(train.lr, train.warmup_steps, drop, train.lr_drop_factor),
        multipliers=train.lr_multipliers,
        actions=plan.actions if plan is not None else None,
    )


def seed_weights(seed: int) -> None:
    """Seeds torch before a chain is built, so that every rank initialises alike."""
    torch.manual_seed(seed)


def build_chain(config: Config, workload: Workload) -> tuple[Chain, list[str]]:
    """The whole chain with the weights that the run begins from, alike on every rank; and what `init_from` left out."""
    seed_weights(config.train.seed)
    chain = workload.build_chain()
    if config.init_from is None:
        return chain, []
    from varuna_capslog.training.initial import initialise

    return chain, initialise(chain, workload, config.init_from, config.init_skip)


def total_steps(config: Config, steps_per_epoch: int) -> int | None:
    """The step that ends the run; None where only time limits it."""
    train = config.train
    limits = [] if train.epochs is None else [train.epochs * steps_per_epoch]
    if train.max_steps is not None:
        limits.append(train.max_steps)
    return min(limits) if limits else None


def check_multipliers(chain: Chain, multipliers: Mapping[str, float]) -> None:
    """A misspelt key would silently leave the plain learning rate; on every rank alike, as all know the whole chain."""
    addresses = list(chain.named_parameters())
    for text in multipliers:
        if not any(text in address for address in addresses):
            raise CapslogError(
                f"train.lr_multipliers has the key {text!r}, which is part of no parameter's address; they look like "
                f"{', '.join(repr(address) for address in addresses[:: max(1, len(addresses) // 3)][:3])}"
            )


class Run:
    """One rank of a run.

    Args:
        stop_wished: asked at every step boundary; True on any rank stops all ranks there.
        state: its "step" is kept up to date, and its "doing" says what a step that failed was at, for error messages.
        engines: those that the config may name; by default our own only.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        workload: Workload,
        communicator: Communicator,
        device: torch.device,
        generation: int = 0,
        stop_wished: Callable[[], bool] = lambda: False,
        state: dict[str, Any] | None = None,
        engines: Engines | None = None,
    ) -> None:
        self.config, self.plan, self.workload = config, plan, workload
        self.communicator, self.device, self.generation = communicator, device, generation
        self._stop_wished = stop_wished
        self.run_dir = Path(config.run_dir)
        self.checkpoints = self.run_dir / "checkpoints"
        self.step = 0
        self._best: tuple[float, int] | None = None
        self._began = time.monotonic()

        chain, source = communicator.together(self._open)
        if plan.num_layers != len(chain):
            raise CapslogError(
                f"the plan is for {plan.num_layers} layers, the model has {len(chain)}: plan again with this config"
            )
        if plan.model is not None and plan.model != chain.name:
            raise CapslogError(
                f"the plan is for the model {plan.model!r}, the config builds {chain.name!r}: plan again"
            )
        check_multipliers(chain, config.train.lr_multipliers)
        steps_per_epoch = len(source) // config.train.minibatch_size
        options = engine_options(config, steps_per_epoch, plan)
        self.engine = self._make_engine(engines or Engines({"capslog": CAPSLOG}), chain, source, options)
        local = self.engine.local_microbatches if self.engine.owns_first_stage else ()
        self.feed = Feed(source, config.train.minibatch_size, config.train.microbatch_size, config.train.seed, local)
        self.total_steps = total_steps(config, self.feed.steps_per_epoch)
        self._judging = Judging(config, workload)
        self._scores: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {} if state is None else state

    def _make_engine(self, engines: Engines, chain: Chain, source: Any, options: EngineOptions) -> Engine:
        layout = layout_of(self.plan, self.config)

        def example() -> tuple[dict[str, Tensor], Any, Mapping[str, float]]:
            minibatch = source.minibatch([list(range(self.config.train.microbatch_size))], 0)
            return source.load(minibatch, 0), minibatch.targets[0], minibatch.normalisers

        timeout, loss = self.config.pipeline.timeout_seconds, self.workload.loss
        parts = EngineParts(chain, loss, layout, options, self.communicator, self.device, example, timeout)
        return engines[self.config.engine].build(parts)

    def _open(self) -> tuple[Chain, Any]:
        chain, left_out = build_chain(self.config, self.workload)
        if left_out and self.communicator.rank == 0:
            shown = "; ".join(left_out[:3]) + ("; ..." if len(left_out) > 3 else "")
            sys.stdout.write(f"init_from: {len(left_out)} entries are not taken over: {shown}\n")
        return chain, self.workload.train_data()

    # -- resume and save ---------------------------------------------------------------------------------------------

    def resume(self) -> Checkpoint | None:
        """Continues a checkpoint as `resume` says; every rank takes the same one.

        Raises:
            CapslogError: no such checkpoint, or it was written for another model, seed or minibatch.
        """
        wish = self.config.resume
        if wish == "never":
            check_folder(self.config, self.engine.chain.name)
            self.communicator.barrier()  # nobody writes before all have looked
            return None
        found: Checkpoint | None = None
        if wish == "auto":
            latest, skipped = latest_checkpoint(self.checkpoints)
            for problem in skipped if self.communicator.rank == 0 else ():
                sys.stderr.write(f"passed over a checkpoint: {problem}\n")
            steps = self.communicator.gather(latest.step if latest else 0)
            if min(steps) != max(steps):
                raise CapslogError(
                    f"the ranks see different checkpoints in {self.checkpoints} (steps {sorted(set(steps))}); put "
                    "run_dir on a file system that all hosts share"
                )
            found = latest
        else:
            found = open_checkpoint(Path(wish))
        if found is None:
            return None
        check_continues(self.config, self.engine.chain.name, found.manifest, found.path)
        self.take_weights(found)
        self.step = found.step
        best = self.checkpoints / "best.json"
        if best.exists():
            record = files.read_json(best)
            self._best = (record["value"], record["step"])
        return found

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Loads this rank's layers and their moments, whatever the cuts it was written under."""
        self.communicator.together(lambda: load_layers(checkpoint, self.engine.layers, self.engine.optimizer))

    def save(self, journal: Journal | None) -> None:
        """Writes a checkpoint of the boundary after `self.step`, prunes older ones."""
        began = time.monotonic()
        save_checkpoint(
            self.checkpoints,
            self.step,
            self.generation,
            self.engine.chain,
            self.engine.layers,
            self.engine.optimizer,
            self.communicator,
            self.engine.replica == 0,
            {"constants": run_constants(self.config), "cuts": list(self.plan.cuts)},
        )
        if journal is not None:
            prune(self.checkpoints, self.config.train.checkpoint_keep, () if self._best is None else (self._best[1],))
            journal.event("checkpoint", step=self.step, seconds=round(time.monotonic() - began, 3))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self, journal: Journal | None) -> RunEnd:
        """Steps until the end, somebody's wish to stop, or an error.

        Raises:
            StepRefused: after the boundary before the refused step was saved.
        """
        train = self.config.train
        first, saved, evaluated, stopped = self.step + 1, self.step, 0, False
        while not stopped and (self.total_steps is None or self.step < self.total_steps):
            late = train.max_seconds is not None and time.monotonic() - self._began > train.max_seconds
            try:
                result, record = self._one_step(self.step + 1, late or self._stop_wished(), first)
            except StepRefused:
                if self.step > saved:
                    self.save(journal)
                raise
            except Exception:
                self._state["doing"] = self.engine.doing
                raise
            self.step, stopped = result.step, result.stop
            if journal is not None:
                journal.step(record)
            every = self.config.pipeline.verify_every
            if every and self.step % every == 0:
                self.engine.verify_copies()
            judged = bool(train.evaluate_every) and self.step % (train.evaluate_every or 1) == 0
            if judged or (train.checkpoint_every is not None and self.step % train.checkpoint_every == 0):
                self.save(journal)  # before the evaluation: one that fails or is broken off loses no step
                saved = self.step
            if judged and not stopped:
                self._judge(journal)
                evaluated = self.step
        asked = stopped and self._asked()
        if self.step > saved:
            self.save(journal)
        if train.evaluate_every is not None and evaluated != self.step and not asked:
            self._judge(journal)
        return RunEnd(self.step, asked, self._scores)

    def _asked(self) -> bool:
        """Whether a person (not the clock) asked for the stop; the same answer on every rank."""
        return any(self.communicator.gather(self._stop_wished()))

    def _one_step(self, step: int, stop: bool, first: int) -> tuple[StepResult, dict[str, Any]]:
        self._state["step"] = step
        minibatch = self.feed.minibatch(step)
        measured = step - first + 1 == _PEAK_STEP
        peaks: dict[str, Any] = {}
        if measured:
            self.communicator.barrier()
        began = time.perf_counter()
        if measured:
            engine = self.engine
            meter = StageMeter(self.device, lambda: resident_tensors(engine.layers, engine.optimizer))
            load = held_inputs(self.feed.loader(step), engine.local_microbatches if engine.owns_first_stage else ())
            with meter.peak():
                result = engine.train_step(step, minibatch, load, stop)
            by_rank = self.communicator.gather(meter.peak_bytes)
            by_stage = [by_rank[rank] for rank in engine.layout.placement]  # of replica 0; a rank's stages share a peak
            count = engine.options.num_microbatches // engine.layout.replicas
            peaks = peak_record(by_stage, meter.peak_source, minibatch.inputs[:count])
        else:
            result = self.engine.train_step(step, minibatch, self.feed.loader(step), stop)
        seconds = time.perf_counter() - began
        record = step_record(result, seconds, self.feed.epoch(step), self.config.train.minibatch_size)
        return result, record | peaks

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _judge(self, journal: Journal | None) -> None:
        """Evaluates, and remembers the best step."""
        scores = self.evaluate()
        if scores is None:
            return
        self._scores = scores
        if journal is not None:
            journal.scores(self.step, scores)
        value = next((value for value in scores.values() if isinstance(value, (int, float))), None)
        if value is not None and not math.isnan(value) and (self._best is None or value > self._best[0]):
            self._best = (float(value), self.step)
            if journal is not None:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                files.write_json(self.checkpoints / "best.json", {"step": self.step, "value": self._best[0]})

    def evaluate(self) -> Mapping[str, Any] | None:
        """Scores of the validation set on the pipeline, the same on every rank; None without one."""
        return self._judging.scores(self.engine)

    def close(self) -> None:
        """Stops the loading threads."""
        self.feed.close()
