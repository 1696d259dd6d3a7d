"""What is the same in every engine's training step: its order, which microbatches a rank runs, copies compared.

Functions over the protocol `interface.Engine`; the engines call them, and none of them knows how a step is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.engine.interface import Engine, Load
from varuna_capslog.engine.options import EngineOptions, Layout, StepResult
from varuna_capslog.model.workload import Minibatch

__all__ = ["check_minibatch", "microbatches_of", "train_step", "verify_copies"]


def train_step(
    engine: Engine,
    step: int,
    minibatch: Minibatch,
    load: Load,
    stop: bool = False,
    before_commit: Callable[[], None] | None = None,
) -> StepResult:
    """One optimizer step on all ranks under the commit rule: nothing of the model changes before all ranks know that
    the step is finite, and no rank waits for another after that.

    Args:
        step: counted from 1; with the run's seed it fixes all random numbers.
        load: global microbatch -> inputs; called on the rank of stage 0.
        stop: this rank wishes to stop after the step; every rank learns of it.
        before_commit: called between the vote and the update, when all gradients are there.

    Raises:
        StepRefused: loss or gradients are not finite; the model is as before the step.
        PeerLost: another rank is gone.
    """
    engine.compute(step, minibatch, load)
    verdict = engine.vote(step, minibatch, stop)
    if verdict.refusal is not None:
        engine.forget()
        raise StepRefused(verdict.refusal)
    if before_commit is not None:
        before_commit()
    return engine.apply(verdict)


def check_minibatch(minibatch: Minibatch, options: EngineOptions) -> None:
    """Raises CapslogError for another number of microbatches than the run's, which its sums are made for."""
    if len(minibatch.inputs) != options.num_microbatches:
        raise CapslogError(
            f"the minibatch has {len(minibatch.inputs)} microbatches, the run is set to {options.num_microbatches}"
        )


def microbatches_of(layout: Layout, options: EngineOptions, rank: int) -> range:
    """Global indices of the microbatches that a rank's replica runs; none for an idle rank."""
    if rank >= layout.world_size:
        return range(0)
    count, replica = options.num_microbatches // layout.replicas, rank // layout.devices
    return range(replica * count, (replica + 1) * count)


def verify_copies(engine: Engine) -> None:
    """Compares every parameter that several ranks hold (shared uses, replicas) by digest (engine rule 3).

    Raises:
        CapslogError: two ranks disagree, naming the parameter and the ranks.
    """
    layout = engine.layout
    digests = {address: _digest(parameter) for address, parameter in engine.optimizer.parameters.items()}
    seen: dict[str, tuple[int, Any]] = {}
    for rank, theirs in enumerate(engine.communicator.gather(digests)):
        for address, digest in theirs.items():
            first, known = seen.setdefault(address, (rank, digest))
            if known != digest:
                raise CapslogError(
                    f"parameter {address!r} differs between {layout.describe(first)} and {layout.describe(rank)}; the "
                    "run is damaged: resume from the last checkpoint"
                )


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()
