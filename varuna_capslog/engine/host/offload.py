"""Offloads the tensors of one call of a stage to the host tier: every storage once, and every tensor on it back as it
was.

`torch.autograd.graph.saved_tensors_hooks` takes the tensors that autograd saves. They stay where they are until `leave`
has copied their storages and `settle` has let go of them. `come_back` brings the storages back to the device; a tensor
that is asked for before its copy has ended waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.engine.host.tier import HostRegion, HostTier, Wait

__all__ = ["GradientBox", "OffloadedCall", "OffloadedTensor", "entered", "laid_out"]


class _Storage:
    """A storage that is offloaded.

    tensors: those on it, by number, as long as they are on the device. forms: (dtype, size, stride, offset) of all.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.forms: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        self.region: HostRegion | None = None
        self.returned: Tensor | None = None
        self.wait: Wait | None = None

    def add(self, tensor: Tensor) -> int:
        number = len(self.forms)
        self.tensors[number] = tensor
        self.forms.append((tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())))
        return number

    def arrive(self) -> None:
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait()

    def get(self, number: int) -> Tensor:
        if number in self.tensors:
            return self.tensors[number]
        assert self.returned is not None, "a tensor was asked for while it was away"
        self.arrive()
        dtype, size, stride, offset = self.forms[number]
        usable = self.returned[: self.returned.numel() // dtype.itemsize * dtype.itemsize]
        return usable.view(dtype).as_strided(size, stride, offset)


class OffloadedTensor:
    """A tensor that an `OffloadedCall` has taken; it keeps its storage's memory, and nothing else does."""

    __slots__ = ("number", "storage")

    def __init__(self, storage: _Storage, number: int) -> None:
        self.storage, self.number = storage, number

    def get(self) -> Tensor:
        """The tensor, on the device."""
        return self.storage.get(self.number)


class OffloadedCall:
    """The storages of one call of a stage."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        # Storages on the device, by address, which is valid as long as their tensors hold them; and those in the tier,
        # by the order in which they left, so that memory is requested in one order.
        self._here: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._away: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._order = itertools.count()
        self._regions: list[HostRegion] = []
        self._copies: list[Wait] = []

    def take(self, tensor: Tensor) -> OffloadedTensor:
        """Takes a tensor, whose storage leaves with the call."""
        key = tensor.untyped_storage()._cdata
        storage = self._here.get(key)
        if storage is None:
            storage = self._here[key] = _Storage()
        return OffloadedTensor(storage, storage.add(tensor))

    def taking_what_is_saved(self, apart_from: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Context in which tensors that autograd saves are taken, but for those on the storages of `apart_from`."""
        stays = {tensor.untyped_storage()._cdata for tensor in apart_from}

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            return tensor if tensor.untyped_storage()._cdata in stays else self.take(tensor)

        def unpack(packed: Tensor | OffloadedTensor) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed.get()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def leave(self, beside: bool) -> None:
        """Begins to copy all storages that something still needs; see `HostTier.leave`."""
        for storage in list(self._here.values()):
            tensor = next(iter(storage.tensors.values()))
            if storage.region is None and tensor.untyped_storage().nbytes():
                storage.region, storage.wait = self._tier.leave(tensor, beside)
                self._regions.append(storage.region)
                self._copies.append(storage.wait)

    def settle(self) -> None:
        """Waits until all have left, and lets go of the device's memory."""
        for key, storage in list(self._here.items()):
            if storage.region is not None:
                storage.arrive()
                storage.tensors.clear()
                self._away[next(self._order)] = storage
                del self._here[key]

    def come_back(self, beside: bool) -> None:
        """Begins to bring all storages back that have left and that something still needs."""
        self.settle()
        for storage in list(self._away.values()):
            if storage.returned is None:
                assert storage.region is not None
                storage.returned, storage.wait = self._tier.come_back(storage.region, beside)
                self._copies.append(storage.wait)

    def end(self) -> None:
        """Gives the host's memory back: all tensors that were taken have been read, or are not wanted any more."""
        for wait in self._copies:
            with contextlib.suppress(Exception):  # the reader of that copy has had the error
                wait()
        self._copies.clear()
        while self._regions:
            self._tier.give_back(self._regions.pop())


def laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """The tensor in this memory layout; itself where it has it. Contiguous where several elements would lie in one
    place, as in a tensor made by `expand`.
    """
    if tensor.stride() == tuple(stride):
        return tensor
    if any(step == 0 and size > 1 for step, size in zip(stride, tensor.shape, strict=True)):
        return tensor.contiguous()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class GradientBox:
    """Receives the gradient of a tensor that a graph reads and nothing holds; like a leaf's, in `grad`."""

    def __init__(self, stride: tuple[int, ...]) -> None:
        self.grad: Tensor | None = None
        self._stride = stride

    def stride(self) -> tuple[int, ...]:
        """The stride of the tensor, which its gradient gets as well."""
        return self._stride


class _Entry(torch.autograd.Function):
    """The beginning of a graph, which a leaf would be if autograd did not hold every leaf."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, tensor: Tensor, box: GradientBox) -> Tensor:
        context.box = box
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.box.grad = laid_out(gradient, context.box.stride())
        return None, None, None


def entered(tensor: Tensor) -> tuple[Tensor, GradientBox]:
    """A tensor that a graph can read without holding it, and the box in which its gradient arrives."""
    box = GradientBox(tensor.stride())
    with torch.enable_grad():
        return _Entry.apply(torch.empty(0, requires_grad=True), tensor, box), box
