"""Bytes that cross the cuts of a chain, for the whole chain or for one stage with direct routes, from the tensors of
the profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from varuna_capslog.memory.costs import Bytes
from varuna_capslog.memory.stage_tensors import StageTensors
from varuna_capslog.profiles.record import Profile, TensorRecord

__all__ = ["CutBytes"]


class CutBytes:
    """The bytes of the tensors across the cuts of one profile's chain.

    Args:
        boundaries: bytes that cross the cuts 0 .. L, for a profile without tensors.
        alone: the tensors of one stage with direct routes. None: stages pass on all tensors that cross their cuts.
        grain: microbatches of a call.

    Attributes:
        tensors: of the profile, or of the stage, as large as a call has them.
        crossing, gradient: bytes of the tensors, and of their gradients, across the cuts 0 .. L.
        carries: cut -> whether gradients cross it.
    """

    def __init__(
        self, profile: Profile, boundaries: Sequence[int], alone: StageTensors | None = None, grain: int = 1
    ) -> None:
        self._profile, self._alone, self.num_layers = profile, alone, profile.num_layers
        self.tensors = _of_calls(profile.tensors, grain) if alone is None else alone.tensors
        self._passed: dict[tuple[int, int], int] = {}
        self.crossing, self.gradient = list(boundaries), [0, *boundaries[1:]]
        if self.tensors:
            cuts = range(self.num_layers + 1)
            self.crossing = [self.passed(cut, cut) for cut in cuts]
            self.gradient = [sum(tensor.bytes for tensor in self._across(cut, cut) if tensor.gradient) for cut in cuts]
        if alone is not None:
            self.gradient = alone.gradient.tolist()
        self.carries = [cut > 0 and (size > 0 or not self.tensors) for cut, size in enumerate(self.gradient)]

    @property
    def edges(self) -> list[tuple[int, int]] | None:
        """Pairs of (layer that writes a tensor, layer that reads it); None where they are not known."""
        return self._profile.known_edges

    def passed(self, first: int, end: int) -> int:
        """Bytes of the tensors that cross cut `first` and, untouched, cut `end`; 0 where the profile has no tensors."""
        if (first, end) not in self._passed:
            self._passed[first, end] = sum(tensor.bytes for tensor in self._across(first, end))
        return self._passed[first, end]

    def inputs_kept(self, first: int, end: int, cut: int | None = None) -> int:
        """Bytes of the input tensors that are kept for a range that will run again.

        cut: count only the inputs that also cross, untouched, this cut behind the range.
        """
        if self._alone is None:
            return self.crossing[first] if cut is None else self.passed(first, cut)
        read = self._entering(first, end + (end == self.num_layers))
        return sum(tensor.bytes for tensor, _ in read if cut is None or tensor.readers[-1] >= cut)

    def read_with_gradient(self, first: int, end: int) -> int:
        """Bytes of the inputs that the range's graph keeps for their gradients, as far as the profile knows."""
        return sum(tensor.bytes for tensor, _ in self._entering(first, end) if tensor.gradient)

    def read_and_passed(self, first: int, end: int) -> int:
        """Bytes of the inputs that the range reads and that cross, untouched, its end."""
        return sum(tensor.bytes for tensor, _ in self._entering(first, end) if tensor.readers[-1] >= end)

    def left_before(self, first: int, end: int) -> Bytes:
        """Return, for each layer of the range, bytes of the range's inputs that only layers behind it read.

        A backward has freed them before it comes to the layer.
        """
        sizes = np.zeros(end - first + 1, dtype=np.int64)
        for tensor, reader in self._entering(first, end):
            sizes[reader - first] += tensor.bytes
        return np.cumsum(sizes[::-1])[::-1][1:]

    def graph_ends(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield each layer of the range, the last first, and the end of the graph that holds it."""
        until = end
        for layer in range(end - 1, first - 1, -1):
            until = until if self.joined[layer + 1] else layer + 1
            yield layer, until

    @cached_property
    def joined(self) -> list[bool]:
        """cut -> True where one graph may hold the layers on both sides of it; all False where no tensors are known."""
        return _joined(self.tensors, self.num_layers)

    @cached_property
    def joined_in_rows(self) -> list[bool]:
        """`joined` in the stages that the rows of the profile come from."""
        return self.joined if self._alone is None else _joined(self._profile.tensors, self.num_layers)

    def _across(self, first: int, end: int) -> list[TensorRecord]:
        """Return the tensors that cross both cuts."""
        return [tensor for tensor in self._at_cut[first] if tensor.readers[-1] >= end]

    def _entering(self, first: int, end: int) -> Iterator[tuple[TensorRecord, int]]:
        """Yield the input tensors that layers of the range read, each with the first layer that reads it."""
        for tensor in self._at_cut[first]:
            reader = next((reader for reader in tensor.readers if reader >= first), end)
            if reader < end:
                yield tensor, reader

    @cached_property
    def _at_cut(self) -> list[list[TensorRecord]]:
        """cut -> the tensors that cross it."""
        tensors: list[list[TensorRecord]] = [[] for _ in range(self.num_layers + 1)]
        for tensor in self.tensors:
            for cut in range(0 if tensor.writer is None else tensor.writer + 1, tensor.readers[-1] + 1):
                tensors[cut].append(tensor)
        return tensors


def _of_calls(tensors: Sequence[TensorRecord], grain: int) -> tuple[TensorRecord, ...]:
    """Return the tensors with their bytes in a call of `grain` microbatches."""
    return tuple(
        tensor if tensor.fixed or grain == 1 else replace(tensor, bytes=grain * tensor.bytes) for tensor in tensors
    )


def _joined(tensors: Sequence[TensorRecord], num_layers: int) -> list[bool]:
    joined = [bool(tensors)] * (num_layers + 1)
    for tensor in tensors:
        if tensor.gradient:
            for cut in range((tensor.writer or 0) + 1, tensor.readers[-1] + 1):
                joined[cut] &= tensor.writer == cut - 1 and tensor.readers == (cut,)
    return joined
