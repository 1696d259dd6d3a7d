"""Recomputes parts of a layer inside its backward (selective activation checkpointing).

The autograd graph is that of the unchanged layer, so every sum of gradients keeps its order; only the saved tensors are
replaced. Of a part, the graph keeps only the part's inputs. When the backward reads the first saved tensor of the part,
the part runs again with the same random numbers. The outputs of norms are not saved either where a later operation of
the layer reads them unchanged: the second run computes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from varuna_capslog import accelerator
from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer_parts import LayerPart, parts_of_layer
from varuna_capslog.model.signature import run_signature
from varuna_capslog.plans.parts import recomputed_parts

__all__ = ["PartedForward", "check_parts"]


def check_parts(chain: Chain, layout: Layout) -> None:
    """Raise CapslogError where a memory interval names a part that is no run of operations in its layer's graph."""
    shown = set()
    for number, stage in enumerate(layout.stages):
        for layer, parts in recomputed_parts(stage):
            key = run_signature([chain.layers[layer]]), parts
            if key not in shown:  # equal blocks are checked once
                fields.within(f"stages[{number}].memory", functools.partial(parts_of_layer, chain.layers[layer], parts))
                shown.add(key)


class PartedForward:
    """Forward of a layer that recomputes parts; called instead of the layer's module."""

    def __init__(self, layer: EngineLayer, parts: Sequence[str]) -> None:
        self._module, layer_parts = parts_of_layer(layer.layer, parts)
        self._returned: list[_Returned] = []
        for part in layer_parts:
            setattr(self._module, part.target, _PartModule(part, layer, self._returned))
        self._drops = any(part.part == "norms" for part in layer_parts)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the layer."""
        if not self._drops:
            return self._module(*tensors)
        try:
            with saved_tensors_hooks(self._pack, _unpacked):
                return self._module(*tensors)
        finally:
            self._returned.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Reread:
        return _reread(tensor, self._returned) or tensor


class _Returned(NamedTuple):
    """Output of a part in the current forward of the layer. version: the tensor's, which a change in place raises."""

    storage: StorageWeakRef
    version: int
    call: _PartCall
    place: int


class _Reread(NamedTuple):
    """Description of a view of a part's output, which is not kept: the part's second run computes it."""

    call: _PartCall
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restored(self) -> Tensor:
        """Return the recomputed view."""
        return self.call.output(self.place).as_strided(self.size, self.stride, self.offset)


def _reread(tensor: Tensor, returned: Sequence[_Returned]) -> _Reread | None:
    """Describe a tensor that is a view of a part's output; None for any other tensor."""
    address = tensor.untyped_storage()._cdata
    for storage, version, call, place in returned:
        # a tensor that changed after the part returned it cannot be recomputed
        if storage.cdata == address and not storage.expired() and tensor._version == version:
            if tensor.dtype != call.dtypes[place]:
                return None
            call.readers += 1
            return _Reread(call, place, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return None


def _unpacked(kept: Tensor | _Reread) -> Tensor:
    return kept.restored() if isinstance(kept, _Reread) else kept


class _PartModule(nn.Module):
    """Module of a part in the layer's graph. returned: list of outputs of parts in the layer's current forward."""

    def __init__(self, part: LayerPart, layer: EngineLayer, returned: list[_Returned]) -> None:
        super().__init__()
        self.part, self.layer, self._returned = part, layer, returned

    def forward(self, *values: Any) -> tuple[Tensor, ...]:
        """Run the part so that its graph saves only the inputs."""
        call = _PartCall(self.part, self.layer, values, self._returned)
        with saved_tensors_hooks(call.pack, call.unpack):
            outputs: tuple[Tensor, ...] = self.part.body(*values)
        if self.part.part == "norms":
            call.dtypes = tuple(tensor.dtype for tensor in outputs)
            for place, tensor in enumerate(outputs):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._returned.append(_Returned(storage, tensor._version, call, place))
        return outputs


class _Stop(Exception):
    """Signal that ends a second run once all missing tensors are computed."""


class _PartCall:
    """One forward of a part, and its second run in the backward.

    readers: number of kept views of its outputs (`_Reread`). dtypes: of its outputs, for a norm.
    """

    def __init__(
        self, part: LayerPart, layer: EngineLayer, values: Sequence[Any], returned: Sequence[_Returned]
    ) -> None:
        self._part, self._layer = part, layer
        self._inputs = [_Input.of(value, returned) if isinstance(value, Tensor) else value for value in values]
        self._random = accelerator.random_state(layer.device) if part.draws else None
        self._count = 0
        self._saved: dict[int, Tensor] = {}
        self._outputs: tuple[Tensor, ...] | None = None
        self.readers = 0
        self.dtypes: tuple[torch.dtype, ...] = ()

    def pack(self, _: Tensor) -> int:
        """Replace a tensor that the graph saves by its number."""
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        """Return the recomputed tensor of this number."""
        if number not in self._saved:
            self._run_again()
        return self._saved.pop(number)

    def output(self, place: int) -> Tensor:
        """Return the part's recomputed output number `place`."""
        outputs = self._outputs or self._run_again()
        self.readers -= 1
        if self.readers <= 0:
            self._outputs = None
        return outputs[place]

    def _run_again(self) -> tuple[Tensor, ...]:
        layer, saved = self._layer, dict[int, Tensor]()
        inputs = [value.restored() if isinstance(value, _Input) else value for value in self._inputs]
        present = None if self._random is None else accelerator.random_state(layer.device)

        def pack(tensor: Tensor) -> None:
            saved[len(saved)] = tensor
            if len(saved) == self._count and not self.dtypes:
                raise _Stop

        outputs: tuple[Tensor, ...] = ()
        try:
            if self._random is not None:
                accelerator.set_random_state(layer.device, self._random)
            with torch.enable_grad(), layer.autocast(), saved_tensors_hooks(pack, _never):
                outputs = self._part.body(*inputs)
        except _Stop:
            pass
        finally:
            if present is not None:
                accelerator.set_random_state(layer.device, present)
        if len(saved) != self._count:
            raise CapslogError(
                f"the {self._part.part} of layer {layer.name!r} saved {self._count} tensors in the forward and "
                f"{len(saved)} when run again, so that it does not do the same twice; take {self._part.part!r} out of "
                "the memory interval of this layer"
            )
        self._saved = saved
        outputs = tuple(tensor.detach() for tensor in outputs)
        self._outputs = outputs if self.readers > 0 else None
        return outputs


class _Input(NamedTuple):
    """Input of a part, which no later operation of the layer changes (`parts_of_layer`). carries: it has a gradient."""

    kept: Tensor | _Reread
    carries: bool

    @classmethod
    def of(cls, tensor: Tensor, returned: Sequence[_Returned]) -> _Input:
        """Keep an input tensor without its graph."""
        return cls(_reread(tensor, returned) or tensor.detach(), tensor.requires_grad)

    def restored(self) -> Tensor:
        """Return the tensor as a leaf."""
        return _unpacked(self.kept).detach().requires_grad_(self.carries)


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")
