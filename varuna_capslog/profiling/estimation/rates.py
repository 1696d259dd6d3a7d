"""Seconds without a device: rates of data sheets, corrected by a factor for each class of operators.

The seconds of an operator are a sum over the classes of its work (`operators`), not a maximum: measured kernels overlap
arithmetic and memory less than they could. Factors belong to a class, an architecture and a dtype, never to a model.
They were fitted by `benchmarks/gpu_seconds` to published steps and layers (timm on an RTX 3090; OPT, Llama on A100,
GH200 and Titan RTX) and to operators and steps measured on an H200. A measured profile corrects them for its device
(`profiling.calibration`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from varuna_capslog.base.gpus import GPUS, Gpu
from varuna_capslog.profiling.estimation.operators import Work, work_of
from varuna_capslog.profiling.estimation.quirks import USUAL_GPU

__all__ = ["CLASSES", "GROUPS", "HOST_SECONDS", "RATES_VERSION", "Speed", "cpu_speed", "speed_of"]

RATES_VERSION = 4
"""Raised whenever a factor or the count of work changes; a condition of every estimated profile."""
HOST_SECONDS = 15e-6
"""Time of the host to launch an operator: assumed, between the 10 and 32 us of published steps of small models. A stage
with shorter operators takes this long for each of them."""


@dataclass(frozen=True)
class Class:
    """Operators that have the same limit.

    unit: unit and limit of the work: "half", "tf32" or "float32" FLOPs at the data sheet's rate, "bytes" at the rate of
        memory, "elements" at one per clock and processor, "launches" of one second each.
    factor: measured seconds of a kernel divided by the data sheet's seconds.
    by_architecture: factors of architectures with other measured factors.
    group: the group in `GROUPS` whose factors a measured profile corrects together.
    """

    unit: str
    factor: float
    group: str
    by_architecture: Mapping[str, float] = field(default_factory=dict)


GROUPS = ("products", "convolutions", "memory", "launches")

CLASSES = {
    "product half": Class("half", 1.15, "products", {"ampere-rtx": 0.90, "hopper": 1.35, "ada": 1.3}),
    "product half even": Class("half", 1.5, "products", {"ampere-rtx": 1.9, "hopper": 3.7}),
    "product half odd": Class("half", 2.0, "products", {"ampere-rtx": 2.4, "hopper": 8.5}),
    "product tf32": Class("tf32", 1.2, "products", {"ampere": 1.05, "hopper": 1.8}),
    "product tf32 columns": Class("tf32", 1.2, "products", {"ampere": 1.1, "hopper": 2.35}),
    "product float32": Class("float32", 1.05, "products", {"ampere": 1.04, "hopper": 1.39, "turing": 1.13}),
    "product bytes": Class("bytes", 0.18, "products"),
    "attention flash": Class("half", 1.2, "products", {"hopper": 2.35}),
    "attention cudnn": Class("half", 0.93, "products"),
    "attention efficient": Class("half", 2.0, "products", {"hopper": 3.7}),
    "attention float32": Class("float32", 1.0, "products"),
    "scores": Class("elements", 0.08, "products"),
    "convolution half": Class("half", 1.5, "convolutions", {"ampere-rtx": 0.91, "hopper": 2.07}),
    "convolution tf32": Class("tf32", 2.0, "convolutions", {"hopper": 2.8}),
    "convolution float32": Class("float32", 2.0, "convolutions"),
    "grouped last": Class("elements", 6.5, "convolutions"),
    "conversion": Class("elements", 0.31, "convolutions"),
    "conversion bytes": Class("bytes", 2.0, "convolutions"),
    "depthwise": Class("float32", 25.9, "convolutions"),
    "depthwise cudnn": Class("float32", 9.5, "convolutions"),
    "depthwise last": Class("float32", 13.4, "convolutions"),
    "depthwise last half": Class("float32", 5.5, "convolutions"),
    "bytes": Class("bytes", 1.13, "memory"),
    "batch norm": Class("elements", 0.51, "memory"),
    "batch norm last": Class("elements", 0.31, "memory"),
    "batch norm backward": Class("elements", 1.04, "memory"),
    "batch norm backward last": Class("elements", 0.31, "memory"),
    "batch norm bfloat16": Class("elements", 1.65, "memory"),
    "batch norm bfloat16 last": Class("elements", 1.2, "memory"),
    "batch norm backward bfloat16": Class("elements", 2.6, "memory"),
    "batch norm backward bfloat16 last": Class("elements", 0.6, "memory"),
    "norm": Class("elements", 0.145, "memory"),
    "norm backward": Class("elements", 0.42, "memory"),
    "softmax": Class("elements", 0.2, "memory"),
    "reduced": Class("elements", 0.44, "memory"),
    "indexed": Class("elements", 0.5, "memory"),
    "strided": Class("elements", 0.64, "memory"),
    "broadcast": Class("elements", 0.31, "memory"),
    "launch": Class("launches", 7.5e-6, "launches"),
}
"""By name. The classes, in words:

- product half, tf32, float32: matrix products in tiles of 32 rows and columns. "even" and "odd": 16-bit matrices whose
  rows do not begin at multiples of 16 bytes (a vocabulary of 50,257 tokens). "columns": TF32 products with a transposed
  first matrix, as in gradients of weights. Product bytes: of both matrices and the result, while arithmetic hides them.
- attention: the fused kernels, in blocks of 128 queries and keys; the backward counts 3 times the forward. Scores: of
  a query and a key. Flash and memory-efficient kernels have no instructions of Hopper; elsewhere they are expected to
  reach what was published of an A100 (FlashAttention-2, arXiv 2307.08691: 50 to 73 % of the sheet).
- convolution: channels padded to tiles; a grouped convolution is as wide as a tile of several groups. Grouped last: of
  groups that share no tiles, with channels last. Conversion: of images to channels last and back, if they are stored
  in another layout.
- depthwise: one channel at a time, by torch's kernels, by cuDNN's, and with channels last.
- bytes: of every operator that memory limits. Its other work is counted by element: norms, softmax, sums of short rows
  or to few places, pooling, gathers and scatters, copies that change the order of dimensions, interpolation, and
  elementwise operators that broadcast, mask or draw.
- launch: in whole steps; a single kernel of a CUDA graph starts in 2 us.
"""
_ARITHMETIC = frozenset(kind for kind, entry in CLASSES.items() if entry.group == "products" and entry.unit != "bytes")


@dataclass(frozen=True)
class Speed:
    """Speed of a device.

    seconds_of: of a FLOP, byte, element or launch of each class.
    halves: the 16-bit dtypes that its matrix units take; (): no matrix units.
    host_seconds: time of the host to launch each operator; 0: the device is the host.
    source: origin of the seconds, for reports.
    """

    name: str
    seconds_of: Mapping[str, float]
    halves: tuple[torch.dtype, ...] = ()
    host_seconds: float = 0.0
    source: str = "data sheet"

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.seconds_of.items()), self.host_seconds))

    @classmethod
    def of_gpu(cls, name: str, gpu: Gpu, factors: Mapping[str, float] | None = None) -> Speed:
        """Return the speed of a kind of GPU by its data sheet. factors: of the groups in `GROUPS`; None: all are 1."""
        units = {
            "half": 1 / gpu.half_flops,
            "tf32": 1 / (gpu.tensor_flops or gpu.float32_flops),
            "float32": 1 / gpu.float32_flops,
            "bytes": 1 / gpu.bytes_per_second,
            "elements": 1 / (gpu.processors * gpu.clock_hertz),
            "launches": 1.0,
        }
        seconds = {
            kind: (factors or {}).get(entry.group, 1.0)
            * entry.by_architecture.get(gpu.architecture, entry.factor)
            * units[entry.unit]
            for kind, entry in CLASSES.items()
        }
        halves = (torch.float16, torch.bfloat16) if gpu.has_bfloat16 else (torch.float16,)
        return cls(name, seconds, halves, HOST_SECONDS, "data sheet" if factors is None else "measured profile")

    def count(self, total: Work, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Add the work of one operator on this device to `total`.

        Arithmetic hides the bytes of a product for as long as it takes; the others take the full time of bytes.
        """
        work = work_of(func, args, kwargs, result, self.halves)
        moved = work.get("product bytes")
        if moved:
            arithmetic = sum(amount * self.seconds_of[kind] for kind, amount in work.items() if kind in _ARITHMETIC)
            hidden = arithmetic / self.seconds_of["bytes"]
            if hidden < moved:
                work["product bytes"] = hidden
                work["bytes"] = work.get("bytes", 0.0) + moved - hidden
        for kind, amount in work.items():
            total[kind] = total.get(kind, 0.0) + amount

    def seconds(self, work: Work) -> float:
        """Return the seconds of this work, one operator after the other; at least the host's time for the launches."""
        device = sum(amount * self.seconds_of[kind] for kind, amount in work.items())
        return max(device, self.host_seconds * work.get("launch", 0.0))


def speed_of(device: str, gpu: str = "", threads: int | None = None) -> Speed:
    """Return the speed for estimates of a device: of this machine's CPU for cpu, of a kind of GPU for cuda, by default
    the CAPSlog paper's GPU. `threads`: of a worker on a CPU; None: those of this process.
    """
    if device == "cpu":
        return calibrated_cpu(threads or torch.get_num_threads())
    kind = gpu or USUAL_GPU
    return Speed.of_gpu(kind, GPUS[kind])


@functools.cache
def calibrated_cpu(threads: int) -> Speed:
    """Measure this machine's CPU in a quarter of a second: products of 384 x 384 matrices, 3 x 3 convolutions of 64
    channels, scaling of 16 MiB. A process measures once for each number of threads, so that its estimates agree.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _calibrated(threads)
    finally:
        torch.set_num_threads(before)


def _calibrated(threads: int) -> Speed:
    a, b = torch.full((384, 384), 0.5), torch.full((384, 384), 0.5)
    x, w = torch.full((1, 64, 56, 56), 0.5), torch.full((64, 64, 3, 3), 0.5)
    big = torch.full((1 << 22,), 0.5)
    matrix = 2 * 384**3 / _shortest(lambda: a @ b)
    convolution = 2 * 64 * 64 * 9 * 56 * 56 / _shortest(lambda: torch.conv2d(x, w, padding=1))
    moved = 2 * big.nbytes / _shortest(lambda: big * 2.0)
    scalar = torch.full((1,), 0.5)
    launch = _shortest(lambda: scalar + 1.0)
    rates = [float(f"{value:.2g}") for value in (convolution, matrix, moved, launch)]
    return cpu_speed(f"this cpu, {threads} thread(s)", *rates)


def cpu_speed(
    name: str, convolution_flops: float, matrix_flops: float, bytes_per_second: float, launch: float
) -> Speed:
    """Return a CPU's speed from rates per second and the shortest operator's seconds; layout conversions are free."""
    seconds = {}
    for kind, entry in CLASSES.items():
        flops = convolution_flops if entry.group == "convolutions" else matrix_flops
        of_unit = {"bytes": 1 / bytes_per_second, "elements": 0.0, "launches": launch}
        seconds[kind] = of_unit.get(entry.unit, 1 / flops)
    return Speed(name, {**seconds, "conversion bytes": 0.0}, source="measured here")


def _shortest(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < 0.06:
        start = time.perf_counter()
        with torch.no_grad():
            work()
        best = min(best, time.perf_counter() - start)
    return best
