"""Chooses the ranks of a pipeline, and numbers of microbatches, that show the peaks of a whole step.

`rehearsal` runs every rank's program on fake tensors; for 32 ranks of 32 microbatches that takes longer than all the
rest of a plan. Where messages wait in host memory, the bytes on a rank's device depend on its own program alone. So a
rank's step of a few microbatches has the peak of the whole step if the rank meets the same moments in both, and two
ranks of the same layers and the same moments have the same peak. This module runs and estimates nothing.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TypeAlias

from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.statistics import tracking_modules
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.schedules.actions import Action
from varuna_capslog.schedules.lower import Instruction, Recv, lower

__all__ = ["ShortSteps"]

_SHORT = range(2, 17)
"""Microbatches of a short step: the first makes the gradients, the next add to them. More are not worth a search."""
_WINDOW = 5
"""Number of preceding instructions in a moment: the leftovers of an action are freed by the next one at the latest."""

_Doing: TypeAlias = tuple[str, str | None]


class ShortSteps:
    """The short steps of one pipeline of one stage per rank, without accumulation in several blocks.

    Args:
        options: of the whole step; it has one accumulation block.
        inputs_wait: True where the inputs or graphs of microbatches in flight wait on the device.
    """

    def __init__(self, chain: Chain, layout: Layout, options: EngineOptions, inputs_wait: bool) -> None:
        self._chain, self._layout, self._options, self._inputs_wait = chain, layout, options, inputs_wait
        self._programs = cache(self._lowered)

    @staticmethod
    def know(layout: Layout, options: EngineOptions) -> bool:
        """Return True where a layout and its step are such a pipeline, without offloading and explicit action lists."""
        one_each = [stage.rank for stage in layout.stages] == list(range(len(layout.stages)))
        plain = all(stage.grain == 1 and not stage.offloads for stage in layout.stages)
        listed = options.actions is not None or layout.direct
        return one_each and plain and not listed and options.num_blocks == layout.num_blocks == 1

    def microbatches(self, rank: int) -> int:
        """Return the smallest number whose step takes the rank through the same moments as the whole step.

        It is the whole number for a rank that keeps tensors of every microbatch until the end of the step: parts of the
        loss, or running statistics.
        """
        count = self._options.num_microbatches
        if self._collects(rank):
            return count
        wanted = self._moments(rank, count)
        return next((few for few in _SHORT if few < count and self._moments(rank, few) == wanted), count)

    def doings(self, rank: int) -> object:
        """Return a key that is equal for ranks that have the same peak if they have the same layers; None for a rank
        that shares parameters with another one, with which it exchanges gradients.
        """
        layers, count = set(self._layout.layers_of(rank)), self._options.num_microbatches
        if any(layers & set(shared.layers) and set(shared.layers) - layers for shared in self._chain.shared):
            return None
        if self._collects(rank):
            return tuple(_doing(instruction) for instruction in self._programs(count)[rank])
        return self._moments(rank, count)

    def _collects(self, rank: int) -> bool:
        layers = [self._chain.layers[index] for index in self._layout.layers_of(rank)]
        return layers[-1] is self._chain.layers[-1] or any(any(tracking_modules(layer.module)) for layer in layers)

    def _lowered(self, microbatches: int) -> list[list[Instruction]]:
        graph = self._layout.graph(microbatches, self._chain.edges)
        options = self._options
        rows = scheduled(options.schedule, self._layout.stages, graph, options)
        return lower(rows, None, graph).programs

    def _moments(self, rank: int, microbatches: int) -> frozenset[object]:
        """Return, for every instruction, the instructions before it and the rank's state besides its layers."""
        moments, recent = set(), deque[_Doing](maxlen=_WINDOW)
        arrived, forwarded, built, began = 0, 0, 0, False
        program = self._programs(microbatches)[rank]
        for position, instruction in enumerate(program):
            doing = _doing(instruction)
            waiting = forwarded if self._inputs_wait else 0
            follows = _doing(program[position + 1]) if position + 1 < len(program) else None
            moments.add((tuple(recent), doing, follows, arrived, waiting, built, began))
            recent.append(doing)
            kind = doing[1] if doing[0] == "act" else None
            if isinstance(instruction, Recv):
                arrived += 1
            elif kind in ("F", "B"):
                arrived = 0
            if kind == "F":
                forwarded += 1
            elif kind == "R":
                built += 1
            elif kind == "B":
                forwarded, built, began = forwarded - 1, max(built - 1, 0), True
        return frozenset(moments)


def _doing(instruction: Instruction) -> _Doing:
    if isinstance(instruction, Action):
        return "act", instruction.kind
    return ("receive" if isinstance(instruction, Recv) else "send"), instruction.message.kind
