"""Whole layers that run in another memory format or type, by other kernels, or compiled; they give what plain ones do.

The layer's module keeps all that it holds; it gets a class whose `forward` runs the plain one in between. Conversions
at its borders are a part of the layer, and so of its costs: neighbours see tensors as before. Between two layers with
channels last there is none, once `leave_layouts` knows who reads what. A compiled layer is only marked here: the engine
compiles it before a step (`engine/compiling`), as it does all layers where `train.compile` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

__all__ = ["backend_of", "compiled", "in_bfloat16", "in_channels_last", "leave_layouts", "without_onednn"]


class _ChannelsLast(nn.Module):
    left: frozenset[int] = frozenset()
    """Places of the outputs that only layers with channels last read: they stay as they are."""

    def forward(self, *tensors: Any) -> Any:
        found = super().forward(*(_laid_out(one, torch.channels_last) for one in tensors))
        if isinstance(found, Tensor):
            return self._handed_on(0, found)
        return tuple(self._handed_on(place, one) for place, one in enumerate(found))

    def _handed_on(self, place: int, tensor: Any) -> Any:
        return _laid_out(tensor, torch.channels_last if place in self.left else torch.contiguous_format)


def _laid_out(tensor: Any, memory_format: torch.memory_format) -> Any:
    of_image = isinstance(tensor, Tensor) and tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=memory_format) if of_image else tensor


class _Bfloat16(nn.Module):
    def forward(self, *tensors: Any) -> Any:
        device = next((one.device.type for one in tensors if isinstance(one, Tensor)), "cpu")
        if torch.is_autocast_enabled(device):  # the whole run is
            return super().forward(*tensors)
        with torch.autocast(device, torch.bfloat16):
            found = super().forward(*tensors)
        return _wide(found) if isinstance(found, Tensor) else tuple(map(_wide, found))


def _wide(tensor: Any) -> Any:
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 else tensor


class _WithoutOnednn(nn.Module):
    inside = False
    """An operator of its backward works, or has raised: oneDNN is off."""

    def train(self, mode: bool = True) -> Any:
        """The engine calls it where it drops a step that broke off, perhaps inside this layer's backward."""
        if self.inside:
            self._leave()
        return super().train(mode)

    def _enter(self, *_: Any) -> None:
        self.inside = True
        _switch_off()

    def _leave(self, *_: Any) -> None:
        _switch_on()
        self.inside = False

    def forward(self, *tensors: Any) -> Any:
        if not torch.backends.mkldnn.enabled:  # the whole process is without it
            return super().forward(*tensors)
        before = {one.grad_fn for one in tensors if isinstance(one, Tensor)}
        with _switched_off():
            found = super().forward(*tensors)
        if torch.is_grad_enabled():
            for node in _nodes([found] if isinstance(found, Tensor) else found, before):
                node.register_prehook(self._enter)
                node.register_hook(self._leave)
        return found


@contextmanager
def _switched_off() -> Iterator[None]:
    _switch_off()
    try:
        yield
    finally:
        _switch_on()


def _switch_off() -> None:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _switch_on() -> None:
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def _nodes(outputs: Iterable[Any], before: set[Any]) -> set[Node]:
    """What a backward of the layer runs: kernels choose anew there whether they use oneDNN.

    before: what its inputs come from. A parameter's gradient is only added there, with no kernel of oneDNN.
    """
    found, waiting = set[Node](), [one.grad_fn for one in outputs if isinstance(one, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in before and node not in found and not hasattr(node, "variable"):
            found.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found


class _Compiled(nn.Module):
    backend = "inductor"
    """Of torch.compile."""


@functools.lru_cache(maxsize=1024)
def _class(kind: Any, plain: Any) -> Any:
    return type(f"{kind.__name__[1:]}{plain.__name__}", (kind, plain), {})


def _wrap(layer: nn.Module, kind: Any) -> int:
    if isinstance(layer, kind):
        return 0
    plain: Any = type(layer)
    layer.__class__ = _class(kind, plain)
    return 1


def in_channels_last(layer: nn.Module) -> int | None:
    """Convolutions of images work on [B, H, W, C] in memory, as many kernels want it; None without such ones."""
    kinds = nn.Conv2d, nn.ConvTranspose2d
    return _wrap(layer, _ChannelsLast) if any(isinstance(one, kinds) for one in layer.modules()) else None


def leave_layouts(
    layers: Sequence[nn.Module],
    writes: Sequence[Sequence[str]],
    readers: Mapping[Any, Sequence[int]],
) -> None:
    """Takes the conversions out between layers of one chain that have channels last, since a tensor keeps its layout
    over cuts. Args as of `registry.tell_readers`.
    """
    inside = {number: layer for number, layer in enumerate(layers) if isinstance(layer, _ChannelsLast)}
    for number, layer in inside.items():
        read = [set(readers.get((name, number), ())) for name in writes[number]]
        layer.left = frozenset(place for place, found in enumerate(read) if found and found <= inside.keys())


def in_bfloat16(layer: nn.Module) -> int | None:
    """What torch's autocast takes for safe runs in bfloat16; parameters and outputs stay float32. None without any."""
    floats = [one for one in layer.parameters() if one.dtype == torch.float32 and one.dim() > 1]
    graphs = any(isinstance(one, fx.GraphModule) for one in layer.modules())
    return _wrap(layer, _Bfloat16) if floats or graphs else None


def without_onednn(layer: nn.Module) -> int | None:
    """Forward and backward run by torch's own kernels of the CPU; None where nothing is multiplied.

    torch knows one switch for the whole process. It is off while the layer works, so no other thread of the process may
    compute beside it. Where there is no oneDNN, and on other devices, the layer is the plain one.
    """
    wide = any(one.dim() > 1 for one in layer.parameters()) or any(
        isinstance(one, fx.GraphModule) for one in layer.modules()
    )
    return _wrap(layer, _WithoutOnednn) if wide else None


def compiled(layer: nn.Module, backend: str = "inductor") -> int | None:
    """Marks a layer that the engine compiles by itself; None for one with running statistics, which hooks collect.

    backend: of torch.compile.
    """
    if any(isinstance(one, _Norm) and one.running_mean is not None for one in layer.modules()):
        return None
    found = _wrap(layer, _Compiled)
    layer.backend = backend  # type: ignore[assignment]
    return found


_Norm = nn.modules.batchnorm._NormBase


def backend_of(layer: nn.Module) -> str | None:
    """The backend of torch.compile for a layer whose variant compiles it; None for all others."""
    return layer.backend if isinstance(layer, _Compiled) else None
