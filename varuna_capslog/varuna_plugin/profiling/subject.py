"""What is profiled on Varuna: one model, and all that a worker process must know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from varuna_capslog.varuna_plugin.splitting.tracing import Trace

__all__ = ["MakeOptimizer", "Subject"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Subject:
    """What every worker is given: the model and all that is known of it.

    Attributes:
        build: gives the model.
        batch: inputs of one microbatch, on the CPU.
        trace: of the model on that batch.
        optimizer: makes the optimizer of a stage.
    """

    build: Callable[[], nn.Module]
    batch: Mapping[str, Any]
    trace: Trace
    chunk_size: int
    optimizer: MakeOptimizer
    loss: Literal["mean", "sum"]
    timeout_seconds: float

    def __call__(self) -> Subject:
        return self
