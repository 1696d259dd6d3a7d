"""What is alive in a stage that takes and hands on nothing but what its layers read and write (routes "direct").

A profile's rows come from stages that hand everything on (routes "relay"). In a stage of direct routes the tensors that
only others read are missing, a tensor that it takes is gone after its last reader here, and of a tensor that several
layers read each reader's gradient travels, waits and comes in by itself (engine rule 8).
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

    tensors: those of the profile that its layers read or write, their writers and readers elsewhere left out: what it
        takes has no writer, and what it hands on is read at its end.
    gradient: cut -> bytes of the gradients that are there when the backward has come down to it [L + 1].
    added: layer -> bytes of the sum that is made before its backward, where the readers of what it writes are all
        elsewhere [L].
    entering: (tensor of the profile, its last reader in the stage) of those that it takes.
    """

    tensors: tuple[TensorRecord, ...]
    gradient: Bytes
    added: Bytes
    entering: tuple[tuple[TensorRecord, int], ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorRecord], layers: Collection[int], num_layers: int) -> StageTensors:
        """Those of a stage of these layers."""
        end = max(layers) + 1
        own = {*layers} | ({num_layers} if end == num_layers else set())
        found, entering = [], []
        gradient, added = (np.zeros(num_layers + more, dtype=np.int64) for more in (1, 0))
        for one in tensors:
            here = [reader for reader in one.readers if reader in own]
            if one.writer not in own:
                if here:
                    found.append(dataclasses.replace(one, writer=None, readers=tuple(here)))
                    entering.append((one, here[-1]))
                for reader in here if one.gradient and one.writer is not None else ():
                    gradient[: reader + 1] += one.bytes
                continue
            others = [reader for reader in one.readers if reader not in own]
            ends = [end] if others and end not in here else []
            found.append(dataclasses.replace(one, readers=(*here, *ends)))
            if not one.gradient:
                continue
            for cut in range(one.writer + 1, end + 1):
                # a gradient from elsewhere waits until that of a reader before it is made here
                next_one = next((reader for reader in here if reader >= cut), None)
                waiting = sum(next_one is None or reader < next_one for reader in others)
                gradient[cut] += one.bytes * (waiting + (next_one is not None))
            if len(others) > 1 and not here:
                added[one.writer] = max(added[one.writer], one.bytes)
        return cls(tuple(found), gradient, added, tuple(entering))

    def gone(self, first: int, end: int) -> int:
        """Bytes of what enters, is read by layers [first, end), and has other readers behind them, but none here."""
        return sum(
            one.bytes
            for one, last in self.entering
            if last < end <= one.readers[-1] and any(first <= reader < end for reader in one.readers)
        )


@dataclass(frozen=True)
class Handed:
    """Bytes that go from stages to stages.

    activations, gradients: of each pair of stages: of a message from the first to the second, and of the one that comes
        back (-1 where none does).
    together: (bytes, numbers of pairs) of the tensors of one stage that it hands on over the same pairs.
    """

    activations: list[int]
    gradients: list[int]
    together: list[tuple[int, tuple[int, ...]]]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorRecord], pairs: Sequence[tuple[Collection[int], Collection[int]]], num_layers: int
    ) -> Handed:
        """What direct routes carry. pairs: the layers of both stages; a stage's are one object in all its pairs."""
        found, groups = cls([0] * len(pairs), [-1] * len(pairs), []), dict[tuple[int, ...], int]()
        reached = _reached(tensors, num_layers)
        for number, one in enumerate(tensors):
            over: dict[int, list[int]] = {}
            for place, (above, below) in enumerate(pairs):
                own = [layer for layer in one.readers if (layer if layer < num_layers else layer - 1) in below]
                if one.writer not in above or not own:
                    continue
                over.setdefault(id(above), []).append(place)
                found.activations[place] += one.bytes
                if count := sum((number, reader) in reached for reader in own):
                    found.gradients[place] = max(0, found.gradients[place]) + count * one.bytes
            for places in over.values():
                groups[tuple(places)] = groups.get(tuple(places), 0) + one.bytes
        found.together.extend((size, places) for places, size in groups.items())
        return found


def _reached(tensors: Sequence[TensorRecord], num_layers: int) -> set[tuple[int, int]]:
    """(tensor, layer that has a gradient for it): those from which the loss, layer L, is reached by gradients."""
    reaching, found = {num_layers}, set()
    by_reader: dict[int, list[int]] = {}
    for number, one in enumerate(tensors):
        for reader in one.readers if one.gradient else ():
            by_reader.setdefault(reader, []).append(number)
    for reader in sorted(by_reader, reverse=True):
        if reader in reaching:
            for number in by_reader[reader]:
                found.add((number, reader))
                writer = tensors[number].writer
                if writer is not None:
                    reaching.add(writer)
    return found
