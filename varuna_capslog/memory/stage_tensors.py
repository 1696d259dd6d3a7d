"""The tensors of a stage that receives and sends only what its layers read and write (routes "direct").

The rows of a profile come from stages that pass everything on (routes "relay"). A stage with direct routes does not
hold tensors that only other stages read, frees a received tensor after its last local reader, and exchanges a separate
gradient for each reader of a tensor that several layers read (engine rule 8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from varuna_capslog.memory.costs import Bytes
from varuna_capslog.profiles.record import TensorRecord

__all__ = ["Handed", "StageTensors"]


@dataclass(frozen=True)
class StageTensors:
    """The tensors of one stage.

    tensors: those of the profile that its layers read or write, without writers and readers in other stages: a received
        tensor has no writer, and a sent one is read at the stage's end.
    gradient: cut -> bytes of the gradients in memory when the backward has reached it [L + 1].
    added: layer -> bytes of the sum that is made before its backward, where all readers of its output are in other
        stages [L].
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

    def gone(self, first: int, end: int) -> int:
        """Return bytes of the received tensors whose last local reader is in [first, end) and that are read later."""
        return sum(
            tensor.bytes
            for tensor, last in self.entering
            if last < end <= tensor.readers[-1] and any(first <= reader < end for reader in tensor.readers)
        )


@dataclass(frozen=True)
class Handed:
    """Bytes of the messages between pairs of stages.

    activations, gradients: for each pair, bytes of the message from the first stage to the second, and of the reply (-1
        where there is none).
    together: (bytes, numbers of pairs) of the tensors of one stage that it sends over the same pairs.
    """

    activations: list[int]
    gradients: list[int]
    together: list[tuple[int, tuple[int, ...]]]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorRecord], pairs: Sequence[tuple[Collection[int], Collection[int]]], num_layers: int
    ) -> Handed:
        """Return the bytes that direct routes carry.

        pairs: the layers of both stages. The layers of one stage must be the same object in all its pairs.
        """
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
    """Return pairs (tensor, reader that returns a gradient for it), for readers that a gradient of the loss reaches."""
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
