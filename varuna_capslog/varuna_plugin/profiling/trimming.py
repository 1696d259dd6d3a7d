"""Model trimming on Varuna: stages that are not to be measured pass on dummy tensors of the right shapes.

CAPSlog, Sec. III-A. A trimmed stage takes in and sends out what the whole stage would, forwards and backwards, but
holds and computes nothing: its rank can be any small device. What is computed is without meaning; what it costs on the
stages of interest is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiling.trim import dummy_inputs
from varuna_capslog.varuna_plugin.splitting.partition import Partition, TieGroup
from varuna_capslog.varuna_plugin.splitting.stage_run import StageRun

__all__ = ["Shapes", "interesting_ties", "kept_names", "play_stage"]

Shapes = Callable[[Mapping[str, Any]], Sequence[Sequence[TensorSpec]]]
"""What crosses each cut of the model for given inputs."""


def interesting_ties(ties: Sequence[TieGroup], stages: Sequence[int]) -> tuple[TieGroup, ...]:
    """The ties that a stage of interest takes part in; no real stage is left in the others."""
    return tuple(tie for tie in ties if set(tie.stages) & set(stages))


def kept_names(partition: Partition, ties: Sequence[TieGroup], stage: int) -> set[str]:
    """What a trimmed stage holds all the same: its copies of what stages of interest share with it, so that their sums
    of gradients are of full size and have every partner.
    """
    return {name for tie in ties for name in tie.names if stage in partition.stages_of[name]}


class _Between(torch.autograd.Function):
    """Tensors made from nothing that are part of a graph; zeros go back to those received."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: tuple[Tensor, ...], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = [TensorSpec.of(tensor) for tensor in received]
        ctx.wanted = [tensor.requires_grad for tensor in received]
        ctx.device = anchor.device
        ctx.mark_non_differentiable(*[tensor for tensor in made if not tensor.dtype.is_floating_point])
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [spec.zeros(ctx.device) if wanted else None for spec, wanted in zip(ctx.specs, ctx.wanted, strict=True)]
        return None, None, *zeros


def play_stage(model: nn.Module, run: StageRun, shapes: Shapes, device: torch.device) -> None:
    """Makes the model's forward that of a trimmed stage; the model must have been reduced before."""

    def forward(**inputs: Any) -> Any:
        received: list[Tensor] = []
        if run.entry is not None:
            received = [leaf for leaf in pytree.tree_leaves(run.entry.point(None)) if isinstance(leaf, Tensor)]
        anchor = torch.empty(0, device=device, requires_grad=True)
        if run.exit is None:
            return _Between.apply(anchor, (torch.zeros((), device=device),), *received)[0]
        cut = run.partition.cuts[run.stage + 1] - 1
        specs = {str(index): spec for index, spec in enumerate(shapes(inputs)[cut])}
        made = tuple(value.to(device) for value in dummy_inputs(specs).values())
        tensors = _Between.apply(anchor, made, *received)
        # what needs no gradient in the model must need none here
        wanted = zip(tensors, run.exit.spec.tensors, strict=True)
        found = iter([tensor if spec.requires_grad else tensor.detach() for tensor, spec in wanted])
        leaves = [next(found) if present else None for present in run.exit.spec.present]
        return run.exit.point(*pytree.tree_unflatten(leaves, run.exit.spec.structure))

    model.forward = forward
