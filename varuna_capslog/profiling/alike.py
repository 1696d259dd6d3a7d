"""Which ranks of a pipeline, and how many microbatches of each, show the peaks of a whole step.

`rehearsal` runs every rank's program on fake tensors; for 32 ranks of 32 microbatches that takes longer than all the
rest of a plan. Where messages wait in host memory, what a rank holds on its device follows from its own program alone.
So a rank's step of a few microbatches has the peak of the whole step if the rank meets the same moments in both, and
two ranks of the same layers and the same moments have the same peak. Nothing is run here, and nothing is estimated.
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
"""Instructions that a moment looks back on: what an action left behind goes with the next one at the latest."""

_Doing: TypeAlias = tuple[str, str | None]


class ShortSteps:
    """The short steps of one pipeline of one stage per rank, without accumulation in several blocks.

    Args:
        options: of the whole step; it has one accumulation block.
        inputs_wait: whether the inputs or graphs of microbatches in flight wait on the device.
    """

    def __init__(self, chain: Chain, layout: Layout, options: EngineOptions, inputs_wait: bool) -> None:
        self._chain, self._layout, self._options, self._inputs_wait = chain, layout, options, inputs_wait
        self._programs = cache(self._lowered)

    @staticmethod
    def know(layout: Layout, options: EngineOptions) -> bool:
        """Whether a layout and its step are such a pipeline: nothing is offloaded, and no list is given."""
        one_each = [stage.rank for stage in layout.stages] == list(range(len(layout.stages)))
        plain = all(stage.grain == 1 and not stage.offloads for stage in layout.stages)
        given = options.actions is not None or layout.direct
        return one_each and plain and not given and options.num_blocks == layout.num_blocks == 1

    def microbatches(self, rank: int) -> int:
        """The fewest whose step takes the rank through the same moments as the whole step.

        All, for a rank that keeps something of every microbatch until the end of the step: parts of the loss, or
        running statistics.
        """
        whole = self._options.num_microbatches
        if self._collects(rank):
            return whole
        wanted = self._moments(rank, whole)
        return next((few for few in _SHORT if few < whole and self._moments(rank, few) == wanted), whole)

    def doings(self, rank: int) -> object:
        """Equal for ranks that have the same peak if they have the same layers; None for a rank that shares parameters
        with another one, with which it exchanges gradients.
        """
        own, whole = set(self._layout.layers_of(rank)), self._options.num_microbatches
        if any(own & set(shared.layers) and set(shared.layers) - own for shared in self._chain.shared):
            return None
        if self._collects(rank):
            return tuple(_doing(one) for one in self._programs(whole)[rank])
        return self._moments(rank, whole)

    def _collects(self, rank: int) -> bool:
        layers = [self._chain.layers[index] for index in self._layout.layers_of(rank)]
        return layers[-1] is self._chain.layers[-1] or any(any(tracking_modules(one.module)) for one in layers)

    def _lowered(self, microbatches: int) -> list[list[Instruction]]:
        graph = self._layout.graph(microbatches, self._chain.edges)
        options = self._options
        rows = scheduled(options.schedule, self._layout.stages, graph, options)
        return lower(rows, None, graph).programs

    def _moments(self, rank: int, microbatches: int) -> frozenset[object]:
        """For every instruction: the ones before it, and what the rank holds then besides its layers."""
        found, recent = set(), deque[_Doing](maxlen=_WINDOW)
        arrived, forwarded, built, began = 0, 0, 0, False
        program = self._programs(microbatches)[rank]
        for position, instruction in enumerate(program):
            doing = _doing(instruction)
            waiting = forwarded if self._inputs_wait else 0
            follows = _doing(program[position + 1]) if position + 1 < len(program) else None
            found.add((tuple(recent), doing, follows, arrived, waiting, built, began))
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
        return frozenset(found)


def _doing(instruction: Instruction) -> _Doing:
    if isinstance(instruction, Action):
        return "act", instruction.kind
    return ("receive" if isinstance(instruction, Recv) else "send"), instruction.message.kind
