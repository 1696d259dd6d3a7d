"""Variants of a whole layer: channels last, bfloat16, CPU kernels without oneDNN, and torch.compile.

A variant gives the layer's module a subclass whose `forward` wraps the plain one; all attributes stay. The layer itself
converts its inputs and outputs, so its costs include the conversions, and its neighbours see plain tensors. A compiled
layer is only marked here; `engine/compiling` compiles it before a step, like all layers with `train.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

__all__ = ["backend_of", "compiled", "drop_conversions", "in_bfloat16", "in_channels_last", "without_onednn"]


class _ChannelsLast(nn.Module):
    kept_outputs: frozenset[int] = frozenset()
    """Indices of the outputs that stay in channels last, because only channels-last layers read them."""

    def forward(self, *tensors: Any) -> Any:
        outputs = super().forward(*(_laid_out(tensor, torch.channels_last) for tensor in tensors))
        if isinstance(outputs, Tensor):
            return self._handed_on(0, outputs)
        return tuple(self._handed_on(place, tensor) for place, tensor in enumerate(outputs))

    def _handed_on(self, place: int, tensor: Any) -> Any:
        return _laid_out(tensor, torch.channels_last if place in self.kept_outputs else torch.contiguous_format)


def _laid_out(tensor: Any, memory_format: torch.memory_format) -> Any:
    of_image = isinstance(tensor, Tensor) and tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=memory_format) if of_image else tensor


class _Bfloat16(nn.Module):
    def forward(self, *tensors: Any) -> Any:
        device = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), "cpu")
        if torch.is_autocast_enabled(device):  # the whole run is under autocast
            return super().forward(*tensors)
        with torch.autocast(device, torch.bfloat16):
            outputs = super().forward(*tensors)
        return _wide(outputs) if isinstance(outputs, Tensor) else tuple(map(_wide, outputs))


def _wide(tensor: Any) -> Any:
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 else tensor


class _WithoutOnednn(nn.Module):
    inside = False
    """True while oneDNN is off for an operator of the layer's backward, and after that operator has raised."""

    def train(self, mode: bool = True) -> Any:
        """Switch oneDNN on again if the layer's backward has raised; the engine calls `train` after a failed step."""
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
        if not torch.backends.mkldnn.enabled:  # oneDNN is off for the whole process
            return super().forward(*tensors)
        before = {tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)}
        with _switched_off():
            outputs = super().forward(*tensors)
        if torch.is_grad_enabled():
            for node in _nodes([outputs] if isinstance(outputs, Tensor) else outputs, before):
                node.register_prehook(self._enter)
                node.register_hook(self._leave)
        return outputs


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
    """Return the autograd nodes of the layer's backward, whose kernels choose again whether to use oneDNN, except those
    that only add up a parameter's gradient. before: the nodes that made the layer's inputs.
    """
    nodes, waiting = set[Node](), [tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in before and node not in nodes and not hasattr(node, "variable"):
            nodes.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return nodes


class _Compiled(nn.Module):
    backend = "inductor"
    """Backend of torch.compile."""


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
    """Run 2-D convolutions on tensors in channels last, which many kernels prefer; None for layers without them."""
    kinds = nn.Conv2d, nn.ConvTranspose2d
    return _wrap(layer, _ChannelsLast) if any(isinstance(module, kinds) for module in layer.modules()) else None


def drop_conversions(
    layers: Sequence[nn.Module],
    writes: Sequence[Sequence[str]],
    readers: Mapping[Any, Sequence[int]],
) -> None:
    """Remove the conversions between channels-last layers of one chain. Args: see `registry.drop_unread_work`."""
    inside = {number: layer for number, layer in enumerate(layers) if isinstance(layer, _ChannelsLast)}
    for number, layer in inside.items():
        read = [set(readers.get((name, number), ())) for name in writes[number]]
        layer.kept_outputs = frozenset(
            place for place, layers_reading in enumerate(read) if layers_reading and layers_reading <= inside.keys()
        )


def in_bfloat16(layer: nn.Module) -> int | None:
    """Run a layer under autocast to bfloat16; parameters and outputs stay float32. None for layers without matrices."""
    floats = [parameter for parameter in layer.parameters() if parameter.dtype == torch.float32 and parameter.dim() > 1]
    graphs = any(isinstance(module, fx.GraphModule) for module in layer.modules())
    return _wrap(layer, _Bfloat16) if floats or graphs else None


def without_onednn(layer: nn.Module) -> int | None:
    """Run forward and backward by torch's own CPU kernels; None for layers without matrix products. torch's switch for
    oneDNN holds for the whole process, so no other thread of the process may compute while the layer runs. On other
    devices, or where oneDNN is off, the layer computes as the plain one.
    """
    wide = any(parameter.dim() > 1 for parameter in layer.parameters()) or any(
        isinstance(module, fx.GraphModule) for module in layer.modules()
    )
    return _wrap(layer, _WithoutOnednn) if wide else None


def compiled(layer: nn.Module, backend: str = "inductor") -> int | None:
    """Mark a layer for compilation by `backend`; None for a layer with running statistics, which hooks collect."""
    if any(isinstance(module, _Norm) and module.running_mean is not None for module in layer.modules()):
        return None
    changed = _wrap(layer, _Compiled)
    layer.backend = backend  # type: ignore[assignment]
    return changed


_Norm = nn.modules.batchnorm._NormBase


def backend_of(layer: nn.Module) -> str | None:
    """Return the backend of torch.compile for a layer whose variant compiles it; None for all others."""
    return layer.backend if isinstance(layer, _Compiled) else None
