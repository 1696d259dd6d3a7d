"""The operators of a training step, traced on fake tensors and kept in a file; `count` sums their work by class.

A trace holds names, shapes, types and strides, not work, so it stays valid when the library counts work differently.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.quirks import QUIRKS_VERSION, Quirks
from varuna_capslog.profiling.estimation.rates import Speed

__all__ = ["Cache", "Trace", "count", "trace"]

T = TypeVar("T")
Trace = list[Any]
"""[[name, arguments, keywords, result], how often] of each operator with each shapes."""


def trace(make: Callable[[], T], step: Callable[[T], object], gpu: str, builds_model: bool = True) -> Trace:
    """Return the operators of `step(make())` as a kind of GPU calls them.

    Args:
        make: returns a model, which is built in memory before its tensors are replaced by fake tensors of the same
            strides; or any other object, which is built of fake tensors. Building is not traced.
        gpu: of `base.gpus`.
    """
    quirks = Quirks("cuda", gpu)
    operators: collections.Counter[str] = collections.Counter()

    def observe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        returns = [part.alias_info for part in func._schema.returns]
        if returns and all(alias is not None and not alias.is_write for alias in returns):
            return  # a view
        name = f"{func._schema.name}.{func._overloadname}"
        words = {key: _described(value) for key, value in kwargs.items()}
        operators[json.dumps([name, [_described(arg) for arg in args], words, _described(result)])] += 1

    made = make() if builds_model else None
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode, quirks.dispatch():
        if isinstance(made, nn.Module):
            _pretend(made, mode)
        made = made or make()
        followed = Lifetimes(quirks.temporary)
        followed.observer = observe
        with followed:
            step(made)
    return [[json.loads(text), times] for text, times in operators.items()]


def _pretend(model: nn.Module, mode: FakeTensorMode) -> None:
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    fake = mode.from_tensor(parameter.detach())
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), list(value.stride())]
    if isinstance(value, (list, tuple)):
        return ["list", [_described(part) for part in value]]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _actual(value: Any, half: torch.dtype) -> Any:
    if not isinstance(value, list):
        return value
    if value[0] == "list":
        return [_actual(part, half) for part in value[1]]
    dtype = half if value[2] == "bfloat16" else getattr(torch, value[2])
    return torch.empty_strided(value[1], value[3], dtype=dtype, device="meta")


@functools.cache
def _operator(name: str) -> Any:
    space, _, local_name = name.partition("::")
    packet, _, overload = local_name.rpartition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def count(
    speed: Speed, traced: Trace, half: torch.dtype = torch.bfloat16, tf32: bool = False, tf32_images: bool = True
) -> Work:
    """Return the work of a trace by class, as a device counts it.

    Args:
        half: the 16-bit type that stands for bfloat16 in the trace.
        tf32, tf32_images: whether torch lets products of matrices and convolutions take TF32.
    """
    total: Work = {}
    with _precisions(tf32, tf32_images):
        for (name, args, kwargs, result), times in traced:
            work: Work = {}
            words = {key: _actual(value, half) for key, value in kwargs.items()}
            speed.count(work, _operator(name), [_actual(value, half) for value in args], words, _actual(result, half))
            for kind, amount in work.items():
                total[kind] = total.get(kind, 0.0) + times * amount
    return total


@contextlib.contextmanager
def _precisions(tf32: bool, tf32_images: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32_images
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class Cache:
    """A folder of traces that were made with this torch and these quirks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"torch-{torch.__version__}-quirks-{QUIRKS_VERSION}"

    def of(self, key: str, make: Callable[[], Trace]) -> Trace:
        """Return the trace stored under this key; if there is none, make and store it."""
        path = self.folder / f"{key.replace('/', '-')}.json.gz"
        if path.exists():
            return json.loads(gzip.decompress(path.read_bytes()))
        traced = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(traced).encode()))
        return traced
