"""Bytes of a replica by its degree: planned, by the published predictor, and of the allocator: see README.md."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fold"))

from cases import MICROBATCHES, Case, real_peak, workload_of

from tests.engine.pool import WorkerPool
from varuna_capslog.engine.layout import Layout
from varuna_capslog.memory.fold import fold
from varuna_capslog.planners.replicas import GraphCosts
from varuna_capslog.planners.replicas.capture import DegreePeaks
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import estimate_workload
from varuna_capslog.schedules import RunShape

MODELS = ("decoder, checkpoints", "transformer", "ResNet-18, BatchNorm")
DEGREES = (1, 2, 4, 8)


def layout_of(layers: int, degree: int) -> Layout:
    """Return a layout of all layers on `degree` devices, which take the microbatches in turn."""
    stages = tuple(
        PlanStage(((0, layers),), (rank,), None if degree == 1 else tuple(range(rank, MICROBATCHES, degree)))
        for rank in range(degree)
    )
    return Layout(stages, MICROBATCHES)


def main() -> None:
    """Print the table."""
    pool = WorkerPool()
    print("| model | degree | allocator | planned | fold | printed |\n|---|---|---|---|---|---|")
    try:
        for model in MODELS:
            workload, size = workload_of(model)
            profile = estimate_workload(workload, RunConditions(microbatch_size=size, recompute=False))
            rows = [dataclasses.replace(row, forward_seconds=1.0, backward_seconds=1.0) for row in profile.layers]
            timed = dataclasses.replace(profile, layers=tuple(rows))
            costs = GraphCosts.of_profile(timed, max(DEGREES), MICROBATCHES, peaks=True)
            planned, printed = DegreePeaks(costs), DegreePeaks(costs, printed=True)
            for degree in DEGREES:
                layers = profile.num_layers
                case = Case(model, layout_of(layers, degree), "gpipe", False, None, ())
                measured = max(rank[0] for rank in pool.run(real_peak, degree, case))
                units, run = Units(MICROBATCHES, size, MICROBATCHES), RunShape(MICROBATCHES, "gpipe", False)
                folds = fold(profile, case.layout.stages, units, case.rows(), run, "relay")
                sizes = [planned.of(0, layers, degree, MICROBATCHES), max(rank_fold.peak_bytes for rank_fold in folds)]
                sizes.append(printed.of(0, layers, degree, MICROBATCHES))
                errors = " | ".join(f"{size / measured - 1:+.2%}" for size in sizes)
                print(f"| {model} | {degree} | {measured / 2**20:.2f} MiB | {errors} |", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
