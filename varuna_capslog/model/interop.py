"""Makes the stages of a rank for torch.distributed.pipelining from our cut lists.

It never runs a step. It refuses in advance problems that torch reports only in the middle of a run. `planning/export`
writes formats that hold no modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

__all__ = ["StageModule", "pipeline_stages"]


class StageModule(nn.Module):
    """Layers `first .. end-1` of a chain as one module: takes tensors by position, returns a tensor or a tuple.

    A tensor that no layer here changes is passed on. The chain's modules are used, not copied.

    Attributes:
        reads: names of the tensors that it takes: those that cross the cut before `first`.
        writes: names of the tensors that it returns: those that cross the cut before `end`.
    """

    def __init__(self, chain: Chain, first: int, end: int) -> None:
        super().__init__()
        chain.fill(range(first, end))
        self._layers = chain.layers[first:end]
        self.layers = nn.ModuleList(layer.module for layer in self._layers)
        self.reads = chain.inputs if first == 0 else chain.crossing(first)
        self.writes = chain.outputs if end == len(chain) else chain.crossing(end)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers on the tensors named by `reads`, in that order; return those named by `writes`."""
        values = dict(zip(self.reads, tensors, strict=True))
        received = {id(tensor) for tensor in tensors}
        for layer in self._layers:
            values.update(layer(values))
        # a tensor that passes through needs a node of its own: torch takes gradients at a stage's inputs and outputs
        results = tuple(
            values[name].clone() if id(values[name]) in received and values[name].requires_grad else values[name]
            for name in self.writes
        )
        return results[0] if len(results) == 1 else results


def pipeline_stages(
    chain: Chain,
    cuts: Sequence[int],
    rank: int,
    device: torch.device | str,
    inputs: Mapping[str, TensorSpec] | Sequence[Mapping[str, TensorSpec]],
    *,
    num_ranks: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[PipelineStage]:
    """Return this rank's stages of a cut list, ready for torch's schedules: stage s runs on rank s % num_ranks.

    `Schedule1F1B(stages[0], n_microbatches, loss_fn).step(...)` takes the chain's inputs by position in the order of
    `chain.inputs`; `loss_fn` gets its outputs (one tensor, or a tuple in the order of `chain.outputs`).

    Args:
        chain: its layers of this rank are moved to `device`.
        cuts: first layer of each stage, beginning with 0 (a plan's `cuts`).
        rank: rank of this process within `group`.
        inputs: specs of one microbatch's inputs, or one such mapping per microbatch.
        num_ranks: processes in the pipeline; default: one per stage.
        group: passed on to torch; default: the world.

    Raises:
        CapslogError: bad cuts, or a case that torch's stages cannot run: microbatches of different shapes, a parameter
            used by two stages, tensors other than floating point between stages (before torch 2.13).
    """
    from torch.distributed.pipelining import PipelineStage

    chain.check_cuts(cuts)
    num_ranks = len(cuts) if num_ranks is None else num_ranks
    if not 0 <= rank < num_ranks:
        raise CapslogError(f"rank={rank} is not one of the pipeline's {num_ranks} ranks (0..{num_ranks - 1})")
    if len(cuts) % num_ranks:
        raise CapslogError(
            f"{len(cuts)} stages cannot be dealt evenly to {num_ranks} ranks, as torch's schedules need; "
            "change the cut list"
        )
    if not isinstance(inputs, Mapping):
        if not inputs:
            raise CapslogError("inputs is an empty list; give the specs of one microbatch")
        for number, specs in enumerate(inputs):
            if dict(specs) != dict(inputs[0]):
                raise CapslogError(
                    f"microbatch {number} has inputs of another shape or dtype than microbatch 0; torch's "
                    "PipelineStage fixes one shape for all microbatches: pad them to one size, or train with capslog's "
                    "own engine"
                )
        inputs = inputs[0]
    table = ShapeTable(chain, torch.device(device).type).boundaries(inputs)
    _refuse(chain, cuts, table)
    bounds = list(pairwise([*cuts, len(chain)]))
    stages = []
    for index in range(rank, len(cuts), num_ranks):
        module = StageModule(chain, *bounds[index]).to(device)
        before = {**inputs, **table[bounds[index][0]]}
        after = table[bounds[index][1]]
        stages.append(
            PipelineStage(
                module,
                index,
                len(cuts),
                torch.device(device),
                input_args=tuple(_example(before[name]) for name in module.reads),
                output_args=tuple(_example(after[name]) for name in module.writes),
                group=group,
            )
        )
    return stages


def _example(spec: TensorSpec) -> Tensor:
    return spec.empty("meta").requires_grad_(spec.requires_grad)


def _refuse(chain: Chain, cuts: Sequence[int], table: Sequence[Mapping[str, TensorSpec]]) -> None:
    stage_of = [sum(cut <= index for cut in cuts) - 1 for index in range(len(chain))]
    for shared in chain.shared:
        stages = sorted({stage_of[layer] for layer in shared.layers})
        if len(stages) > 1:
            raise CapslogError(
                f"the parameter {shared.name!r} is used by stages {stages}; torch.distributed.pipelining does not add "
                "the gradients of shared parameters: choose cuts that keep its layers in one stage, or train with "
                "capslog's own engine"
            )
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13):
        return
    for cut in cuts[1:]:
        for name, spec in table[cut].items():
            if not spec.dtype.is_floating_point:
                raise CapslogError(
                    f"{name!r} ({spec.dtype}) crosses the cut before layer {cut} ({chain.layers[cut].name!r}); torch "
                    f"{torch.__version__} passes only floating-point tensors between stages: use torch >= 2.13, or "
                    "train with capslog's own engine"
                )
