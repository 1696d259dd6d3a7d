"""Runs training with one plan on one rank: set up, resume, step, evaluate, save, stop. Called by `start/worker`.

Elastic runs use `elastic/member` instead. A run takes a resolved config and a plan, and never chooses cuts.
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
from varuna_capslog.base.tables import printable
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import Engine, EngineKind, EngineParts, Engines
from varuna_capslog.engine.layout import layout_of
from varuna_capslog.engine.pipeline import build
from varuna_capslog.model.workload import Workload
from varuna_capslog.plans.parts import grains_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint, passed_over
from varuna_capslog.training.loop import TrainingLoop
from varuna_capslog.training.manifest import check_continues, check_folder
from varuna_capslog.training.run_setup import check_plan, set_up_run
from varuna_capslog.training.stored_layers import load_layers

__all__ = ["Run"]


@dataclass(frozen=True)
class RunEnd:
    """End of a run. step: last committed step. stopped: a person requested the stop. scores: of the last evaluation."""

    step: int
    stopped: bool
    scores: Mapping[str, Any] | None


class Run:
    """Run on one rank, with one engine from beginning to end; the caller closes its `loop`.

    Args:
        stop_wished: called once per step; True on any rank stops all ranks after that step.
        engines: those that the config may name; by default only our own.

    Attributes:
        begun_step: last step that was begun; None before the first.
        failed_at: action in which a step failed, for error messages; None without a failure.
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
        engines: Engines | None = None,
    ) -> None:
        began = time.monotonic()
        self.config, self.plan, self.workload = config, plan, workload
        self.communicator, self.device = communicator, device
        self.setup = communicator.together(lambda: set_up_run(config, workload, plan))
        if self.setup.left_out and communicator.rank == 0:
            shown = "; ".join(self.setup.left_out[:3]) + ("; ..." if len(self.setup.left_out) > 3 else "")
            sys.stdout.write(f"init_from: {len(self.setup.left_out)} entries are not taken over: {printable(shown)}\n")
        check_plan(self.setup, plan)
        self.engine = self._make_engine(engines or Engines({"capslog": EngineKind(build)}))
        freed = len(self.setup.chain) - len(self.engine.layers) if config.engine == "capslog" else 0
        if freed and self.setup.chain.factories is None and communicator.rank == 0:
            sys.stdout.write(
                "each rank builds the whole model before it frees the layers of other ranks; for large models see "
                "Chain.from_factories in docs/your-model.md\n"
            )
        self.loop = TrainingLoop(self.setup, device, generation - 1, stop_wished)
        self.loop.run_began = began
        self._found: Checkpoint | None = None
        self.begun_step: int | None = None
        self.failed_at: str | None = None

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
        """Load the checkpoint that the config's `resume` selects, the same on every rank; None if there is none.

        Raises CapslogError: no such checkpoint, or it is of a run with another model, data or constants of training.
        """
        wish = self.config.resume
        if wish == "never":
            check_folder(self.config, self.engine.chain.name, grains_of(self.engine.layout.stages))
            self.communicator.barrier()  # no rank writes before all ranks have checked the folder
            return None
        checkpoint: Checkpoint | None = None
        if wish == "auto":
            latest, skipped = latest_checkpoint(self.setup.checkpoints)
            if self.communicator.rank == 0:
                # on standard output, which the user sees; a worker's standard error goes to a file
                sys.stdout.writelines(f"{printable(line)}\n" for line in passed_over(latest, skipped))
            steps = self.communicator.gather(latest.step if latest else 0)
            if min(steps) != max(steps):
                raise CapslogError(
                    f"the ranks see different checkpoints in {self.setup.checkpoints} (steps {sorted(set(steps))}); "
                    "put run_dir on a file system that all hosts share"
                )
            checkpoint = latest
        else:
            checkpoint = open_checkpoint(Path(wish))
        if checkpoint is None:
            return None
        grains = grains_of(self.engine.layout.stages)
        check_continues(
            self.config, self.engine.chain.name, checkpoint.manifest, checkpoint.path, grains, self.setup.facts
        )
        self.take_weights(checkpoint)
        self._found, self.loop.step = checkpoint, checkpoint.step
        return checkpoint

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Load this rank's layers and moments, from a checkpoint of any cuts."""
        engine = self.engine
        self.communicator.together(lambda: load_layers(checkpoint, engine.chain, engine.layers, engine.optimizer))

    # -- the run -----------------------------------------------------------------------------------------------------

    def train(self) -> RunEnd:
        """Train until the last step or a request to stop. Raises StepRefused, after saving the boundary before it."""
        loop, resumed, stopped = self.loop, self._found, False
        loop.begin(self.engine, 1, loop.step, writes=self.communicator.rank == 0, saved=True)
        if resumed is None:
            loop.log.event("start", step=0)
        else:
            loop.log.say(f"resumed after step {resumed.step} from {resumed.path}")
            loop.log.event("resume", step=resumed.step, path=str(resumed.path))
        while not stopped and not loop.is_done(loop.step):
            stopped = self._one_step(loop.step + 1)
            if not stopped and not loop.is_done(loop.step):
                loop.boundaries.between(loop.step)
        requested = loop.finish(loop.step, stopped)
        return RunEnd(loop.step, requested, loop.boundaries.scores)

    def _one_step(self, step: int) -> bool:
        """Compute, vote and apply; True where some rank requests to stop."""
        self.begun_step = step
        try:
            self.loop.compute(step)
            verdict = self.loop.vote(step)
        except Exception:
            self.failed_at = self.engine.doing
            raise
        if verdict.refusal is None:
            self.loop.apply()
            return verdict.stop
        why = self.loop.discard(step)
        self.loop.boundaries.save_new(step - 1)
        raise StepRefused(why)
