"""Random numbers that depend on the step, the microbatch and the piece, never on cuts, ranks or order.

Varuna's own stream belongs to a rank, so other cuts draw other numbers. Here every piece draws from a generator seeded
as our engine seeds a layer. Used where cuts change under a run; elsewhere Varuna's behaviour stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from varuna_capslog.engine.seeds import seed_layer

__all__ = ["Draws"]


class Draws:
    """Seeds the device's generator whenever a forward enters a piece.

    Args:
        points: the model's CutPoints in the order of the forward; their `boundary_func`, which Varuna leaves unused
            here, is taken.
        seed: of the run.
    """

    def __init__(self, points: Iterable[Any], device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._step = self._microbatch = 0
        self._numbers: dict[int, int] = {}
        for index, point in enumerate(points):
            point.boundary_func = lambda piece=index + 1: self._enter(piece)

    def begin_step(self, step: int, batches: Sequence[dict[str, Any]]) -> None:
        """A step begins.

        Args:
            batches: its microbatches, the very dictionaries that the model is given.
        """
        self._step = step
        self._numbers = {id(batch): index for index, batch in enumerate(batches)}

    def begin_forward(self, inputs: dict[str, Any]) -> None:
        """A forward or recomputation of this microbatch begins."""
        self._microbatch = self._numbers.get(id(inputs), 0)
        self._enter(0)

    def _enter(self, piece: int) -> None:
        seed_layer(self._device, self._seed, self._step, self._microbatch, piece)
