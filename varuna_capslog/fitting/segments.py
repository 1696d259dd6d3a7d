"""Runs a captured chain in one autograd graph, each range of its layers treated as its memory interval states.

`torch.utils.checkpoint` (without reentrance) recomputes a range, with torch's random numbers replayed; hooks of
autograd's saved tensors offload tensors to the host and bring them back. Values, gradients and the order in which
gradients are added are those of the chain without intervals. Side effects that a recomputed range must not repeat are
undone here: counting its batch in the running statistics of batch norms, drawing from Python's and numpy's generators,
and changing attributes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna_capslog import accelerator
from varuna_capslog.model.capture import runs_python
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.python_state import PythonState, RandomStates
from varuna_capslog.plans.parts import MemoryInterval, pieces_of

__all__ = ["SegmentedChain"]

_Form = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, size, stride and offset of a tensor on its storage."""


@dataclass(frozen=True)
class _Span:
    """Layers that are treated alike; names of the tensors that they read from before, and of those read behind them."""

    piece: MemoryInterval
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class SegmentedChain:
    """A chain with memory intervals.

    Args:
        chain: its layers are run as they are.
        intervals: in rising order; layers in none of them keep what autograd saves.
        end: the layer behind the last one that is run.
    """

    def __init__(self, chain: Chain, intervals: Sequence[MemoryInterval], end: int) -> None:
        self._chain, self.end, self._python = chain, end, runs_python(chain.layers)
        self._parts = [self._part(piece) for piece in pieces_of(0, end, intervals)]

    def _part(self, piece: MemoryInterval) -> _Span:
        written: set[str] = set()
        reads: dict[str, None] = {}
        for layer in self._chain.layers[piece.first : piece.end]:
            reads |= dict.fromkeys(name for name in layer.reads if name not in written)
            written |= set(layer.writes)
        return _Span(piece, tuple(reads), tuple(name for name in self._chain.crossing(piece.end) if name in written))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that cross the cut behind the last layer, by name."""
        values = dict(inputs)
        for part in self._parts:
            outputs = self._run_part(part, [values[name] for name in part.reads])
            alive = self._chain.crossing(part.piece.end)
            values = {name: tensor for name, tensor in values.items() if name in alive and name not in part.writes}
            values |= zip(part.writes, outputs, strict=True)
            del outputs
        return values

    def _run_part(self, part: _Span, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        modules = [layer.module for layer in self._chain.layers[part.piece.first : part.piece.end]]
        away: AbstractContextManager[Any] = contextlib.nullcontext()
        if part.piece.offloads:
            away = _to_host([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])

        def layers(*entering: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(part.reads, entering, strict=True))
            del entering
            for index in range(part.piece.first, part.piece.end):
                values |= self._chain.layers[index](values)
                alive = self._chain.crossing(index + 1)
                values = {name: tensor for name, tensor in values.items() if name in alive}
            return tuple(values[name] for name in part.writes)

        with away:
            if not part.piece.recomputes:
                return layers(*_taken(tensors))
            again = _Again(modules) if self._python else None
            contexts = lambda: (contextlib.nullcontext(), _uncounted(modules, again))  # noqa: E731
            outputs: tuple[Tensor, ...] = checkpoint(layers, *_taken(tensors), use_reentrant=False, context_fn=contexts)
            return outputs


def _taken(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors and remove them from the list, so that nothing else holds a tensor that a layer has read."""
    taken = tensors[:]
    tensors.clear()
    while taken:
        yield taken.pop(0)


class _Again:
    """State that the Python code of modules draws from and changes, before it runs for the first time."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = {
            f"{at}.{name}": part for at, module in enumerate(modules) for name, part in module.named_modules()
        }
        self._generators = PythonState(self._parts, files=True).generators
        self._before = RandomStates(self._generators)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the code draw the same numbers again; undo its draws and changes at the end."""
        now, state = RandomStates(self._generators), PythonState(self._parts, files=True)
        self._before.put_back()
        try:
            yield
        finally:
            state.put_back()
            now.put_back()


@contextlib.contextmanager
def _uncounted(modules: Sequence[nn.Module], again: _Again | None) -> Iterator[None]:
    """Make batch norms write their running statistics into copies, which are dropped at the end."""
    norms = [
        part
        for module in modules
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
    ]
    kept = [dict(part._buffers) for part in norms]
    for part in norms:
        part._buffers.update(
            {name: None if buffer is None else buffer.clone() for name, buffer in part._buffers.items()}
        )
    try:
        with again.open() if again is not None else contextlib.nullcontext():
            yield
    finally:
        for part, buffers in zip(norms, kept, strict=True):
            part._buffers.update(buffers)


class _Away:
    """A storage that is on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self._host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=accelerator.pins_memory(self._device.type))
        self._host.copy_(flat, non_blocking=True)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def get(self, form: _Form) -> Tensor:
        """Return a tensor on it, on the device again; tensors that are there together share one copy."""
        dtype, size, stride, offset = form
        back = None if self._back is None else self._back()
        if back is None:
            flat = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            back = flat.copy_(self._host, non_blocking=True).untyped_storage()
            self._back = weakref.ref(back)
        tensor: Tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(back, offset, size, stride)


def _to_host(apart_from: Collection[Tensor]) -> AbstractContextManager[Any]:
    """Context in which saved tensors are offloaded to the host, except those on the storages of `apart_from`.

    Copies are ordered with the device's work: they run on its current stream, to and from memory that is pinned where
    it can be.
    """
    stays = {tensor.untyped_storage()._cdata for tensor in apart_from}
    stored: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], _Away]] = {}

    def pack(tensor: Tensor) -> Tensor | tuple[_Away, _Form]:
        storage = tensor.untyped_storage()
        if storage._cdata in stays or not storage.nbytes():
            return tensor
        key = storage._cdata, tensor._version
        held = stored.get(key)
        if held is None or held[0]() is None:  # an address may be used again, and a tensor may have been written since
            held = stored[key] = weakref.ref(storage), _Away(storage)
        return held[1], (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | tuple[_Away, _Form]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].get(packed[1])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
