"""What the plugin knows of one rank's stage while it trains. `stages` builds it, the cuts and the executor use it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.varuna_plugin.splitting.boundary import EntryCut, ExitCut
from varuna_capslog.varuna_plugin.splitting.partition import Partition, TieGroup
from varuna_capslog.varuna_plugin.wire import Bundle, Room

__all__ = ["Draws", "StageObserver", "StageRun"]


class Draws:
    """Random numbers that depend on the step, the microbatch and the piece, never on cuts, ranks or order.

    Varuna's own stream belongs to a rank, so that other cuts draw other numbers. Here the device's generator is seeded
    whenever a forward enters a piece, as our engine seeds a layer. Used where cuts change under a run.

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
            batches: its microbatches, as the same objects that the model is called with.
        """
        self._step = step
        self._numbers = {id(batch): index for index, batch in enumerate(batches)}

    def begin_forward(self, inputs: dict[str, Any]) -> None:
        """A forward or recomputation of this microbatch begins."""
        self._microbatch = self._numbers.get(id(inputs), 0)
        self._enter(0)

    def _enter(self, piece: int) -> None:
        seed_layer(self._device, self._seed, self._step, self._microbatch, piece)


class StageObserver:
    """Sees the backwards of one stage on Varuna; every method does nothing here."""

    def backward(self) -> AbstractContextManager[None]:
        """A context manager that is open while the stage carries out a backward, its waiting included."""
        return contextlib.nullcontext()

    def gradients_arrived(self) -> None:
        """Called when the stage behind has sent what a backward waits for."""


class StageRun:
    """One rank's stage, and where its forward stands.

    Attributes:
        partition, stage: which pieces these are.
        ties: all ties of the model; each rank acts on those of its stage.
        entry, exit: the stage's CutPoints, None at the pipeline's ends.
        bundle_type: of what leaves the stage.
        rooms: of the messages in each direction, by (task, "in" or "out").
        active: whether the forward has reached the stage's own code.
        left: whether it has reached the cut behind.
        gradients_sent: whether the backward under way has sent gradients to the stage before.
        draws: where random numbers must not depend on the cuts.
        observer: sees the stage's backwards.
    """

    def __init__(self, partition: Partition, stage: int, ties: Sequence[TieGroup]) -> None:
        self.partition, self.stage, self.ties = partition, stage, tuple(ties)
        self.bundle_type = Bundle
        self.rooms = defaultdict[tuple[int, str], Room](Room)
        self.entry: EntryCut | None = None
        self.exit: ExitCut | None = None
        self.active = self.left = self.gradients_sent = False
        self.draws: Draws | None = None
        self.observer = StageObserver()
        self._norms: list[nn.Module] | None = None

    def begin(self) -> None:
        """A forward begins."""
        self.active, self.left = self.stage == 0, False

    def norms(self, model: nn.Module) -> list[nn.Module]:
        """The modules of the stage that keep running statistics; looked for once."""
        if self._norms is None:
            norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
            self._norms = [module for module in norms if module._buffers.get("running_mean") is not None]
        return self._norms
