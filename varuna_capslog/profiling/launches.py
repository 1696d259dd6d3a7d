"""The three orders in which a profile's real runs are launched, and the time of each launch.

`packed` (ours): all 2L-1 stage runs in one launch, spread over the available workers. `capslog`: the CAPSlog paper's
trimmed partitionings (Sec. III-A); each is a launch of new processes, whose measured GPUs run in parallel. `mcap`:
whole pipelines, one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.machine_memory import available_bytes
from varuna_capslog.base.units import format_bytes
from varuna_capslog.engine.communicator import Communicator, connect
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import VALUE_ERRORS, NeedsValues, ReadNumbers
from varuna_capslog.model.layer import low_bytes
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import autocast_context, call_on, fake_operands
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiles.runs import StageRun, capslog_partitionings, mcap_partitionings
from varuna_capslog.profiling.conditions import Progress, RunConditions
from varuna_capslog.profiling.trim import (
    MICROBATCHES,
    KnownShapes,
    MeasuredStage,
    TrimmedRun,
    dummy_options,
    observe,
    skeleton,
    with_real_layers,
)
from varuna_capslog.profiling.worker import Play, Role, Task, WorkerFailure, WorkerGroup, Workers
from varuna_capslog.schedules import from_strings, insert_recompute

__all__ = [
    "BoundTable",
    "LaunchTimes",
    "Ranks",
    "devices_of",
    "failures_named",
    "free_bytes",
    "in_capslog_order",
    "in_mcap_order",
    "in_one_launch",
]


_MESSAGE_SECONDS = 600.0

RunKey = tuple[int, int, str | None]
"""See `TrimmedRun.key`."""


@dataclass
class LaunchTimes:
    """Times of stage runs: (worker, from, to) in seconds, a list per launch. began: start of the whole profile."""

    began: float = field(default_factory=time.perf_counter)
    launches: list[list[tuple[int, float, float]]] = field(default_factory=list)

    def report(self, order: str, workers: int) -> dict[str, Any]:
        """Return the profile's condition "profiling": the paper's |P| is `launches`, its Mean, Total, E2E the seconds.

        A round is one stage run on each worker: a launch in the orders of the papers, a part of it in the packed order.
        """
        total = sum(max(end for _, _, end in runs) - min(begin for _, begin, _ in runs) for runs in self.launches)
        rounds = sum(max(Counter(worker for worker, _, _ in runs).values()) for runs in self.launches)
        return {
            "order": order,
            "workers": workers,
            "launches": len(self.launches),
            "stage_runs": sum(len(runs) for runs in self.launches),
            "rounds": rounds,
            "mean_seconds": round(total / rounds, 4),
            "total_seconds": round(total, 3),
            "end_to_end_seconds": round(time.perf_counter() - self.began, 3),
        }


def devices_of(kind: str, workers: int) -> list[torch.device]:
    """Return the device of each worker: the CPU, or the accelerators in turn."""
    return list(itertools.islice(itertools.cycle(accelerator.all_devices(kind)), workers))


@contextlib.contextmanager
def failures_named(names: Sequence[str]) -> Iterator[None]:
    """Turn a `WorkerFailure` of the enclosed runs into an error that names the run's layers."""
    try:
        yield
    except WorkerFailure as error:
        where = "a profiling worker"
        if error.run is not None:
            where = f"the run of {_name((error.run.first, error.run.end), names)}"
            where += "" if error.run.key[2] is None else f" as {error.run.key[2]}"
        raise CapslogError(f"{where} failed: {error}; nothing was kept of this profile") from error


def in_one_launch(
    tasks: Sequence[Task], group: WorkerGroup, workers: Workers, clock: LaunchTimes, progress: Progress
) -> dict[RunKey, Observation]:
    """Carry out trimmed runs on the available workers, as many at once as fit into the memory free at the start.

    Raises:
        DoesNotFit: a run needs more memory than is free; no run is started then.
        WorkerFailure: a run failed.
    """
    devices, names = workers.devices, workers.names
    free = {device: workers.free_bytes(device) for device in set(devices)}
    too_big = [task for task in tasks if task[1] > max(free.values())]
    if too_big:
        raise DoesNotFit(_refusal(too_big, max(free.values()), names))
    progress(0, len(tasks), "starting")
    waiting = list(tasks)
    rows: dict[RunKey, Observation] = {}
    begun: dict[int, float] = {}
    intervals: list[tuple[int, float, float]] = []
    while len(rows) < len(tasks):
        for worker in list(group.idle):
            task = next((task for task in waiting if task[1] <= free[devices[worker]]), None)
            if task is not None:
                waiting.remove(task)
                free[devices[worker]] -= task[1]
                begun[worker] = time.perf_counter()
                group.start(worker, task)
        for worker, (run, bound), result in group.finished():
            intervals.append((worker, begun[worker], time.perf_counter()))
            free[devices[worker]] += bound
            rows[run.key] = result
            progress(len(rows), len(tasks), _name((run.first, run.end), names))
    clock.launches.append(intervals)
    return rows


def in_capslog_order(
    tasks: Sequence[Task], workers: Workers, clock: LaunchTimes, progress: Progress
) -> dict[RunKey, Observation]:
    """Carry out trimmed runs in the launches of CAPSlog, Sec. III-A, each with new processes.

    A GPU whose layers are trimmed away needs no process here. Each measured GPU gets dummies from its own companion,
    even if its neighbour is measured too: bytes and seconds do not depend on where a tensor comes from.

    Raises as `in_one_launch`, and CapslogError for fewer than 3 workers when the layers outnumber them.
    """
    by_run = {(run.first, run.end): (run, bound) for run, bound in tasks}
    partitionings = capslog_partitionings(len(workers.names), len(workers.devices))
    rows: dict[RunKey, Observation] = {}
    progress(0, len(partitionings), "starting")
    for number, partitioning in enumerate(partitionings, start=1):
        with workers.group(len(partitioning.measured)) as group:
            group.wait_until_ready()  # else an early worker would take two runs, which then do not run in parallel
            mine = [by_run[run] for run in partitioning.runs]
            rows |= in_one_launch(mine, group, workers, clock, lambda *_: None)
        progress(number, len(partitionings), f"pipeline {list(partitioning.layers_per_gpu)}")
    return rows


def in_mcap_order(
    specs: Sequence[Mapping[str, TensorSpec]],
    goal: tuple[Any, Mapping[str, float]],
    bound_bytes: Callable[[int, int], int],
    workers: Workers,
    clock: LaunchTimes,
    progress: Progress,
) -> dict[StageRun, Observation]:
    """Carry out mCAP's launches of whole pipelines; if several launches measure a range, the first of them counts.

    goal: targets and normalisers of the loss. bound_bytes: (first, end) -> upper bound on a stage's bytes.

    Raises:
        DoesNotFit: a whole pipeline needs more memory than is free, as the paper's dilated models did.
        WorkerFailure: a rank failed.
        CapslogError: fewer than 3 workers when the layers outnumber them.
    """
    partitionings = mcap_partitionings(len(workers.names), len(workers.devices))
    first_rows: dict[StageRun, Observation] = {}
    progress(0, len(partitionings), "starting")
    for number, partitioning in enumerate(partitionings, start=1):
        stages = partitioning.stages
        _refuse_what_does_not_fit(stages, workers, bound_bytes)
        pipeline = _Pipeline(tuple(stages), tuple(specs), *goal)
        begun = time.perf_counter()
        rows, seconds = _measure_pipeline(pipeline, workers)
        ended = time.perf_counter()
        clock.launches.append([(rank, max(begun, ended - seconds), ended) for rank in range(len(stages))])
        for gpu in partitioning.measured:
            first_rows.setdefault(rows[gpu].layers, rows[gpu])
        progress(number, len(partitionings), f"pipeline {list(partitioning.layers_per_gpu)}")
    return first_rows


def _refuse_what_does_not_fit(
    stages: Sequence[StageRun], workers: Workers, bound_bytes: Callable[[int, int], int]
) -> None:
    needed: Counter[torch.device] = Counter()
    for stage, device in zip(stages, workers.devices, strict=False):
        needed[device] += bound_bytes(*stage)
    for device, most in needed.items():
        free = workers.free_bytes(device)
        if most > free:
            raise DoesNotFit(
                f"mCAP's launch of the whole pipeline {[end - first for first, end in stages]} may need up to "
                f"{format_bytes(most)} on {device}, where {format_bytes(free)} are free; profile.order=capslog or "
                "packed keeps one or two layers at a time"
            )


def _refusal(too_big: Sequence[Task], free: int, names: Sequence[str]) -> str:
    shown = ", ".join(
        f"{_name((run.first, run.end), names)} (up to {format_bytes(bound)})" for run, bound in too_big[:3]
    )
    more = f" and {len(too_big) - 3} more" if len(too_big) > 3 else ""
    return (
        f"these stages may not fit into the {format_bytes(free)} that are free, and none was tried: {shown}{more}; "
        "free memory, cut the model finer, or lower train.microbatch_size or profile.image_size"
    )


def _name(run: StageRun, names: Sequence[str]) -> str:
    return " + ".join(names[run[0] : run[1]])


# -- a whole pipeline, as mCAP launches it


@dataclass(frozen=True)
class _Pipeline:
    """Launch without trimming: the stages of a whole chain, and the tensors across the cuts 0 .. L. Every stage
    computes on the real outputs of the stage before; peaks are read as in trimmed runs (`trim.observe`).
    """

    stages: tuple[StageRun, ...]
    specs: tuple[Mapping[str, TensorSpec], ...]
    targets: Any
    normalisers: Mapping[str, float]


class Ranks(WorkerGroup):
    """Workers of one launch, each of which is a rank; a failure names the rank's stage."""

    def failure(self, worker: int, reason: str | None) -> WorkerFailure:
        sentence = f"the process of stage {worker} died" if reason is None else f"stage {worker}: {reason}"
        return WorkerFailure(None, sentence)


def _measure_pipeline(pipeline: _Pipeline, workers: Workers) -> tuple[list[Observation], float]:
    """Start one process per stage, train, read every stage's peak, and end the processes. Returns an observation per
    stage, and the seconds since all processes were connected. Raises WorkerFailure where a rank failed or died.
    """
    rows: dict[int, Observation] = {}
    workers = dataclasses.replace(workers, roles=functools.partial(_roles, pipeline))
    with Ranks(workers, len(pipeline.stages)) as group:
        group.wait_until_ready()
        began = time.perf_counter()
        for rank, (first, end) in enumerate(pipeline.stages):
            run = TrimmedRun(first, end, len(pipeline.specs) - 1, pipeline.specs[first : end + 1])
            group.start(rank, (run, 0))
        while len(rows) < len(pipeline.stages):
            rows |= {rank: row for rank, _, row in group.finished()}
        return [rows[rank] for rank in range(len(rows))], time.perf_counter() - began


def _roles(
    pipeline: _Pipeline, source: Callable[[], Workload], rank: int, port: int, device: torch.device
) -> tuple[Role, list[Role]]:
    """Return the role of one stage, without neighbour processes: its neighbours are workers too."""
    workload = source()
    chain = with_real_layers(skeleton(workload), range(*pipeline.stages[rank]))

    def stage() -> Play:
        accelerator.select(device)
        communicator = connect(rank, len(pipeline.stages), "127.0.0.1", port, 0, _MESSAGE_SECONDS)
        return lambda run, conditions: _observe(chain, workload, run, pipeline, conditions, communicator, device)

    return stage, []


def _observe(
    chain: Chain,
    workload: Workload,
    run: TrimmedRun,
    pipeline: _Pipeline,
    conditions: RunConditions,
    communicator: Communicator,
    device: torch.device,
) -> Observation:
    """Train the run's layers as this rank's stage.

    All stages but the last have two microbatches in flight, as in trimmed runs. In Varuna's own schedule, early stages
    have more. Their inputs wait on the host, and would count on a CPU: M_i would depend on where in the pipeline a
    launch puts a layer. The price: a stage's gradient arrives before the next activation, so a CPU holds one message
    less in transit than in a trimmed run.
    """
    last = len(pipeline.stages) - 1
    ahead = ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")
    in_turn = ("F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3")
    schedule = from_strings([[f"{s}{text}" for text in (ahead if s < last else in_turn)] for s in range(last + 1)])
    if conditions.recompute:
        schedule = insert_recompute(schedule)
    layout = Layout.pipelines([first for first, _ in pipeline.stages], len(chain))
    options, ready, measured = dummy_options(conditions, schedule), Ready(KnownShapes(pipeline.specs)), MeasuredStage()
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, device, ready, measured)
    inputs = dict(pipeline.specs[0])
    minibatch = Minibatch([inputs] * MICROBATCHES, [pipeline.targets] * MICROBATCHES, dict(pipeline.normalisers))
    return observe(engine, measured, minibatch, run, conditions)


# -- Upper bounds on the memory of profiling runs, and the free memory, so that not too many runs start at once.
#
# Bounds come from fake tensors, before any run starts. They are generous: a run that needs less than its bound costs
# only waiting, but a run that needs more could exhaust the machine's memory.


_CONTEXT_BYTES = 1 << 30
_BOUNDARY_COPIES = 4
"""Copies of both boundaries in the measured stage: in use, kept to recompute, posted or in transit, gradients."""
_LARGEST_COPIES = 3
"""Copies of the largest parameter: a gradient not yet added, a copy in a kernel's layout, scratch of the update."""
_NEIGHBOUR_COPIES = 6
"""Copies of both boundaries in the host memory of the process that stands in for the neighbours."""


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device now: by its driver, or, for the CPU, by the operating system."""
    return available_bytes() if device.type == "cpu" else accelerator.memory_info(device)[0]


class BoundTable:
    """Upper bounds on the bytes of trimmed runs, from one fake forward per distinct layer.

    For each layer the bound sums twice its trainable parameters (value and gradient; on an accelerator once more, for
    an update of all parameters together), their 16-bit copies and optimizer state, 3 times the largest parameter,
    frozen parameters and buffers, and twice the bytes that its forward saves (the backward also holds gradients of at
    most that size). The loss is not counted.

    Args:
        chain: from `skeleton`.
        specs: of the tensors across the cuts 0 .. L.
        blocks: accumulation blocks; from two on a second sum of gradients counts.
        weights: the dtype of the parameters in training; layers are traced with float32 parameters.
    """

    def __init__(
        self,
        chain: Chain,
        specs: Sequence[Mapping[str, TensorSpec]],
        device_type: str,
        precision: str,
        blocks: int = 1,
        recipe: Recipe | None = None,
        weights: str = "float32",
    ) -> None:
        self._weights = weights
        self._chain, self._specs, self._device_type = chain, specs, device_type
        self._precision, self._blocks, self._recipe = precision, blocks, recipe or Recipe()
        self._traced: dict[object, int] = {}

    def bound_bytes(self, first: int, end: int, chain: Chain | None = None) -> int:
        """Return an upper bound on the bytes of the run of layers [first, end) on its device, on the CPU with the bytes
        of its neighbours. `chain`: another chain, whose layers pass on the same tensors.
        """
        layers = (chain or self._chain).layers
        on_cpu = self._device_type == "cpu"
        crossing = sum(spec.num_bytes for cut in (self._specs[first], self._specs[end]) for spec in cut.values())
        total = crossing * (_BOUNDARY_COPIES + (_NEIGHBOUR_COPIES if on_cpu else 0))
        total += 0 if on_cpu else _CONTEXT_BYTES
        for index in range(first, end):
            total += self._static(layers[index]) + 2 * self._saved(layers[index], self._specs[index])
        return total

    def _static(self, layer: Layer) -> int:
        copies = 2 + (self._blocks > 1) + (self._device_type != "cpu")
        total = sum(buffer.nbytes for buffer in layer.module.buffers()) + low_bytes(layer.module, self._weights)[0]
        largest = 0
        for parameter in layer.module.parameters():
            size = parameter.numel() * parameter.itemsize
            total += size * copies + sum(self._recipe.kept(parameter).values()) if parameter.requires_grad else size
            largest = max(largest, size)
        return total + _LARGEST_COPIES * largest

    def _saved(self, layer: Layer, cut: Mapping[str, TensorSpec]) -> int:
        read = tuple(cut[name] for name in layer.reads)
        key = (layer_signature(layer), read)
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(layer, read)
            except VALUE_ERRORS as error:
                raise NeedsValues(f"layer {layer.name!r}", error) from error
        return self._traced[key]

    def _trace(self, layer: Layer, read: Sequence[TensorSpec]) -> int:
        """Return the bytes that a forward saves, its inputs and outputs included."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            state, arguments = fake_operands(layer, read, "cpu")
            saved: list[Tensor] = list(arguments)

            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor)
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                autocast_context("cpu", self._precision),
                ReadNumbers(),
            ):
                saved.extend(call_on(layer, state, arguments))
            state_storages = {tensor.untyped_storage()._cdata for tensor in state.values()}
            sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
            return sum(size for key, size in sizes.items() if key not in state_storages)
