"""What an engine offers to code that looks at its work, and the host memory that it uses: both are given to its
constructor.

A profiler reads the work of a stage, and a test makes faults happen between two instructions. Both derive from
`Observer` and override what they need; an engine without an observer does nothing in their place. `HostMemory` is
where inputs wait for a recomputation; an estimate replaces it by memory that is not there.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from varuna_capslog.schedules.lower import Instruction

if TYPE_CHECKING:
    from varuna_capslog.engine.stage import MicrobatchContext, Stage

__all__ = ["HostMemory", "Kept", "Observer"]


class Observer:
    """Sees the work of one engine; every method does nothing here. It must not change any tensor."""

    def instruction(self, position: int, instruction: Instruction) -> None:
        """Called before each instruction of this rank's program, in a training step and in an evaluation.

        Args:
            position: of the instruction in its program, counted from 0.
        """

    def working(self, kind: str, stage: Stage, context: MicrobatchContext) -> AbstractContextManager[None]:
        """A context manager that is open while `stage` carries out one action of training.

        Args:
            kind: "F" (forward), "R" (recomputation) or "B" (backward), as in the schedule.
        """
        return contextlib.nullcontext()


class Kept(Protocol):
    """A tensor that waits in host memory; `torch.Tensor` is one."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        """The tensor on a device."""


class HostMemory:
    """Pinned host memory."""

    def keep(self, tensor: Tensor) -> Kept:
        """A copy of a device's tensor; the copying goes on while the caller continues."""
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
