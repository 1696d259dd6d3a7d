"""Random plans in which parts of layers run again: bits against one rank that keeps all, folds against rehearsals.

A model of six blocks is cut into uneven chunks that go round two or three ranks (schedule interleaved). Ranges of
layers run again as a whole, in some of attention, feed-forward and norms, or not at all. Prints the numbers of
README.md; exit status 1 where a bit differs or a fold is more than 0.1 % from its rehearsal.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.compare import differences
from tests.engine.layouts import round_layout
from tests.engine.pool import WorkerPool
from tests.engine.test_parts import ALL, WIDTH, Block, Large, Own, steps_of
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.memory.fold import fold
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units, recomputed_parts, scheduled
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import Memo, StageEstimator, estimated_profile
from varuna_capslog.profiling.rehearsal import rehearse_layout
from varuna_capslog.schedules import RunShape

LAYERS, MICROBATCHES, TOKENS = 6, 6, 128
KINDS = ("keep", "recompute", "parts", "parts")


class Six(Large):
    name = "six"

    def build_chain(self) -> Chain:
        return copy.deepcopy(chain())


@functools.cache
def chain() -> Chain:
    """Return the captured chain of six blocks with dropout."""
    torch.manual_seed(0)
    model = Own()
    model.blocks = nn.ModuleList(Block(fused=number == 0) for number in range(LAYERS))
    return Chain.from_module(model, None, {"x": torch.zeros(2, TOKENS, WIDTH)}, evaluates=False)


def drawn_memory(draw: random.Random, stage: PlanStage) -> tuple[MemoryInterval, ...]:
    """Draw what the ranges of a stage's layers keep."""
    ((first, end),), intervals = stage.layers, []
    while first < end:
        last, kind = draw.randint(first + 1, end), draw.choice(KINDS)
        if kind != "keep":
            parts = tuple(name for name in ALL if draw.random() < 0.6) if kind == "parts" else ()
            intervals.append(MemoryInterval(first, last, "recompute", parts))
        first = last
    return tuple(intervals)


def drawn(seed: int, ranks: int) -> Layout:
    """Draw the plan of this number."""
    draw, layout = random.Random(seed), round_layout(seed, LAYERS, 1, ranks)
    stages = [dataclasses.replace(stage, memory=drawn_memory(draw, stage)) for stage in layout.stages]
    return dataclasses.replace(layout, stages=tuple(stages))


def trained(communicator: Communicator, layout: Layout, schedule: str) -> dict[str, Any]:
    """Make two steps of a layout on this rank."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    rows: list[dict[str, Tensor]] = [{"x": torch.randn(2, TOKENS, WIDTH, generator=draw)} for _ in range(MICROBATCHES)]
    return steps_of(communicator, copy.deepcopy(chain()), layout, rows, {"schedule": schedule})


def fold_errors(layout: Layout, memo: Memo) -> list[float]:
    """Return, for each rank, how far the fold's peak is above the rehearsal's, as a part of it."""
    told = tuple(part for stage in layout.stages for part in recomputed_parts(stage))
    run = RunShape(MICROBATCHES, "interleaved", False)
    again = any(stage.recomputes(run) for stage in layout.stages)
    estimator = StageEstimator(Six(), RunConditions(microbatch_size=2, recompute=again, parts=told), memo=memo)
    rehearsed = rehearse_layout(estimator, layout, EngineOptions(MICROBATCHES, "interleaved", recompute=False))
    rows = scheduled("interleaved", layout.stages, layout.graph(MICROBATCHES, estimator.chain.edges), run)
    folded = fold(estimated_profile(estimator), layout.stages, Units(MICROBATCHES, 2, 1), rows, run)
    return [rank.peak_bytes / real.peak_bytes - 1 for rank, real in zip(folded, rehearsed, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3, help="most ranks of a plan")
    arguments = parser.parse_args()
    pool, memo, errors, differ, parted = WorkerPool(), Memo(), list[float](), 0, 0
    try:
        kept = Layout((PlanStage(((0, LAYERS),), (0,), memory=()),))
        expected = pool.run(trained, 1, kept, "1f1b")[0]
        for number in range(arguments.plans):
            layout = drawn(number, arguments.ranks)
            parted += any(interval.parts for stage in layout.stages for interval in stage.memory or ())
            if wrong := differences(pool.run(trained, layout.world_size, layout, "interleaved"), expected):
                differ += 1
                print(f"plan {number} ({layout}) differs in {wrong[:5]}", flush=True)
            errors += fold_errors(layout, memo)
            if number % 25 == 24:
                print(f"{number + 1} of {arguments.plans}", file=sys.stderr, flush=True)
    finally:
        pool.close()
    print(f"{arguments.plans} plans, {parted} with parts of layers: {differ} differ")
    print(f"{len(errors)} ranks, folds against rehearsals: {min(errors):+.3%} to {max(errors):+.3%}")
    raise SystemExit(differ > 0 or max(map(abs, errors)) > 1e-3)


if __name__ == "__main__":
    main()
