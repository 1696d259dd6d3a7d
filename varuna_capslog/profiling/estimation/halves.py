"""The two halves of a stage's backward on fake tensors: the bytes of each, and those held between them.

`estimate` calls `run_halves` where the run that a profile is for splits its backwards. The program is that of
`profiling.trim`; storages are followed as in `hollow`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.engine.stage import LossFunction, MicrobatchContext, Stage
from varuna_capslog.model.chain import Chain
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimation.hollow import StepMeter, trimmed_step
from varuna_capslog.profiling.estimation.lifetimes import Recipes
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.estimation.rates import Speed
from varuna_capslog.profiling.trim import TrimmedPipeline, TrimmedRun
from varuna_capslog.profiling.weighing import HalfWeights, Halves, Left, Window

__all__ = ["run_halves"]


def run_halves(
    mode: FakeTensorMode,
    chain: Chain,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes,
) -> Halves:
    """Run one step of a trimmed stage that splits its backwards, without recomputation; arguments and errors are those
    of `hollow.run_hollow`.

    The seconds of each half are those of its own operators by `rates`.
    """
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch():
        pipeline, meter = TrimmedPipeline.of(chain, run, conditions, True, halves=True), _HalvesMeter(speed)
        trimmed_step(pipeline, run, conditions, loss, quirks, recipes, meter)
        return meter.weights.result(*(speed.seconds(meter.work[half]) for half in "IW"))


class _HalvesMeter(StepMeter):
    """Measures the bytes of both halves of every backward, and the work of the first microbatch's halves."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.work: dict[str, Work] = {"I": {}, "W": {}}
        self.weights = HalfWeights()

    def working(self, kind: str, stage: Stage, context: MicrobatchContext) -> AbstractContextManager[None]:
        return self._weighing(kind, stage, context)

    @contextlib.contextmanager
    def _weighing(self, kind: str, stage: Stage, context: MicrobatchContext) -> Iterator[None]:
        followed = self._followed

        before = followed.lately_bytes = followed.live_bytes
        if kind in self.work and context.index == 0:
            followed.observer = functools.partial(self._speed.count, self.work[kind])
        try:
            with super().working(kind, stage, context):
                yield
        finally:
            followed.observer = None
        window = Window(before, followed.lately_bytes, followed.live_bytes)
        self.weights.add(kind, stage, context, window, Left.of(kind, stage, context))
        followed.lately_bytes = followed.live_bytes
