"""Upper bounds on the memory of profiling runs, and the free memory, so that not too many runs start at once.

Bounds come from fake tensors, before anything is real. They are generous: a run that needs less than its bound costs
only waiting, but a run that needs more could take the machine down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog import accelerator
from varuna_capslog.base.machine_memory import available_bytes
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import VALUE_ERRORS, NeedsValues, ReadNumbers
from varuna_capslog.model.low_weights import low_bytes
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import autocast_context, call_on, fake_operands

__all__ = ["BoundTable", "free_bytes"]

_CONTEXT_BYTES = 1 << 30
_BOUNDARY_COPIES = 4
"""Of both boundaries, in the measured stage: in use, kept for a recomputation, posted or under way, gradients."""
_LARGEST_COPIES = 3
"""Of the largest parameter: a gradient not yet added, a copy in a kernel's own layout, the update's scratch."""
_NEIGHBOUR_COPIES = 6
"""Of both boundaries, in the host memory of the process that plays the neighbours."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that new work may take on a device now: free by its driver, or available by the system."""
    return available_bytes() if device.type == "cpu" else accelerator.memory_info(device)[0]


class BoundTable:
    """Upper bounds on the bytes of trimmed runs, from one fake forward per distinct layer.

    A layer counts twice its trainable parameters (value and gradient; on an accelerator once more, for an update of all
    of them together), their copies of 16 bits and their optimizer state, the largest one 3 times more, the frozen ones
    and its buffers once, and twice the bytes that its forward saves (backward holds gradients of at most that size
    beside them). The loss is not counted. Equal layers are traced once.

    Args:
        chain: from `skeleton`.
        specs: of the tensors across the cuts 0 .. L.
        blocks: accumulation blocks; from two on a second sum of gradients counts.
        weights: the dtype in which parameters are kept; their layers are traced with parameters of float32.
    """

    def __init__(
        self,
        chain: Chain,
        specs: Sequence[Mapping[str, TensorSpec]],
        device_type: str,
        precision: str,
        blocks: int = 1,
        recipe: Recipe | None = None,
        weights: str = "float32",
    ) -> None:
        self._weights = weights
        self._chain, self._specs, self._device_type = chain, specs, device_type
        self._precision, self._blocks, self._recipe = precision, blocks, recipe or Recipe()
        self._traced: dict[object, int] = {}

    def bound_bytes(self, first: int, end: int, chain: Chain | None = None) -> int:
        """Return an upper bound on the bytes of the run of layers [first, end) on its device (on the CPU with those of
        its neighbours).

        chain: another chain, whose layers pass on the same tensors.
        """
        layers = (chain or self._chain).layers
        on_cpu = self._device_type == "cpu"
        crossing = sum(spec.num_bytes for cut in (self._specs[first], self._specs[end]) for spec in cut.values())
        total = crossing * (_BOUNDARY_COPIES + (_NEIGHBOUR_COPIES if on_cpu else 0))
        total += 0 if on_cpu else _CONTEXT_BYTES
        for index in range(first, end):
            total += self._static(layers[index]) + 2 * self._saved(layers[index], self._specs[index])
        return total

    def _static(self, layer: Layer) -> int:
        copies = 2 + (self._blocks > 1) + (self._device_type != "cpu")
        total = sum(buffer.nbytes for buffer in layer.module.buffers()) + low_bytes(layer.module, self._weights)[0]
        largest = 0
        for parameter in layer.module.parameters():
            size = parameter.numel() * parameter.itemsize
            total += size * copies + sum(self._recipe.kept(parameter).values()) if parameter.requires_grad else size
            largest = max(largest, size)
        return total + _LARGEST_COPIES * largest

    def _saved(self, layer: Layer, cut: Mapping[str, TensorSpec]) -> int:
        read = tuple(cut[name] for name in layer.reads)
        key = (layer_signature(layer), read)
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(layer, read)
            except VALUE_ERRORS as error:
                raise NeedsValues(f"layer {layer.name!r}", error) from error
        return self._traced[key]

    def _trace(self, layer: Layer, read: Sequence[TensorSpec]) -> int:
        """Return the bytes that a forward saves, its inputs and outputs included."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            state, arguments = fake_operands(layer, read, "cpu")
            saved: list[Tensor] = list(arguments)

            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor)
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                autocast_context("cpu", self._precision),
                ReadNumbers(),
            ):
                saved.extend(call_on(layer, state, arguments))
            state_storages = {tensor.untyped_storage()._cdata for tensor in state.values()}
            sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
            return sum(size for key, size in sizes.items() if key not in state_storages)
