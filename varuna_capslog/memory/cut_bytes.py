"""Bytes of a profile's tensors across the cuts of a chain, for the whole chain or for one stage with direct routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from varuna_capslog.memory.costs import Bytes
from varuna_capslog.profiles.record import Profile, TensorRecord

__all__ = ["CutBytes", "LinkBytes", "StageTensors"]


# -- The tensors of a stage that receives and sends only what its layers read and write (routes "direct").
#
# The rows of a profile come from stages that pass everything on (routes "relay"). A stage with direct routes does not
# hold tensors that only other stages read, frees a received tensor after its last local reader, and exchanges a
# separate gradient for each reader of a tensor that several layers read.


@dataclass(frozen=True)
class StageTensors:
    """Tensors of one stage.

    tensors: those that its layers read or write, without writers and readers in other stages: a received tensor has no
        writer, and a sent one is read at the stage's end.
    gradient: cut -> bytes of the gradients in memory when the backward has reached the cut [L + 1].
    added: layer -> bytes of the sum of its output's gradients, where all of several readers are in other stages [L].
    entering: (tensor of the profile, its last reader in the stage) for each received tensor.
    """

    tensors: tuple[TensorRecord, ...]
    gradient: Bytes
    added: Bytes
    entering: tuple[tuple[TensorRecord, int], ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorRecord], layers: Collection[int], num_layers: int) -> StageTensors:
        """Return the tensors of a stage of these layers."""
        end = max(layers) + 1
        readable = {*layers} | ({num_layers} if end == num_layers else set())
        kept_tensors, entering = [], []
        gradient, added = (np.zeros(num_layers + more, dtype=np.int64) for more in (1, 0))
        for tensor in tensors:
            local = [reader for reader in tensor.readers if reader in readable]
            if tensor.writer not in readable:
                if local:
                    kept_tensors.append(dataclasses.replace(tensor, writer=None, readers=tuple(local)))
                    entering.append((tensor, local[-1]))
                for reader in local if tensor.gradient and tensor.writer is not None else ():
                    gradient[: reader + 1] += tensor.bytes
                continue
            others = [reader for reader in tensor.readers if reader not in readable]
            ends = [end] if others and end not in local else []
            kept_tensors.append(dataclasses.replace(tensor, readers=(*local, *ends)))
            if not tensor.gradient:
                continue
            for cut in range(tensor.writer + 1, end + 1):
                # a gradient from another stage waits until that of an earlier reader is computed in this stage
                next_reader = next((reader for reader in local if reader >= cut), None)
                waiting = sum(next_reader is None or reader < next_reader for reader in others)
                gradient[cut] += tensor.bytes * (waiting + (next_reader is not None))
            if len(others) > 1 and not local:
                added[tensor.writer] = max(added[tensor.writer], tensor.bytes)
        return cls(tuple(kept_tensors), gradient, added, tuple(entering))

    def read_elsewhere(self, first: int, end: int) -> int:
        """Return the bytes of received tensors that [first, end) reads, and that only other stages read later."""
        return sum(
            tensor.bytes
            for tensor, last in self.entering
            if last < end <= tensor.readers[-1] and any(first <= reader < end for reader in tensor.readers)
        )


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of the messages between pairs of stages. activations, gradients: by pair, bytes from the first stage to the
    second, and back (-1: no gradients are sent back). together: (bytes, numbers of pairs) for each group of a stage's
    tensors that are sent over the same pairs.
    """

    activations: list[int]
    gradients: list[int]
    together: list[tuple[int, tuple[int, ...]]]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorRecord], pairs: Sequence[tuple[Collection[int], Collection[int]]], num_layers: int
    ) -> LinkBytes:
        """Return the bytes on direct routes. pairs: the layers of both stages; a stage is one object in all pairs."""
        handed, groups = cls([0] * len(pairs), [-1] * len(pairs), []), dict[tuple[int, ...], int]()
        reached = _reached(tensors, num_layers)
        for number, tensor in enumerate(tensors):
            over: dict[int, list[int]] = {}
            for place, (above, below) in enumerate(pairs):
                readers = [layer for layer in tensor.readers if (layer if layer < num_layers else layer - 1) in below]
                if tensor.writer not in above or not readers:
                    continue
                over.setdefault(id(above), []).append(place)
                handed.activations[place] += tensor.bytes
                if count := sum((number, reader) in reached for reader in readers):
                    handed.gradients[place] = max(0, handed.gradients[place]) + count * tensor.bytes
            for places in over.values():
                groups[tuple(places)] = groups.get(tuple(places), 0) + tensor.bytes
        handed.together.extend((size, places) for places, size in groups.items())
        return handed


def _reached(tensors: Sequence[TensorRecord], num_layers: int) -> set[tuple[int, int]]:
    """Return the pairs (tensor, reader) where the loss's gradient reaches the reader and goes on to the tensor."""
    reaching, reached = {num_layers}, set()
    by_reader: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        for reader in tensor.readers if tensor.gradient else ():
            by_reader.setdefault(reader, []).append(number)
    for reader in sorted(by_reader, reverse=True):
        if reader in reaching:
            for number in by_reader[reader]:
                reached.add((number, reader))
                writer = tensors[number].writer
                if writer is not None:
                    reaching.add(writer)
    return reached


# -- Bytes that cross the cuts of a chain


class CutBytes:
    """Bytes of the tensors across the cuts 0 .. L of one profile's chain, in a call of `grain` microbatches.

    Args:
        boundaries: bytes across the cuts, for a profile without tensors.
        stage_tensors: of one stage with direct routes; None: stages pass on all tensors that cross their cuts.

    Attributes:
        tensors: of the profile or of the stage, in the sizes of a call.
        crossing, gradient: cut -> bytes of the tensors, and of their gradients, across the cut.
        carries: cut -> True where gradients cross it.
    """

    def __init__(
        self, profile: Profile, boundaries: Sequence[int], stage_tensors: StageTensors | None = None, grain: int = 1
    ) -> None:
        self._profile, self._stage, self.num_layers = profile, stage_tensors, profile.num_layers
        self.tensors = _of_calls(profile.tensors, grain) if stage_tensors is None else stage_tensors.tensors
        self._passed: dict[tuple[int, int], int] = {}
        self.crossing, self.gradient = list(boundaries), [0, *boundaries[1:]]
        if self.tensors:
            cuts = range(self.num_layers + 1)
            self.crossing = [self.passed(cut, cut) for cut in cuts]
            self.gradient = [sum(tensor.bytes for tensor in self._across(cut, cut) if tensor.gradient) for cut in cuts]
        if stage_tensors is not None:
            self.gradient = stage_tensors.gradient.tolist()
        self.carries = [cut > 0 and (size > 0 or not self.tensors) for cut, size in enumerate(self.gradient)]

    @property
    def edges(self) -> list[tuple[int, int]] | None:
        """Pairs of (layer that writes a tensor, layer that reads it); None where unknown."""
        return self._profile.known_edges

    def passed(self, first: int, end: int) -> int:
        """Return the bytes of the tensors that cross cut `first` and cut `end`; 0 for a profile without tensors."""
        if (first, end) not in self._passed:
            self._passed[first, end] = sum(tensor.bytes for tensor in self._across(first, end))
        return self._passed[first, end]

    def inputs_kept(self, first: int, end: int, cut: int | None = None) -> int:
        """Return the bytes of inputs kept to recompute a range; cut: only of inputs that also cross this later cut."""
        if self._stage is None:
            return self.crossing[first] if cut is None else self.passed(first, cut)
        read = self._entering(first, end + (end == self.num_layers))
        return sum(tensor.bytes for tensor, _ in read if cut is None or tensor.readers[-1] >= cut)

    def read_with_gradient(self, first: int, end: int) -> int:
        """Return the bytes of the inputs with a gradient that the range reads; 0 for a profile without tensors."""
        return sum(tensor.bytes for tensor, _ in self._entering(first, end) if tensor.gradient)

    def read_and_passed(self, first: int, end: int) -> int:
        """Return the bytes of the inputs that the range reads and that also cross its end."""
        return sum(tensor.bytes for tensor, _ in self._entering(first, end) if tensor.readers[-1] >= end)

    def left_before(self, first: int, end: int) -> Bytes:
        """Return, by layer, the bytes of inputs that the backward has freed before: only layers behind it read them."""
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
        """cut -> True where one graph may hold the layers on both sides; all False for a profile without tensors."""
        return _joined(self.tensors, self.num_layers)

    @cached_property
    def joined_in_rows(self) -> list[bool]:
        """`joined` in the stages that the rows of the profile come from."""
        return self.joined if self._stage is None else _joined(self._profile.tensors, self.num_layers)

    def _across(self, first: int, end: int) -> list[TensorRecord]:
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
