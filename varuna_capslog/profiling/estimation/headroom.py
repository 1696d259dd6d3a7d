"""The bytes that a device needs beyond a stage's predicted peak, stated part by part: `conditions["headroom"]`.

`memory.costs` reads the two numbers that planners use:

    reserved = allocated * fragmentation        what the caching allocator needs of the device
    device   = reserved + fixed_bytes           what the driver counts as used

"parts" lists all parts of both numbers, each with its bytes or factor and its source: read off a device, published,
torch's source, replayed by the allocator's rules, or assumed.

Fragmentation is simulated: blocks of one step's sizes leave gaps that the next step's blocks do not fit. Traces of one
stage at several input sizes are replayed as one long run, and the smallest device on which torch's allocator can run it
is compared with the peak predicted for the largest size. With more memory the allocator reserves more (up to 1.6 times
the peak), but before it fails it returns idle segments. On an H200 seven of eight replayed traces of whole runs were
equal to the real allocator, and one differed by 2 % (docs/gpu.md).

Single layers and pairs, whose traces a profile has, have more gaps than the stages of a plan, so the lowest factor of
the largest runs decides, but at least `LEAST_FACTOR` (`benchmarks/gpu_bytes`). Where a stage is smaller than a segment,
gaps do not grow with the peak, so a segment is added as bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.profiling.estimation.allocator import LARGE_SEGMENT, Event, least_capacity
from varuna_capslog.profiling.estimation.quirks import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER

__all__ = [
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "HOPPER_CONTEXT_BYTES",
    "LEAST_FACTOR",
    "UNSEEN_PART",
    "StepTrace",
    "context_bytes",
    "cublas_bytes",
    "fragmentation",
    "least_bytes",
    "run_of_steps",
    "runs_of_sizes",
    "state_headroom",
]

CONTEXT_BYTES, HOPPER_CONTEXT_BYTES = 512 << 20, 771 << 20
"""Bytes of a CUDA context with the kernels that a training step loads. From Hopper on 771 MiB, read off an H200 (torch
2.11, CUDA 13.0; 527 MiB before the first kernel); for earlier kinds of GPU assumed."""
COMMUNICATOR_BYTES = 544 << 20
"""Bytes of one NCCL communicator of two ranks, as printed for A100s over NVLink (github.com/NVIDIA/nccl/issues/964).
Over PCIe it has fewer channels and takes less; a third rank took 144 MiB more there."""
COMMUNICATORS = 4
"""NCCL communicators of a rank with two neighbours: one per neighbour and direction (`engine.pair_groups`). Over gloo
messages wait on the host."""
UNSEEN_PART = 0.01
"""Fraction of a stage's peak on the CPU, for scratch of kernels that `quirks` leaves out: the lowest estimate of
`benchmarks/truth` was 0.7 % under the real allocator."""

LEAST_FACTOR = 1.05
"""Least factor on a peak for gaps between blocks: ranks of plans needed up to 1.044 times their peak, and a segment."""
_STEPS = 8
_ORDERS = 3
_CUBLAS_THREADS = 2
"""Threads that multiply matrices on one device: the thread that runs forwards, and autograd's thread."""


@dataclass(frozen=True)
class StepTrace:
    """Step of a stage at one input size. peak_bytes: predicted, of live bytes. events: for `allocator.replay`."""

    peak_bytes: int
    events: Sequence[Event]


def run_of_steps(traces: Sequence[Sequence[Event]], order: Sequence[int]) -> list[Event]:
    """Return the events of a run: the lasting allocations (made at the beginning of the first trace, never released),
    then the steps in `order`.

    Other allocations that a step does not release are released at its end. Every trace begins with the same number of
    lasting allocations.
    """
    stays = _staying(traces[order[0]])
    run = [(key, size) for key, (_, size) in enumerate(traces[order[0]][:stays])]
    following = stays
    for number in order:
        live: dict[int, int] = {}
        for key, size in traces[number][stays:]:
            if size:
                live[key] = following
                following += 1
                run.append((live[key], size))
            else:
                run.append((live.pop(key), 0))
        run.extend((key, 0) for key in live.values())
    return run


def _staying(events: Sequence[Event]) -> int:
    """Return the number of allocations at the beginning that are never released."""
    released = {key for key, size in events if not size}
    for number, (key, size) in enumerate(events):
        if not size or key in released:
            return number
    return len(events)


def least_bytes(traces: Sequence[StepTrace], floor: int = 0) -> int:
    """Return the bytes that `runs_of_sizes` need, at least `floor` (up to 1 % too many)."""
    return least_capacity(runs_of_sizes(traces), floor)


def fragmentation(stages: Sequence[Sequence[StepTrace]]) -> float:
    """Return the factor on a peak, in addition to a segment, for the gaps between blocks: the factor of the stage with
    the fewest gaps, at least `LEAST_FACTOR`. stages: each stage's traces at several sizes.
    """
    factor = math.inf
    for traces in stages:
        peak = max(trace.peak_bytes for trace in traces)
        floor = math.ceil(LEAST_FACTOR * peak) + LARGE_SEGMENT
        need = least_bytes(traces, floor)
        if need <= floor:
            return LEAST_FACTOR
        factor = min(factor, (need - LARGE_SEGMENT) / peak)
    return factor


def runs_of_sizes(traces: Sequence[StepTrace]) -> list[list[Event]]:
    """Return the events of runs in which steps of several sizes follow one another.

    One trace: its step twice. Several traces: steps in a few random orders, with the largest size at the beginning, in
    the middle or at the end.
    """
    events = [trace.events for trace in traces]
    largest = max(range(len(traces)), key=lambda number: traces[number].peak_bytes)
    return [run_of_steps(events, order) for order in _orders(len(traces), largest)]


def _orders(count: int, largest: int) -> Iterable[list[int]]:
    if count == 1:
        return [[0, 0]]
    rng = random.Random(0)
    orders = []
    for number in range(_ORDERS):
        order = [rng.randrange(count) for _ in range(_STEPS - 1)]
        order.insert(number * (_STEPS - 1) // (_ORDERS - 1), largest)
        orders.append(order)
    return orders


def context_bytes(gpu: str) -> int:
    """Return the bytes of the context on a kind of GPU (`base.gpus`); "" for no particular kind."""
    return HOPPER_CONTEXT_BYTES if gpu and GPUS[gpu].hopper_or_later else CONTEXT_BYTES


def cublas_bytes(gpu: str) -> int:
    """Return the bytes of cuBLAS that peaks may miss: 0 for a known kind of GPU (`base.gpus`), for "" the difference to
    Hopper's workspaces. From torch's source (ATen/cuda/CublasHandlePool.cpp), with CUBLAS_WORKSPACE_CONFIG not set.
    """
    return 0 if gpu else _CUBLAS_THREADS * (CUBLAS_WORKSPACE_HOPPER - CUBLAS_WORKSPACE)


def state_headroom(
    device: str,
    transport: str,
    stages: Sequence[Sequence[StepTrace]],
    gpu: str = "",
    communicators: int = COMMUNICATORS,
) -> dict[str, Any]:
    """Return the value of `conditions["headroom"]`.

    device: "cpu" or "cuda". transport: of the run, "gloo" or "nccl".
    stages: traces at several input sizes of some stages as large as the stages that decide whether a plan fits.
    gpu: kind of GPU (`base.gpus`); "" for no particular kind. communicators: of a rank, with NCCL.
    """
    if device == "cpu":
        return {
            "fixed_bytes": 0,
            "fragmentation": 1 + UNSEEN_PART,
            "parts": {
                "unseen kernels": {"factor": 1 + UNSEEN_PART, "known": "measured beside the CPU's allocator"},
                "basis": "capacities count the CPU allocator's bytes: no segments, no process beside tensors",
            },
        }
    context, cublas = context_bytes(gpu), cublas_bytes(gpu)
    factor, segment = (round(fragmentation(stages), 4), LARGE_SEGMENT) if stages else (1.0, 0)
    messages = communicators * COMMUNICATOR_BYTES if transport == "nccl" else 0
    replayed = (
        f"replayed by the allocator's rules: {len(stages)} stages, up to {max(map(len, stages), default=0)} sizes"
    )
    read = "read off an H200" if context == HOPPER_CONTEXT_BYTES else "assumed"
    return {
        "fixed_bytes": context + cublas + messages + segment,
        "fragmentation": factor,
        "parts": {
            "context": {"bytes": context, "known": read},
            "cuBLAS beyond the peak": {"bytes": cublas, "known": "torch's source"},
            "NCCL": {
                "bytes": messages,
                "known": f"{communicators} communicators as printed for A100s" if messages else "none",
            },
            "fragmentation": {"factor": factor, "known": replayed},
            "last segment": {"bytes": segment, "known": "torch's source"},
            "workspaces of cuDNN": {"bytes": 0, "known": "in the peak, read off an H200"},
        },
    }
