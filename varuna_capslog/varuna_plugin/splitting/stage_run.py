"""What the plugin knows of one rank's stage while it trains. `stages` builds it, the cuts and the executor use it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from varuna_capslog.varuna_plugin.drawing import Draws
from varuna_capslog.varuna_plugin.splitting.boundary import Entry, Exit
from varuna_capslog.varuna_plugin.splitting.partition import Partition, TieGroup
from varuna_capslog.varuna_plugin.wire import Bundle, Room

__all__ = ["StageObserver", "StageRun"]


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
        trimmed: whether dummy tensors stand for what the stage would compute.
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
        self.trimmed = False
        self.bundle_type = Bundle
        self.rooms = defaultdict[tuple[int, str], Room](Room)
        self.entry: Entry | None = None
        self.exit: Exit | None = None
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
