"""A whole training run as one worker sees it: set up, resume, step, evaluate, save, stop.

Reads as the story of a run; the parts are in the other rooms of the engine. It takes a resolved config and a plan and
never decides where to cut.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import Engine, EngineParts, Engines
from varuna_capslog.engine.optimizer import LearningRate
from varuna_capslog.engine.options import EngineOptions, layout_of
from varuna_capslog.engine.pipeline import CAPSLOG
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import Checkpoint, latest_checkpoint, load_layers, open_checkpoint
from varuna_capslog.training.constants import check_continues, check_folder
from varuna_capslog.training.loop import TrainingLoop
from varuna_capslog.training.run_setup import RunSetup

__all__ = [
    "Run",
    "RunEnd",
    "build_chain",
    "check_plan",
    "engine_options",
    "seed_weights",
    "set_up_run",
    "total_steps",
]


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


def set_up_run(config: Config, workload: Workload, plan: Plan | None = None) -> RunSetup:
    """Builds what a run trains; `plan` is one whose own actions the engine is to follow."""
    chain, left_out = build_chain(config, workload)
    source = workload.train_data()
    steps_per_epoch = len(source) // config.train.minibatch_size
    options = engine_options(config, steps_per_epoch, plan)
    return RunSetup(config, workload, chain, source, options, total_steps(config, steps_per_epoch), left_out)


def check_plan(setup: RunSetup, plan: Plan) -> None:
    """Raises CapslogError if the plan, or a key of the config, is for another model than the one that was built."""
    chain = setup.chain
    if plan.num_layers != len(chain):
        raise CapslogError(
            f"the plan is for {plan.num_layers} layers, the model has {len(chain)}: plan again with this config"
        )
    if plan.model is not None and plan.model != chain.name:
        raise CapslogError(f"the plan is for the model {plan.model!r}, the config builds {chain.name!r}: plan again")
    check_multipliers(chain, setup.config.train.lr_multipliers)


class Run:
    """One rank of a run of a fixed number of steps, with one engine from its beginning to its end.

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
        began = time.monotonic()
        self.config, self.plan, self.workload = config, plan, workload
        self.communicator, self.device = communicator, device
        self.setup = communicator.together(lambda: set_up_run(config, workload, plan))
        if self.setup.left_out and communicator.rank == 0:
            shown = "; ".join(self.setup.left_out[:3]) + ("; ..." if len(self.setup.left_out) > 3 else "")
            sys.stdout.write(f"init_from: {len(self.setup.left_out)} entries are not taken over: {shown}\n")
        check_plan(self.setup, plan)
        self.engine = self._make_engine(engines or Engines({"capslog": CAPSLOG}))
        self.loop = TrainingLoop(self.setup, device, generation - 1, stop_wished)
        self.loop.began(time.monotonic() - began)
        self._found: Checkpoint | None = None
        self._state: dict[str, Any] = {} if state is None else state

    def _make_engine(self, engines: Engines) -> Engine:
        layout, setup = layout_of(self.plan, self.config), self.setup

        def example() -> tuple[dict[str, Tensor], Any, Mapping[str, float]]:
            minibatch = setup.source.minibatch([list(range(self.config.train.microbatch_size))], 0)
            return setup.source.load(minibatch, 0), minibatch.targets[0], minibatch.normalisers

        timeout, loss = self.config.pipeline.timeout_seconds, self.workload.loss
        parts = EngineParts(setup.chain, loss, layout, setup.options, self.communicator, self.device, example, timeout)
        return engines[self.config.engine].build(parts)

    # -- resume ------------------------------------------------------------------------------------------------------

    def resume(self) -> Checkpoint | None:
        """Continues a checkpoint as `resume` says; every rank takes the same one.

        Raises:
            CapslogError: no such checkpoint, or it was written for another model, seed or minibatch.
        """
        wish = self.config.resume
        if wish == "never":
            check_folder(self.config, self.engine.chain.name)
            self.communicator.barrier()  # no rank writes before all have looked
            return None
        found: Checkpoint | None = None
        if wish == "auto":
            latest, skipped = latest_checkpoint(self.setup.checkpoints)
            for problem in skipped if self.communicator.rank == 0 else ():
                sys.stderr.write(f"passed over a checkpoint: {problem}\n")
            steps = self.communicator.gather(latest.step if latest else 0)
            if min(steps) != max(steps):
                raise CapslogError(
                    f"the ranks see different checkpoints in {self.setup.checkpoints} (steps {sorted(set(steps))}); "
                    "put run_dir on a file system that all hosts share"
                )
            found = latest
        else:
            found = open_checkpoint(Path(wish))
        if found is None:
            return None
        check_continues(self.config, self.engine.chain.name, found.manifest, found.path)
        self.take_weights(found)
        self._found, self.loop.step = found, found.step
        return found

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Loads this rank's layers and their moments, whatever the cuts it was written under."""
        self.communicator.together(lambda: load_layers(checkpoint, self.engine.layers, self.engine.optimizer))

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was applied."""
        return self.loop.step

    def train(self) -> RunEnd:
        """Steps until the end, somebody's wish to stop, or an error.

        Raises:
            StepRefused: after the boundary before the refused step was saved.
        """
        loop, found, stopped = self.loop, self._found, False
        loop.begin(self.engine, 1, loop.step, writes=self.communicator.rank == 0, saved=True)
        if found is None:
            loop.log.event("start", step=0)
        else:
            loop.log.say(f"resumed after step {found.step} from {found.path}")
            loop.log.event("resume", step=found.step, path=str(found.path))
        while not stopped and not loop.is_done(loop.step):
            stopped = self._one_step(loop.step + 1)
            if not stopped and not loop.is_done(loop.step):
                loop.boundaries.between(loop.step)
        asked = loop.finish(loop.step, stopped)
        return RunEnd(loop.step, asked, loop.boundaries.scores)

    def _one_step(self, step: int) -> bool:
        """Computes, votes and applies; returns whether some rank wishes to stop."""
        self._state["step"] = step
        try:
            self.loop.compute(step)
            verdict = self.loop.vote(step)
        except Exception:
            self._state["doing"] = self.engine.doing
            raise
        if verdict.refusal is None:
            self.loop.apply()
            return verdict.stop
        why = self.loop.discard(step)
        self.loop.boundaries.save_new(step - 1)
        raise StepRefused(why)

    def evaluate(self) -> Mapping[str, Any] | None:
        """Scores of the validation set on the pipeline, the same on every rank; None without one."""
        return self.loop.boundaries.evaluate(self.engine)

    def close(self) -> None:
        """Stops the loading threads and the progress bar."""
        self.loop.close()
