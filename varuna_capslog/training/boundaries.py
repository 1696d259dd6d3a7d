"""What is due at the boundaries between steps: checkpoints, evaluations, comparisons of copies.

All ranks of a generation come here together, and each of them knows the same about what is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.scores import goodness
from varuna_capslog.engine.interface import Engine
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.plans.parts import grains_of
from varuna_capslog.training.checkpoint import prune, save_checkpoint
from varuna_capslog.training.constants import run_constants
from varuna_capslog.training.feed import evaluation_groups
from varuna_capslog.training.journal import Journal
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.run_setup import RunSetup

__all__ = ["Boundaries", "verify_copies"]


class Boundaries:
    """The boundaries of a run on this rank.

    Attributes:
        scores: of the last evaluation in this process; None before the first.
    """

    def __init__(self, setup: RunSetup, log: Journal) -> None:
        self._setup, self._log = setup, log
        self._val: Any = None  # opened when it is first asked for
        self._engine: Engine  # of the generation that has begun
        self._generation = self._base = self._saved = self._judged = 0
        self._best: tuple[float, int] | None = None
        self.scores: Mapping[str, Any] | None = None

    def begin(self, engine: Engine, generation: int, base: int, saved: bool) -> None:
        """A generation begins after step `base`.

        Args:
            saved: this run's folder is known to hold the checkpoint of that step.
        """
        self._engine, self._generation, self._base = engine, generation, base
        self._saved = base if saved else self._saved if self._saved <= base else 0
        self._judged = self._judged if self._judged <= base else 0
        self._best = self._read_best() if base else None

    def between(self, step: int, save: bool = False) -> bool:
        """All that is due between this step and the next.

        Args:
            save: a checkpoint is due, whatever the settings say.

        Returns:
            Whether a checkpoint has been written.
        """
        train, saved = self._setup.config.train, False
        self._verify(step)
        judges = _due(train.evaluate_every, step)
        if judges or _due(train.checkpoint_every, step) or (save and step > 0):
            self._agree(step)
            saved = self.save_new(step)  # before the evaluation: one that fails or is broken off loses no step
            if judges and self._judged < step:
                self._judge(step)
        return saved

    def finish(self, step: int, judges: bool) -> None:
        """The last boundary: comparison, checkpoint and evaluation, as far as they were not made there.

        Args:
            judges: False leaves the evaluation out.
        """
        self._verify(step)
        self._agree(step)
        self.save_new(step)
        if self._setup.config.train.evaluate_every is not None and self._judged != step and judges:
            self._judge(step)

    def save_new(self, step: int) -> bool:
        """Writes the checkpoint of this step if no later one is known; returns whether it was written.

        Raises:
            DiskFailed: on every rank, when any rank could not write.
        """
        if self._saved >= step:
            return False
        began, engine = time.monotonic(), self._engine
        extra = {
            "constants": run_constants(self._setup.config, grains_of(engine.layout.stages)),
            "cuts": engine.layout.layers_of_ways[0],
        }
        save_checkpoint(self._setup.checkpoints, step, self._generation, engine, extra)
        self._saved = step
        if self._log.writes:
            spare = () if self._best is None else (self._best[1],)
            prune(self._setup.checkpoints, self._setup.config.train.checkpoint_keep, spare)
            self._log.event("checkpoint", step=step, seconds=round(time.monotonic() - began, 3))
        return True

    def evaluate(self, engine: Engine) -> Mapping[str, Any] | None:
        """Runs the validation set through `engine`; the scores are the same on every rank.

        Returns:
            None where the workload has no evaluator or no validation data.

        Raises:
            PeerLost: another rank is gone.
        """
        evaluator = self._setup.workload.evaluator()
        if evaluator is None:
            return None
        communicator, config = engine.communicator, self._setup.config
        # asked by all ranks together, also where some have opened the data in an earlier generation
        self._val = communicator.together(lambda: self._setup.workload.val_data() if self._val is None else self._val)
        if self._val is None:
            return None
        results: list[Any] = []
        if engine.layers:  # the others are idle
            val, ways = self._val, len(engine.layout.ways)
            groups = evaluation_groups(len(val), config.train.microbatch_size, config.num_microbatches)
            for begin in range(0, len(groups), ways):
                minibatches = [val.minibatch(group, 0) for group in groups[begin : begin + ways]]

                def load(way: int, index: int, own: Sequence[Minibatch] = minibatches) -> dict[str, Tensor]:
                    inputs: dict[str, Tensor] = val.load(own[way], index)
                    return inputs

                def take(
                    way: int, index: int, outputs: dict[str, Tensor], own: Sequence[Minibatch] = minibatches
                ) -> None:
                    host = {name: tensor.cpu() for name, tensor in outputs.items()}
                    results.extend(evaluator.collect(host, own[way], index))

                with engine.optimizer.averaged():
                    engine.evaluate(minibatches, load, take)
        # ranks finish at different times, and scoring takes as long as it takes
        communicator.together(lambda: None)
        everything = [result for theirs in communicator.gather(results) for result in theirs]
        mine = communicator.together(lambda: evaluator.summarize(everything) if communicator.rank == 0 else None)
        return communicator.gather(mine)[0]

    def _verify(self, step: int) -> None:
        if _due(self._setup.config.pipeline.verify_every, step):
            verify_copies(self._engine)

    def _agree(self, step: int) -> None:
        """At the boundary with which a generation begins: a rank that joined has no record of earlier checkpoints and
        evaluations, so all take over what any of them knows.
        """
        if step == self._base:
            known = self._engine.communicator.gather((self._saved, self._judged))
            self._saved = max(saved for saved, _ in known)
            self._judged = max(judged for _, judged in known)

    def _judge(self, step: int) -> None:
        """Evaluates, and remembers the best step."""
        scores = self.evaluate(self._engine)
        self._judged = step
        if scores is None:
            return
        self.scores = scores
        self._log.scores(step, scores)
        found = ((name, value) for name, value in scores.items() if isinstance(value, (int, float)))
        value = next((goodness(name, value) for name, value in found), None)
        if value is not None and not math.isnan(value) and (self._best is None or value > self._best[0]):
            self._best = (float(value), step)
            if self._log.writes:
                self._setup.checkpoints.mkdir(parents=True, exist_ok=True)
                files.write_json(self._setup.checkpoints / "best.json", {"step": step, "value": self._best[0]})

    def _read_best(self) -> tuple[float, int] | None:
        best = self._setup.checkpoints / "best.json"
        if not best.exists():
            return None
        record = files.read_json(best)
        return record["value"], record["step"]


def verify_copies(engine: Engine) -> None:
    """Compares every parameter that several ranks hold (shared uses, replicas) by digest (engine rule 3).

    Raises:
        CapslogError: two ranks disagree, naming the parameter and the ranks.
    """
    layout = engine.layout
    digests = {address: digest({address: parameter}) for address, parameter in engine.optimizer.parameters.items()}
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, theirs in enumerate(engine.communicator.gather(digests)):
        for address, found in theirs.items():
            first, known = seen.setdefault(address, (rank, found))
            if known != found:
                raise CapslogError(
                    f"parameter {address!r} differs between {layout.describe(first)} and {layout.describe(rank)}; the "
                    "run is damaged: resume from the last checkpoint"
                )


def _due(every: int | None, step: int) -> bool:
    return bool(every) and step > 0 and step % (every or 1) == 0
