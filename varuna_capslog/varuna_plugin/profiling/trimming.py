"""Model trimming on Varuna (CAPSlog, Sec. III-A): stages that are not to be measured pass on dummy tensors.

A trimmed stage receives and sends tensors of the same shapes as the whole stage, forwards and backwards, but holds and
computes nothing: its rank can be any small device. The values have no meaning; the memory and time of the stages of
interest do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiling.trim import dummy_inputs
from varuna_capslog.varuna_plugin.splitting.stage_run import StageDone, StageRun, anchor_on
from varuna_capslog.varuna_plugin.splitting.tracing import Partition, TieGroup, flatten_cut

__all__ = ["CutShapes", "kept_names", "play_stage"]


def kept_names(partition: Partition, ties: Sequence[TieGroup], stage: int) -> set[str]:
    """Parameters that a trimmed stage shares with stages of interest, and keeps so that their sums of gradients have
    full size and every partner.
    """
    return {name for tie in ties for name in tie.names if stage in partition.stages_of[name]}


class CutShapes:
    """Shapes of the tensors that cross every cut for some inputs, from a fake forward, once per input sizes.

    model: whole; it is copied without its parameters' memory, and may be reduced afterwards. names: of the CutPoints,
    in the order of the forward.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            memo: dict[int, Any] = {id(parameter): copy.deepcopy(parameter) for parameter in model.parameters()}
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        self._model = copy.deepcopy(model, memo)
        self._found: list[tuple[TensorSpec, ...]] = []
        self._known: dict[str, list[tuple[TensorSpec, ...]]] = {}
        self._count = len(names)
        points = dict(self._model.named_modules())
        for name in names:
            points[name].cp_func = functools.partial(self._report, name)

    def __call__(self, inputs: Mapping[str, Any]) -> list[tuple[TensorSpec, ...]]:
        """Specs of each cut's tensors; the microbatch's values are never read.

        Raises CapslogError where a shape depends on values.
        """
        key = repr(pytree.tree_map_only(Tensor, lambda leaf: (tuple(leaf.shape), leaf.dtype), dict(inputs)))
        if key not in self._known:
            self._known[key] = self._run(pytree.tree_map_only(Tensor, self._mode.from_tensor, dict(inputs)))
        return self._known[key]

    def _run(self, fakes: dict[str, Any]) -> list[tuple[TensorSpec, ...]]:
        self._found = []
        # running statistics are copies: a fake forward may change them
        try:
            with self._mode, torch.enable_grad():
                self._model(**fakes)
        except StageDone:
            pass
        except Exception as error:
            raise CapslogError(
                f"the shapes at the cuts cannot be found without computing ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}): code before a cut asks tensors for their values; move it behind "
                "the last cut, or run all stages"
            ) from error
        return self._found

    def _report(self, name: str, *arguments: Any) -> Any:
        tensors, _, _ = flatten_cut(arguments, name)
        self._found.append(tuple(TensorSpec.of(tensor) for tensor in tensors))
        if len(self._found) == self._count:
            raise StageDone  # later code crosses no cut
        return arguments[0] if len(arguments) == 1 else arguments


class _Between(torch.autograd.Function):
    """Function that puts dummy tensors into the autograd graph; its backward gives zeros to the received tensors."""

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


def play_stage(model: nn.Module, run: StageRun, shapes: CutShapes | None, device: torch.device) -> None:
    """Replace the forward of a reduced model by that of a trimmed stage. shapes: at the cuts; None: as traced."""

    def forward(**inputs: Any) -> Any:
        received: list[Tensor] = []
        if run.entry is not None:
            received = [leaf for leaf in pytree.tree_leaves(run.entry.point(None)) if isinstance(leaf, Tensor)]
        anchor = anchor_on(device)
        if run.exit is None:
            return _Between.apply(anchor, (torch.zeros((), device=device),), *received)[0]
        cut = run.partition.cuts[run.stage + 1] - 1
        leaves = run.exit.spec.tensors if shapes is None else shapes(inputs)[cut]
        specs = {str(index): spec for index, spec in enumerate(leaves)}
        made = tuple(value.to(device) for value in dummy_inputs(specs).values())
        tensors = _Between.apply(anchor, made, *received)
        # tensors that need no gradient in the model must need none here
        wanted = zip(tensors, run.exit.spec.tensors, strict=True)
        leaving = [tensor if spec.requires_grad else tensor.detach() for tensor, spec in wanted]
        return run.exit.point(*run.exit.spec.arguments(leaving))

    model.forward = forward
