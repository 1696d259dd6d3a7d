"""What devices do that no dispatcher shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from varuna_capslog.errors import CapslogError
from varuna_capslog.profiles import onednn

__all__ = ["Quirks", "quirks_of"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Quirks:
    """How one kind of device differs from what the dispatcher of a CPU shows."""

    device: str
    granularity: int
    staged: bool
    foreach: bool

    def temporary(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        if self.device == "cuda" and func is _aten._softmax_backward_data.default:
            return int(args[0].numel()) * int(args[0].itemsize)
        if self.device == "cpu":
            return onednn.kernel_bytes(func, args, result)
        return 0

    @contextmanager
    def dispatch(self) -> Iterator[None]:
        if self.device != "cuda":
            yield
            return
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("dropout", _fused_dropout, "AutogradCPU")
            yield


def _fused_dropout(x: Any, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    return _aten.native_dropout(x, p, train)[0]


def quirks_of(device: str) -> Quirks:
    if device == "cpu":
        return Quirks("cpu", 1, False, False)
    if device == "cuda":
        return Quirks("cuda", 512, True, True)
    raise CapslogError(device)
