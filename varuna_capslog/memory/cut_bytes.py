"""What crosses the cuts of a chain, whole or as one stage with direct routes sees it, by the profile's tensors."""

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
        alone: what is alive in one stage with direct routes. None: stages hand on all that crosses their cuts.
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
            self.gradient = [sum(one.bytes for one in self._across(cut, cut) if one.gradient) for cut in cuts]
        if alone is not None:
            self.gradient = alone.gradient.tolist()
        self.carries = [cut > 0 and (size > 0 or not self.tensors) for cut, size in enumerate(self.gradient)]

    @property
    def edges(self) -> list[tuple[int, int]] | None:
        """(layer that writes a tensor, layer that reads it); None where it is not known."""
        return self._profile.known_edges

    def passed(self, first: int, end: int) -> int:
        """Bytes of the tensors that cross cut `first` and, untouched, cut `end`; 0 where the profile has no tensors."""
        if (first, end) not in self._passed:
            self._passed[first, end] = sum(one.bytes for one in self._across(first, end))
        return self._passed[first, end]

    def inputs_kept(self, first: int, end: int, cut: int | None = None) -> int:
        """Bytes of what is kept of the tensors before a range that will run again; where `cut` is given, of those that
        cross, untouched, a cut behind it.
        """
        if self._alone is None:
            return self.crossing[first] if cut is None else self.passed(first, cut)
        read = self._entering(first, end + (end == self.num_layers))
        return sum(one.bytes for one, _ in read if cut is None or one.readers[-1] >= cut)

    def read_with_gradient(self, first: int, end: int) -> int:
        """Bytes of the inputs that the range's graph keeps for their gradients, as far as the profile knows."""
        return sum(one.bytes for one, _ in self._entering(first, end) if one.gradient)

    def read_and_passed(self, first: int, end: int) -> int:
        """Bytes of the inputs that the range reads and that cross, untouched, its end."""
        return sum(one.bytes for one, _ in self._entering(first, end) if one.readers[-1] >= end)

    def left_before(self, first: int, end: int) -> Bytes:
        """For each layer of the range: bytes of what enters it and only layers behind that one read, so that a backward
        has let go of it before.
        """
        found = np.zeros(end - first + 1, dtype=np.int64)
        for one, reader in self._entering(first, end):
            found[reader - first] += one.bytes
        return np.cumsum(found[::-1])[::-1][1:]

    def graph_ends(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Each layer of the range, the last first, and the end of the graph that holds it."""
        until = end
        for layer in range(end - 1, first - 1, -1):
            until = until if self.joined[layer + 1] else layer + 1
            yield layer, until

    @cached_property
    def joined(self) -> list[bool]:
        """cut -> whether one graph may hold the layers on both sides of it; no cut where the tensors are not known."""
        return _joined(self.tensors, self.num_layers)

    @cached_property
    def joined_in_rows(self) -> list[bool]:
        """`joined` as the rows of the profile know it."""
        return self.joined if self._alone is None else _joined(self._profile.tensors, self.num_layers)

    def _across(self, first: int, end: int) -> list[TensorRecord]:
        """The tensors that cross both cuts."""
        return [one for one in self._at_cut[first] if one.readers[-1] >= end]

    def _entering(self, first: int, end: int) -> Iterator[tuple[TensorRecord, int]]:
        """The tensors from before a range that its layers read, each with the first layer that does."""
        for one in self._at_cut[first]:
            reader = next((reader for reader in one.readers if reader >= first), end)
            if reader < end:
                yield one, reader

    @cached_property
    def _at_cut(self) -> list[list[TensorRecord]]:
        """cut -> the tensors that cross it."""
        found: list[list[TensorRecord]] = [[] for _ in range(self.num_layers + 1)]
        for one in self.tensors:
            for cut in range(0 if one.writer is None else one.writer + 1, one.readers[-1] + 1):
                found[cut].append(one)
        return found


def _of_calls(tensors: Sequence[TensorRecord], grain: int) -> tuple[TensorRecord, ...]:
    """The tensors as large as a call of so many microbatches has them."""
    return tuple(one if one.fixed or grain == 1 else replace(one, bytes=grain * one.bytes) for one in tensors)


def _joined(tensors: Sequence[TensorRecord], num_layers: int) -> list[bool]:
    joined = [bool(tensors)] * (num_layers + 1)
    for one in tensors:
        if one.gradient:
            for cut in range((one.writer or 0) + 1, one.readers[-1] + 1):
                joined[cut] &= one.writer == cut - 1 and one.readers == (cut,)
    return joined
