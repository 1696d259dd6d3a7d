"""Compares measured seconds of operators with their estimates by class, before and after a measured correction.

The estimate of an operator is that of `varuna_capslog/profiling/estimation/rates.py`: its work by class, at the rates
of this kind of GPU. Corrections are those that `capslog profile --measure` would keep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import truth
from common import run_ranks
from parts.trained import kind_of
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.profiling.calibration import Calibration, MeasuredRun, learn
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import GROUPS, HOST_SECONDS, RATES_VERSION, Speed, speed_of
from varuna_capslog.profiling.measure import profile_config

OPERATORS = {group: f"{group}, measured / estimated" for group in GROUPS if group != "launches"}
HOST, LEARNED = "host, seconds of an operator", "two measured profiles correct the third's layers"
ROWS: dict[str, dict[str, str]] = {
    "cuda": dict.fromkeys(OPERATORS.values(), "") | {HOST: "", LEARNED: "a smaller median error"},
    "cpu": {},
}
TYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROFILED = {
    "transformer": truth.other("transformer", 8, "bfloat16", blocks=3, dim=1024, length=512),
    "decoder": truth.other("decoder", 8, "bfloat16", blocks=3, dim=768, length=512),
    "resnet": truth.other("resnet", 64, side=224),
}
"""The last one's layers are estimated with what the others correct."""

_aten = torch.ops.aten
Operator = tuple[str, str, Callable[[], object]]
"""Its group, its name, and what runs it."""


def measure(device: torch.device, tell: Any) -> None:
    """Write the median and the range of each group; all operators are in the JSON."""
    gpu = kind_of(tell.facts)
    (timings,) = run_ranks(timed, 1, gpu, device)
    for group, row in OPERATORS.items():
        ratios = {name: operator["seconds"] / operator["estimated"] for name, operator in timings[group].items()}
        middle = statistics.median(ratios.values())
        least, most = min(ratios.values()), max(ratios.values())
        tell(
            row,
            f"{len(ratios)} operators: median {middle:.2f}, from {least:.2f} to {most:.2f}",
            operators=timings[group],
        )
    host = timings["host"]
    tell(HOST, f"{host * 1e6:.1f} us; estimates assume {HOST_SECONDS * 1e6:.0f}", seconds=host)
    before, after, factors = corrected(device, gpu)
    shown = ", ".join(f"{group} {factor:.2f}" for group, factor in factors.items())
    result = f"{before:.0%} before, {after:.0%} after; factors {shown}"
    tell(LEARNED, result, after <= before, before=before, after=after, factors=factors)


class Counted(TorchDispatchMode):
    """Adds up the work of all operators that run under it."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self._speed = speed
        self.work: Work = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._speed.count(self.work, func, args, kwargs or {}, result)
        return result


def timed(communicator: Communicator, gpu: str, device: torch.device) -> dict[str, Any]:
    """Return measured and estimated seconds by group and name, and the host's seconds of a small operator."""
    speed = speed_of("cuda", gpu)
    timings: dict[str, Any] = {group: {} for group in OPERATORS}
    for group, name, run in operators(device):
        with Counted(speed) as counted:
            run()
        timings[group][name] = {"seconds": seconds_of(run), "estimated": speed.seconds(counted.work)}
    scalar = torch.ones(1, device=device)
    for _ in range(200):
        scalar.add_(1.0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(500):
        scalar.add_(1.0)
    return timings | {"host": (time.perf_counter() - began) / 500}


def seconds_of(run: Callable[[], object]) -> float:
    """Return the device's seconds of a run: the median of three loops of 5 ms."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def loop(count: int) -> float:
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    loop(2)
    count = max(3, min(100, int(5e-3 / loop(1))))
    return statistics.median(loop(count) for _ in range(3))


def operators(device: torch.device) -> Iterator[Operator]:
    """Yield operators (group, name, call) large enough that the device, not the host, limits them."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for name, dtype in TYPES.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        for rows, inner, columns in ((4096, 4096, 4096), (16384, 1024, 64), (16384, 768, 3072), (4096, 1024, 50257)):
            a, b = made(rows, inner, dtype=dtype), made(inner, columns, dtype=dtype)
            yield "products", f"{name} {rows}x{inner} by {inner}x{columns}", lambda a=a, b=b: a @ b
    torch.set_float32_matmul_precision("highest")
    q = made(8, 16, 2048, 64, dtype=torch.bfloat16)
    yield "products", "attention bfloat16 8x16x2048x64", lambda: F.scaled_dot_product_attention(q, q, q)
    yield "products", "attention bfloat16, causal", lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        for channels, side, kernel, groups in ((64, 56, 3, 1), (256, 56, 1, 1), (256, 28, 3, 32), (384, 14, 7, 384)):
            x = made(64, channels, side, side, dtype=dtype)
            w = made(channels, channels // groups, kernel, kernel, dtype=dtype)
            pad = [kernel // 2] * 2
            label = f"{short} 64x{channels}x{side}x{side}, {kernel}x{kernel}, groups {groups}"
            yield "convolutions", label, lambda x=x, w=w, p=pad, g=groups: torch.conv2d(x, w, None, 1, p, 1, g)
            both = [None, [1, 1], pad, [1, 1], False, [0, 0], groups, [True, True, False]]
            yield (
                "convolutions",
                f"{label}, backward",
                lambda x=x, w=w, settings=both: _aten.convolution_backward(x, x, w, *settings),
            )
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        x, y = made(16384, 4096, dtype=dtype), made(16384, 4096, dtype=dtype)
        image = made(64, 128, 56, 56, dtype=dtype)
        scale, rows = made(4096, dtype=dtype), made(96, 512, 512, dtype=dtype)
        table = made(50257, 1024, dtype=dtype)
        tokens = torch.randint(50257, (16384,), device=device)
        mean, variance = torch.zeros(128, device=device), torch.ones(128, device=device)
        yield "memory", f"{short} add", lambda x=x, y=y: x + y
        yield "memory", f"{short} gelu", lambda x=x: F.gelu(x)
        yield "memory", f"{short} add of a row", lambda x=x, s=scale: x + s
        yield "memory", f"{short} transposed copy", lambda x=x: x.t().contiguous()
        yield "memory", f"{short} softmax", lambda r=rows: r.softmax(-1)
        yield "memory", f"{short} layer norm", lambda x=x, s=scale: F.layer_norm(x, (4096,), s, s)
        yield "memory", f"{short} batch norm", lambda i=image, m=mean, v=variance: F.batch_norm(i, m, v, v, m, True)
        yield "memory", f"{short} sum of columns", lambda x=x: x.sum(0)
        yield "memory", f"{short} embedding", lambda t=tokens, w=table: F.embedding(t, w)
        yield "memory", f"{short} dropout", lambda x=x: F.dropout(x, 0.1)


def corrected(device: torch.device, gpu: str) -> tuple[float, float, dict[str, float]]:
    """Return the median errors of the third model's layers before and after measuring the others, and the factors."""
    runs, calibration = {}, None
    for name, values in PROFILED.items():
        config = truth.config_with(values, device=device.type)
        profile = profile_config(config)
        estimator = StageEstimator.of_config(config)
        works = {row.layers: estimator.stage(*row.layers).work for row in profile.observations if row.variant is None}
        if name != "resnet":
            calibration = learn(profile, works) or calibration
        else:
            rows = [row for row in profile.observations if row.variant is None]
            halves = [("F", row.layers, row.forward_seconds) for row in rows]
            halves += [("B", row.layers, row.backward_seconds) for row in rows]
            runs = {"other": [MeasuredRun(works[layers][half], seconds) for half, layers, seconds in halves if seconds]}
    assert calibration is not None
    plain = speed_of("cuda", gpu)
    transferred = Calibration(calibration.device, plain.seconds_of, plain.host_seconds, RATES_VERSION, runs)
    return transferred.error(plain), transferred.error(calibration.speed), calibration.factors()
