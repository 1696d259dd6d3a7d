"""What one member has in memory of the training state: its own layers, earlier boundaries, copies that follow.

The protocol says by layer and stamp what must be held. Own layers are live in the work, and the boundary before is kept
aside. A copy lies in a follower that makes each step late: with the step's update it is two boundaries at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varuna_capslog.elastic.member.work import Followed, LayerState, Work
from varuna_capslog.membership.generation import Held, Stamp

__all__ = ["Copy", "Holdings"]


class Due(NamedTuple):
    """A step that a follower has all for and has not made: until then it stands at the boundary before."""

    before: Stamp
    update: Mapping[str, Tensor]
    step: int
    scale: float


@dataclass
class Copy:
    """A layer of another member that this one follows, and the newest boundary that it can give."""

    followed: Followed
    stamp: Stamp
    due: Due | None = None


class Holdings:
    """The states of one member. Called by one thread.

    Attributes:
        live: the boundary of the own layers while a generation trains; None between two generations.
        copies: by layer.
        updates: what the copy of a layer needs to make a step, by both, until it is used.
        scales: how the gradients of a step are clipped, once it was voted on.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.live: Stamp | None = None
        self.copies: dict[int, Copy] = {}
        self._own: frozenset[int] = frozenset()
        self._held: Held = frozenset()
        self._kept: dict[tuple[int, Stamp], LayerState] = {}
        self._spare: dict[int, LayerState] = {}
        self._arriving: set[tuple[int, Stamp]] = set()
        self._shelf: dict[int, Copy] = {}
        self.updates: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self.scales: dict[int, float] = {}

    # -- looking -------------------------------------------------------------------------------------------------------

    def at(self, layer: int, stamp: Stamp) -> LayerState:
        """A held state, as it lies here. Raises KeyError where there is none: the protocol says there is."""
        found = self._kept.get((layer, stamp))
        if found is not None:
            return found
        if self.live == stamp and layer in self._own:
            return self._work.state(layer, copy=False)
        copy = self.copies.get(layer)
        if copy is not None and copy.due is not None and copy.due.before == stamp:
            return copy.followed.state(copy=False)
        if copy is not None and copy.stamp == stamp:
            self._make_due(layer, copy)
            return copy.followed.state(copy=False)
        raise KeyError((layer, stamp))

    def everything(self, held: Held) -> dict[tuple[int, Stamp], LayerState]:
        """All that the protocol holds."""
        found = {}
        for layer, stamp in sorted(held):
            with contextlib.suppress(KeyError):  # a state that is missing must not keep the others from being written
                found[(layer, stamp)] = self.at(layer, stamp)
        return found

    # -- coming and going ----------------------------------------------------------------------------------------------

    def take(self, layer: int, stamp: Stamp, state: LayerState) -> None:
        """A state that was received or loaded; it stays until the protocol has heard of it."""
        self._kept[(layer, stamp)] = state
        self._arriving.add((layer, stamp))

    def forget(self, held: Held) -> None:
        """Frees what the protocol holds no more; what is on its way into its hands stays."""
        self._held = held
        self._arriving -= held
        for entry in [entry for entry in self._kept if entry not in held and entry not in self._arriving]:
            state = self._kept.pop(entry)
            if entry[0] in self._own:  # its memory will hold the next boundary
                self._spare[entry[0]] = state

    def adopt(self) -> None:
        """A newer generation: what was under way in the older one will not come."""
        self.updates.clear()
        self.scales.clear()
        self._arriving.clear()

    # -- from one generation to the next -------------------------------------------------------------------------------

    def shelve(self, held: Held) -> None:
        """The generation has ended here: live layers and copies are put aside."""
        if self.live is None:
            return
        for layer, state in self._work.shelve().items():
            # a step that broke off on its way may have changed the layer: what was kept before it counts
            self._kept.setdefault((layer, self.live), state)
        self._held = held
        for layer, copy in self.copies.items():
            self._make_due(layer, copy)
            if (layer, copy.stamp) in held:
                self._kept[(layer, copy.stamp)] = copy.followed.state(copy=False)
        self._shelf, self.copies = self.copies, {}
        self._own, self.live = frozenset(), None
        self._spare = {}

    def open(self, own: Collection[int], copies: Iterable[int], base: Stamp) -> None:
        """The work has its layers; copies that are here are taken up again."""
        self.live, self._own = base, frozenset(own)
        for layer in own:
            del self._kept[(layer, base)]
        for layer in copies:
            shelved, state = self._shelf.get(layer), self._kept.get((layer, base))
            if state is None:
                continue
            if shelved is not None and shelved.stamp == base:
                self.copies[layer] = shelved
            else:
                self.follow(layer, base, state)
            del self._kept[(layer, base)]
        self._shelf = {}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def follow(self, layer: int, stamp: Stamp, state: LayerState) -> None:
        """Begins to follow a layer from this boundary."""
        self.copies[layer] = Copy(self._work.follow(layer, state), stamp)

    def keep_before(self) -> None:
        """Keeps the own layers as they are before a step changes them: all of them, or where it fails none."""
        assert self.live is not None
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        kept: dict[tuple[int, Stamp], LayerState] = {}
        for layer in self._own:
            live, spare = self._work.state(layer, copy=False), self._spare.pop(layer, {})
            # a script's state may change its shape from step to step
            if live.keys() != spare.keys() or any(spare[name].shape != tensor.shape for name, tensor in live.items()):
                spare = {name: torch.empty_like(tensor) for name, tensor in live.items()}
            targets += [spare[name] for name in live]
            sources += live.values()
            kept[(layer, self.live)] = spare
        if sources:
            torch._foreach_copy_(targets, sources)
        self._kept |= kept

    def advance(self, held: Held, generation: int) -> None:
        """Every copy can give the boundaries of the applied steps whose updates are here."""
        self._held = held
        for layer, copy in self.copies.items():
            while self.live is not None and copy.stamp.step < self.live.step:
                step = copy.stamp.step + 1
                update = self.updates.get((layer, step))
                if update is None or step not in self.scales:
                    break
                self._make_due(layer, copy)
                copy.due = Due(copy.stamp, update, step, self.scales[step])
                copy.stamp = Stamp(step, generation)
                del self.updates[(layer, step)]

    def _make_due(self, layer: int, copy: Copy) -> None:
        """Makes the step that is due, if one is."""
        due, copy.due = copy.due, None
        if due is None:
            return
        if (layer, due.before) in self._held:
            self._kept[(layer, due.before)] = copy.followed.state(copy=True)
        copy.followed.apply(due.update, due.step, due.scale)

    def prune(self, step: int, behind: bool) -> None:
        """After a step was applied: drops updates and scales that no copy will ask for.

        Args:
            behind: copies may be on their way that lag by more than one step.
        """
        reached = {layer: copy.stamp.step for layer, copy in self.copies.items()}
        self.updates = {
            (layer, number): update
            for (layer, number), update in self.updates.items()
            if number > reached.get(layer, step - 1)
        }
        if not behind:
            oldest = min([step - 1, *(number + 1 for number in reached.values())])
            self.scales = {number: scale for number, scale in self.scales.items() if number >= oldest}
