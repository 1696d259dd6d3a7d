"""What a device must have beyond a stage's predicted peak, stated part by part: `conditions["headroom"]`.

`estimate` asks for it when its stages are known; `memory.headroom` reads the two numbers that planners use, `reserved =
allocated * fragmentation + fixed_bytes`. What was simulated and what is assumed stands beside them under "parts".

Fragmentation is simulated: sizes change from step to step, and the caching allocator keeps segments that suit none of
the later ones. Traces of one stage at several input sizes are replayed as one long run, and what is reserved at its
end is compared with the peak predicted for the largest size: by the allocator's default rules, which planners count,
and by those of expandable segments. The workspaces of cuDNN's convolutions are in no number: which of its algorithms
runs is not known without the device. docs/gpu.md says what is known of each part, and from where.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.profiling.estimation.allocator import Event, replay
from varuna_capslog.profiling.estimation.quirks import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER

__all__ = [
    "CONTEXT_BYTES",
    "NCCL_BYTES",
    "UNSEEN_PART",
    "StepTrace",
    "cublas_bytes",
    "fragmentation",
    "run_of_steps",
    "state_headroom",
]

CONTEXT_BYTES = 512 << 20
"""Of a CUDA context with torch's kernels: assumed, nothing here has measured it; drivers and torch versions differ."""
NCCL_BYTES = 256 << 20
"""Of NCCL's buffers for two neighbours, a communicator per direction: assumed. Over gloo messages wait on the host."""
UNSEEN_PART = 0.01
"""Of a stage's peak on the CPU, for scratch of kernels that the table of quirks leaves out: the lowest estimate of
`benchmarks/truth` was 0.7 % under the real allocator."""

_STEPS = 8
_ORDERS = 3
_CUBLAS_LT_WORKSPACE = 1 << 20
_CUBLAS_THREADS = 2
"""That multiply matrices on one device: the one that runs forwards, and autograd's own."""


@dataclass(frozen=True)
class StepTrace:
    """One step of a stage at one input size.

    Attributes:
        peak_bytes: predicted, the most that is live at once.
        events: what is there before the step first, then the step; see `allocator.replay`.
    """

    peak_bytes: int
    events: Sequence[Event]


def run_of_steps(traces: Sequence[Sequence[Event]], order: Sequence[int]) -> list[Event]:
    """One run: what stays (allocated before all else in the first trace and never released), then steps by number.

    What a step leaves behind beyond that is released at its end. Every trace begins with the same number of
    allocations that stay.
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
    """How many allocations at the very beginning are never released."""
    released = {key for key, size in events if not size}
    for number, (key, size) in enumerate(events):
        if not size or key in released:
            return number
    return len(events)


def fragmentation(traces: Sequence[StepTrace], expandable: bool = False, seed: int = 0) -> float:
    """The worst ratio of reserved bytes after several steps to the largest predicted peak; at least 1.

    One trace: its step twice over. Several: steps in a few random orders, the largest size once in each, at the
    beginning, in the middle or at the end.

    Args:
        expandable: with the allocator's expandable segments, which a run may choose by PYTORCH_ALLOC_CONF.
    """
    events = [trace.events for trace in traces]
    largest = max(range(len(traces)), key=lambda number: traces[number].peak_bytes)
    peak = traces[largest].peak_bytes
    orders = _orders(len(traces), largest, seed)
    worst = max(replay(run_of_steps(events, order), expandable).reserved_bytes for order in orders)
    return max(1.0, worst / peak) if peak else 1.0


def _orders(count: int, largest: int, seed: int) -> Iterable[list[int]]:
    if count == 1:
        return [[0, 0]]
    rng = random.Random(seed)
    orders = []
    for number in range(_ORDERS):
        order = [rng.randrange(count) for _ in range(_STEPS - 1)]
        order.insert(number * (_STEPS - 1) // (_ORDERS - 1), largest)
        orders.append(order)
    return orders


def cublas_bytes(gpu: str) -> int:
    """What cuBLAS may take beyond what peaks count: the workspaces of cuBLASLt, and on a GPU whose kind is not named
    what the workspaces of Hopper are larger.

    By torch's source (ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp), with CUBLAS_WORKSPACE_CONFIG and
    CUBLASLT_WORKSPACE_SIZE not set.

    Args:
        gpu: its kind (`base.gpus`); "" for none in particular.
    """
    larger = 0 if gpu else CUBLAS_WORKSPACE_HOPPER - CUBLAS_WORKSPACE
    return _CUBLAS_THREADS * (_CUBLAS_LT_WORKSPACE + larger)


def state_headroom(device: str, transport: str, stages: Sequence[Sequence[StepTrace]], gpu: str = "") -> dict[str, Any]:
    """The value of `conditions["headroom"]`.

    Args:
        device: "cpu" or "cuda".
        transport: of the run, "gloo" or "nccl".
        stages: of some stages of the size of those that decide whether a plan fits, traces at several input sizes.
        gpu: its kind (`base.gpus`); "" for none in particular.
    """
    if device == "cpu":
        return {
            "fixed_bytes": 0,
            "fragmentation": 1 + UNSEEN_PART,
            "parts": {
                "basis": "capacities count the CPU allocator's bytes: no segments, no process beside tensors",
                "unseen_kernel_bytes": UNSEEN_PART,
                "measured": ["unseen_kernel_bytes"],
            },
        }
    communication = NCCL_BYTES if transport == "nccl" else 0
    cublas = cublas_bytes(gpu)
    ratio, expandable = (max((fragmentation(one, rules) for one in stages), default=1.0) for rules in (False, True))
    return {
        "fixed_bytes": CONTEXT_BYTES + cublas + communication,
        "fragmentation": round(ratio, 4),
        "parts": {
            "context_bytes": CONTEXT_BYTES,
            "cublas_bytes": cublas,
            "communication_bytes": communication,
            "fragmentation_expandable": round(expandable, 4),
            "assumed": ["context_bytes", "communication_bytes"],
            "from_source": ["cublas_bytes"],
            "simulated": ["fragmentation", "fragmentation_expandable"],
            "unknown": ["cudnn_workspace_bytes"],
            "simulated_stages": len(stages),
            "simulated_sizes": max((len(traces) for traces in stages), default=0),
        },
    }
