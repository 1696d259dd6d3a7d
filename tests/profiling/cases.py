"""Functions that the pool's workers run for the tests of trimmed stages."""

from __future__ import annotations

import gc
from typing import Any

import torch

from tests.profiling.workloads import Watching
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.trim import MEASURED_RANK, TrimmedRun, measure_run, run_neighbours, skeleton

CPU = torch.device("cpu")


def trim_all(
    communicator: Communicator,
    workload: Workload,
    runs: list[tuple[int, int]],
    size: int,
    recompute: bool = True,
    halves: bool = False,
) -> tuple[list[Observation], int]:
    """Measure trimmed runs in turn, and the most parameter bytes that were real at a time (`Watching` layers)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    gc.freeze()  # `Watching` then inspects only objects made from here on, not half a million objects of modules
    chain = skeleton(workload)
    inputs = workload.profile_inputs(size)
    specs = ShapeTable(chain).boundaries(inputs)
    conditions = RunConditions(
        "cpu",
        size,
        {name: list(spec.shape) for name, spec in inputs.items()},
        recompute=recompute,
        halves=halves,
    )
    targets, normalisers = workload.profile_targets(size)
    Watching.seen = 0
    observations = []
    for first, end in runs:
        run = TrimmedRun(first, end, len(chain), tuple(specs[first : end + 1]), targets, normalisers)
        if communicator.rank == MEASURED_RANK:
            observations.append(measure_run(chain, run, conditions, workload.loss, communicator, CPU))
        else:
            run_neighbours(chain, run, conditions, communicator)
    gc.unfreeze()
    return observations, Watching.seen


def real_peak(
    communicator: Communicator, workload: Workload, cuts: tuple[int, ...] | Layout, size: int, microbatches: int
) -> tuple[int, dict[str, Any]]:
    """Return this rank's peak in the second step of an ordinary training run, one stage per rank or as in a layout."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    chain = workload.build_chain()
    layout = cuts if isinstance(cuts, Layout) else Layout.pipelines(cuts, len(chain))
    engine = PipelineEngine(chain, workload.loss, layout, EngineOptions(microbatches, clip_norm=1.0), communicator, CPU)
    inputs = workload.profile_inputs(size)
    targets, normalisers = workload.profile_targets(size)
    minibatch = Minibatch([inputs] * microbatches, [targets] * microbatches, normalisers)

    def load(_: int) -> dict[str, torch.Tensor]:
        return {name: torch.ones(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()}

    train_step(engine, 1, minibatch, load)
    with PeakProbe(CPU, resident_tensors(engine.layers, engine.optimizer)) as probe:
        train_step(engine, 2, minibatch, load)
    return probe.peak_bytes, {"source": probe.peak_source}
