"""Whole pipelines, nothing trimmed: what mCAP launches to profile, one process per stage.

`measure` calls `measure_pipeline` once per launch of the order `mcap`. Every stage computes for real on what the stage
before sends; peaks are read as in the trimmed runs (`trim.observe`).
"""

from __future__ import annotations

import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from varuna_capslog.engine.communicator import Communicator, PeerLost, connect
from varuna_capslog.engine.pipeline import Layout, PipelineEngine, Ready
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiles.runs import StageRun
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.skeleton import skeleton, with_real_layers
from varuna_capslog.profiling.trim import MICROBATCHES, KnownShapes, MeasuredStage, dummy_options, observe
from varuna_capslog.profiling.worker import (
    Processes,
    WorkerFailure,
    Workers,
    belong_to_parent,
    end_with_client,
    report,
    sentence,
)
from varuna_capslog.schedules import from_strings, insert_recompute

__all__ = ["PipelineLaunch", "measure_pipeline"]

_MESSAGE_SECONDS = 600.0
_GRACE_SECONDS = 2.0
"""How long ranks that lost a peer wait for the rank that failed to say why."""


@dataclass(frozen=True)
class PipelineLaunch:
    """One launch: the stages of a whole chain, and what crosses the cuts 0 .. L."""

    stages: tuple[StageRun, ...]
    specs: tuple[Mapping[str, TensorSpec], ...]
    targets: Any
    normalisers: Mapping[str, float]


def measure_pipeline(
    pipeline: PipelineLaunch, devices: Sequence[torch.device], workers: Workers
) -> tuple[list[Observation], float]:
    """Start one process per stage, train, read every stage's peak, end them.

    Args:
        devices: one per stage.

    Returns:
        An observation per stage, and the seconds from the moment when all processes were connected.

    Raises:
        WorkerFailure: a rank failed or died.
    """
    source, conditions = workers.source, workers.conditions
    with Processes(source, workers.preload) as group:
        for rank, device in enumerate(devices):
            arguments = (source, rank, pipeline, conditions, group.port, device, workers.threads)
            group.begin(_work, f"pipeline-{rank}", *arguments)
        _collect(group.pipes)
        began = time.perf_counter()
        found = _collect(group.pipes)
        return found, time.perf_counter() - began


def _collect(pipes: Sequence[Connection]) -> list[Any]:
    """One message of every rank; the first failure that is no mere loss of a peer is the cause."""
    values: dict[int, Any] = {}
    lost: str | None = None
    deadline = None
    while len(values) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(left, remaining)
        for connection in ready:
            rank = pipes.index(connection)
            try:
                kind, value = pipes[rank].recv()
            except (EOFError, OSError):
                raise WorkerFailure(None, f"the process of stage {rank} died") from None
            if kind == "failed":
                raise WorkerFailure(None, f"stage {rank}: {value}")
            values[rank] = value
            if kind == "lost":
                lost = lost or f"stage {rank}: {value}"
                deadline = deadline or time.monotonic() + _GRACE_SECONDS
        if not ready:
            break
    if lost is not None:
        raise WorkerFailure(None, lost)
    return [values[rank] for rank in range(len(pipes))]


def _work(
    pipe: Connection,
    source: Callable[[], Workload],
    rank: int,
    pipeline: PipelineLaunch,
    conditions: RunConditions,
    port: int,
    device: torch.device,
    threads: int,
) -> None:
    belong_to_parent()
    threading.Thread(target=end_with_client, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        workload = source()
        chain = with_real_layers(skeleton(workload), *pipeline.stages[rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        communicator = connect(rank, len(pipeline.stages), "127.0.0.1", port, 0, _MESSAGE_SECONDS)
        pipe.send(("ready", None))
        pipe.send(("done", _observe(chain, workload, rank, pipeline, conditions, communicator, device)))
        multiprocessing.connection.wait([pipe])  # others may still need this rank's connections
    except PeerLost as error:
        report(pipe, "lost", str(error))
    except Exception as error:
        report(pipe, "failed", sentence(error))


def _observe(
    chain: Chain,
    workload: Workload,
    rank: int,
    pipeline: PipelineLaunch,
    conditions: RunConditions,
    communicator: Communicator,
    device: torch.device,
) -> Observation:
    """Train this rank's stage. All stages but the last have two microbatches in flight, as trimmed ones have.

    Varuna's own schedule lets early stages run further ahead; what they then keep waits on the host, but on a CPU would
    count, so that M_i would depend on where in the pipeline a launch puts a layer. The price: a stage's gradient has
    arrived when the next activation comes, so that a CPU holds one fewer of those under way than in a trimmed run.
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
    first, end = pipeline.stages[rank]
    boundaries = (pipeline.specs[first], pipeline.specs[end])
    return observe(engine, measured, minibatch, (first, end), boundaries, conditions)
