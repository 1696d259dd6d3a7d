"""Whole pipelines, nothing trimmed: what mCAP launches to profile, one process per stage.

`measure` calls `measure_pipeline` once per launch of the order `mcap`. Every stage computes for real on what the stage
before sends; peaks are read as in the trimmed runs (`trim.observe`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from varuna_capslog.engine.communicator import Communicator, connect
from varuna_capslog.engine.pipeline import Layout, PipelineEngine, Ready
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiles.runs import StageRun
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.skeleton import skeleton, with_real_layers
from varuna_capslog.profiling.trim import MICROBATCHES, KnownShapes, MeasuredStage, TrimmedRun, dummy_options, observe
from varuna_capslog.profiling.worker import Play, Role, WorkerFailure, WorkerGroup, Workers
from varuna_capslog.schedules import from_strings, insert_recompute

__all__ = ["PipelineLaunch", "measure_pipeline"]

_MESSAGE_SECONDS = 600.0


@dataclass(frozen=True)
class PipelineLaunch:
    """One launch: the stages of a whole chain, and what crosses the cuts 0 .. L."""

    stages: tuple[StageRun, ...]
    specs: tuple[Mapping[str, TensorSpec], ...]
    targets: Any
    normalisers: Mapping[str, float]


class _Ranks(WorkerGroup):
    """The workers of one launch, a rank each; a failure names the rank's stage."""

    def failure(self, worker: int, reason: str | None) -> WorkerFailure:
        told = f"the process of stage {worker} died" if reason is None else f"stage {worker}: {reason}"
        return WorkerFailure(None, told)


def measure_pipeline(pipeline: PipelineLaunch, workers: Workers) -> tuple[list[Observation], float]:
    """Start one process per stage, train, read every stage's peak, end them.

    Returns:
        An observation per stage, and the seconds from the moment when all processes were connected.

    Raises:
        WorkerFailure: a rank failed or died.
    """
    rows: dict[int, Observation] = {}
    workers = dataclasses.replace(workers, roles=functools.partial(_roles, pipeline))
    with _Ranks(workers, len(pipeline.stages)) as group:
        group.wait_until_ready()
        began = time.perf_counter()
        for rank, (first, end) in enumerate(pipeline.stages):
            run = TrimmedRun(first, end, len(pipeline.specs) - 1, pipeline.specs[first : end + 1])
            group.start(rank, (run, 0))
        while len(rows) < len(pipeline.stages):
            rows |= {rank: row for rank, _, row in group.finished()}
        return [rows[rank] for rank in range(len(rows))], time.perf_counter() - began


def _roles(
    pipeline: PipelineLaunch, source: Callable[[], Workload], rank: int, port: int, device: torch.device
) -> tuple[Role, list[Role]]:
    """One stage; its neighbours are workers too."""
    workload = source()
    chain = with_real_layers(skeleton(workload), *pipeline.stages[rank])

    def stage() -> Play:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        communicator = connect(rank, len(pipeline.stages), "127.0.0.1", port, 0, _MESSAGE_SECONDS)
        return lambda run, conditions: _observe(chain, workload, run, pipeline, conditions, communicator, device)

    return stage, []


def _observe(
    chain: Chain,
    workload: Workload,
    run: TrimmedRun,
    pipeline: PipelineLaunch,
    conditions: RunConditions,
    communicator: Communicator,
    device: torch.device,
) -> Observation:
    """Train the run's layers as this rank's stage.

    All stages but the last have two microbatches in flight, as trimmed ones have. Varuna's own schedule lets early
    stages run further ahead; what they then keep waits on the host, but on a CPU would count, so that M_i would depend
    on where in the pipeline a launch puts a layer. The price: a stage's gradient has arrived when the next activation
    comes, so that a CPU holds one fewer of those under way than in a trimmed run.
    """
    last = len(pipeline.stages) - 1
    ahead = ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")
    in_turn = ("F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3")
    schedule = from_strings([[f"{s}{text}" for text in (ahead if s < last else in_turn)] for s in range(last + 1)])
    if conditions.recompute:
        schedule = insert_recompute(schedule)
    layout = Layout(tuple(first for first, _ in pipeline.stages), tuple(range(last + 1)))
    options, ready, measured = dummy_options(conditions, schedule), Ready(KnownShapes(pipeline.specs)), MeasuredStage()
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, device, ready, measured)
    inputs = dict(pipeline.specs[0])
    minibatch = Minibatch([inputs] * MICROBATCHES, [pipeline.targets] * MICROBATCHES, dict(pipeline.normalisers))
    boundaries = (run.specs[0], run.specs[-1])
    return observe(engine, measured, minibatch, (run.first, run.end), boundaries, conditions)
