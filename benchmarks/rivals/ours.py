"""The same training as an elastic run of this library: the workload and the worker. See `our_machine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from task import BLOCKS, PIXELS, Digits, StepLog, all_layers  # noqa: E402

from varuna_capslog.config.settings import Config  # noqa: E402
from varuna_capslog.model.chain import Chain, Layer, TensorSpec  # noqa: E402
from varuna_capslog.model.workload import DataSource, Minibatch, Workload  # noqa: E402

__all__ = ["work", "workload"]


class Samples(DataSource):
    """The digits, addressed by their numbers."""

    def __init__(self) -> None:
        self.data = Digits()

    def __len__(self) -> int:
        return len(self.data)

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        return Minibatch(
            [{"x": TensorSpec((len(group), PIXELS))} for group in groups],
            [self.data.classes[list(group)] for group in groups],
            {"samples": float(sum(len(group) for group in groups))},
            [list(group) for group in groups],
            [list(group) for group in groups],
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        return {"x": self.data.pixels[minibatch.recipes[microbatch]]}


class Sleeping(Workload):
    """The model of `task` as a chain."""

    name = "rivals"

    def __init__(self, config: Config) -> None:
        self.seconds = float(config.model.get("seconds", 0.0))

    def build_chain(self) -> Chain:
        names = ["stem", *(f"block.{k}" for k in range(BLOCKS)), "head"]
        layers = [Layer(name, module) for name, module in zip(names, all_layers(self.seconds), strict=True)]
        return Chain(layers, name=self.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        (logits,) = outputs.values()
        return {"loss": F.cross_entropy(logits, targets, reduction="sum") / normalisers["samples"]}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, PIXELS))}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return torch.zeros(microbatch_size, dtype=torch.long), {"samples": float(microbatch_size)}

    def train_data(self) -> DataSource:
        return Samples()


def workload(config: Config) -> Workload:
    """Return the workload that the config names."""
    return Sleeping(config)


def work(arguments: Sequence[str]) -> int:
    """Entry point of a worker: an ordinary member that also writes the judge's lines."""
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.start import member_worker

    log = StepLog(Path(arguments[0]).parent, os.environ["CAPSLOG_MEMBER"])

    class Logged(PipelineWork):
        _tries: tuple[int, int, int] = 0, 0, 0  # generation, step, number of attempts

        def _attempt(self) -> str:
            return f"{self._tries[0]}-{self._tries[2]}"

        def compute(self, step: int) -> bool:
            generation = self._begun[0]
            again = self._tries[2] + 1 if self._tries[:2] == (generation, step) else 1
            self._tries = generation, step, again
            try:
                return super().compute(step)
            finally:
                minibatch, engine = self.loop.minibatch, self.engine
                if minibatch is not None and engine is not None:
                    samples = [s for k in engine.loaded_microbatches for s in minibatch.recipes[k]]
                    log.tried(step, self._attempt(), samples)

        def apply(self, step: int) -> None:
            super().apply(step)
            log.kept(step, self._attempt())

    return member_worker.main(arguments[:1], member_worker.MemberParts(work=Logged))
