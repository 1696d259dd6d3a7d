"""Seconds without a device: every operator takes as long as its arithmetic or its bytes, whichever is longer.

`hollow` adds up the operators of a stage. FLOPs come from torch's own registry, bytes from the tensors that an
operator reads and writes, speeds from a `Speed`. This ranks plans; it does not know clocks, caches or overlap.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from varuna_capslog.base.gpus import GPUS

__all__ = ["RTX_A4000", "Speed", "calibrated_cpu", "operator_seconds", "speed_of"]

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset({_aten.convolution, _aten.convolution_backward})


@dataclass(frozen=True)
class Speed:
    """What a device reaches in practice.

    Attributes:
        convolution_flops, matrix_flops: per second, in float32 (16-bit types count the same).
        bytes_per_second: of reading and writing memory.
        launch_seconds: least time of one operator.
    """

    name: str
    convolution_flops: float
    matrix_flops: float
    bytes_per_second: float
    launch_seconds: float


RTX_A4000 = Speed("rtx a4000", 19e12, 13.4e12, 360e9, 5e-6)
"""The GPU of the CAPSlog paper. Its data sheet says 19.2 TFLOP/s and 448 GB/s; convolutions in TF32 are taken for 19
TFLOP/s, the rest at 70 and 80 % (assumed)."""


def speed_of(device: str, gpu: str = "") -> Speed:
    """What estimates for a device reckon with: cpu is this machine's, cuda a kind of GPU, by default `RTX_A4000`.

    The parts of the data sheet that a kind reaches are those assumed there: 70 % of the float32 FLOPs, half of those of
    tensor cores for convolutions (torch convolves in TF32 by default and multiplies matrices in float32), 80 % of the
    bytes.
    """
    if device == "cpu":
        return calibrated_cpu()
    if gpu in ("", "a4000"):
        return RTX_A4000
    sheet = GPUS[gpu]
    matrices = 0.7 * sheet.float32_flops
    convolutions = max(matrices, 0.5 * sheet.tensor_flops)
    return Speed(gpu, convolutions, matrices, 0.8 * sheet.bytes_per_second, RTX_A4000.launch_seconds)


def operator_seconds(speed: Speed, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """What one operator takes; a view costs nothing."""
    if _moves_nothing(func):
        return 0.0
    count = flop_registry.get(func.overloadpacket)
    flops = 0.0 if count is None else count(*args, **kwargs, out_val=result)
    rate = speed.convolution_flops if func.overloadpacket in _CONVOLUTIONS else speed.matrix_flops
    moved = _bytes(args) + _bytes(kwargs.values()) + (0 if _writes_arguments(func) else _bytes((result,)))
    return max(flops / rate, moved / speed.bytes_per_second, speed.launch_seconds)


@functools.cache
def _moves_nothing(func: Any) -> bool:
    returns = func._schema.returns
    aliases = [part.alias_info for part in returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def _writes_arguments(func: Any) -> bool:
    return any(part.alias_info is not None and part.alias_info.is_write for part in func._schema.arguments)


def _bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.itemsize
        elif isinstance(value, (tuple, list)):
            total += _bytes(value)
    return total


def calibrated_cpu() -> Speed:
    """This machine's CPU with the threads of this process, from a quarter of a second of work: 384 x 384 matrices, 64
    channels of 3 x 3, 16 MiB scaled. A process works so once for each number of threads, and its estimates agree.
    """
    return _calibrated(torch.get_num_threads())


@functools.cache
def _calibrated(threads: int) -> Speed:
    a, b = torch.full((384, 384), 0.5), torch.full((384, 384), 0.5)
    x, w = torch.full((1, 64, 56, 56), 0.5), torch.full((64, 64, 3, 3), 0.5)
    big = torch.full((1 << 22,), 0.5)
    matrix = 2 * 384**3 / _shortest(lambda: a @ b)
    convolution = 2 * 64 * 64 * 9 * 56 * 56 / _shortest(lambda: torch.conv2d(x, w, padding=1))
    moved = 2 * big.nbytes / _shortest(lambda: big * 2.0)
    one = torch.full((1,), 0.5)
    launch = _shortest(lambda: one + 1.0)
    rates = [float(f"{value:.2g}") for value in (convolution, matrix, moved, launch)]
    return Speed(f"this cpu, {threads} thread(s)", *rates)


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
