"""Bytes of one microbatch at each of its actions on a stage; a part of an observation.

An estimate reads them from the stage's own program, and the fold of a rank's actions (`memory/fold`) adds them up.
Without them only a stage's peak is known, but not the action that causes it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from varuna_capslog.base import fields

__all__ = ["HALVES", "LATER", "LEAST_MOMENT_BYTES", "ActionBytes"]

HALVES = ("input_half_bytes", "weight_half_bytes", "first_weight_half_bytes", "noted_bytes", "noted_seed_bytes")
"""Fields of a profile about backwards in two halves."""
LATER = (*HALVES, "moment_bytes", "lasting_bytes")
"""Fields that a file leaves out where they are not known."""

LEAST_MOMENT_BYTES = 512
"""Smaller moments stay on the device: an allocator for a GPU gives no smaller blocks, and step counts are read on the
host."""


@dataclass(frozen=True)
class ActionBytes:
    """Bytes of one microbatch on one stage, each the peak beside the bytes that were there when the action began.

    forward_bytes: of a forward, or a recomputation, that keeps its graph; its inputs were there.
    bare_bytes: of a forward that keeps no graph; its inputs were there.
    backward_bytes: of a backward where the parameters have gradients already; its graph and the gradients of its
        outputs were there.
    first_backward_bytes: of a backward that makes the parameters' gradients.
    update_bytes: between the last backward and the end of the step, beside static_bytes.
    gradient_bytes: the parameters' gradients, a part of static_bytes.
    shared_bytes: the part of boundary_out_bytes whose storages the graph keeps as well.
    statistics_bytes: running statistics, which a forward leaves until the end of the step.
    graph_bytes: the bytes that a backward frees, the stage's inputs included: `saved_bytes` and tensors that autograd
        does not show, such as random number states, but none that others hold as well, such as targets. None: not
        known.
    moved_bytes: the part of it that "offload" takes to the host tier: the layers' saved tensors. None: not known.
    staying_bytes: the part that stays on the device then: tensors that the loss reads and saves, and those that
        autograd does not show. None: not known.
    input_half_bytes: of the half of a backward that gives the gradients of the inputs; the graph and the gradients of
        the outputs were there. None: not known, here and below.
    weight_half_bytes: of the other half where the parameters have gradients already; the bytes held between the halves
        (`weight_bytes` of the observation) were there.
    first_weight_half_bytes: of one that makes the parameters' gradients.
    noted_bytes: the gradients that the first half keeps for the other, a part of the bytes held between them.
    noted_seed_bytes: the part of these with which the backward began: gradients of the outputs.
    moment_bytes: the optimizer's moments, a part of static_bytes: those tensors of LEAST_MOMENT_BYTES or more, which
        may wait in the host tier. None: not known.
    lasting_bytes: bytes beside static_bytes that remain from the first step on and are no tensor of the stage, such as
        the workspaces of cuBLAS; a part of the row's peak_bytes. A rank has them once, whatever stages and calls it
        has: the maximum of its layers. None: not known.
    """

    forward_bytes: int
    bare_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    update_bytes: int
    gradient_bytes: int
    shared_bytes: int = 0
    statistics_bytes: int = 0
    graph_bytes: int | None = None
    moved_bytes: int | None = None
    staying_bytes: int | None = None
    input_half_bytes: int | None = None
    weight_half_bytes: int | None = None
    first_weight_half_bytes: int | None = None
    noted_bytes: int | None = None
    noted_seed_bytes: int | None = None
    moment_bytes: int | None = None
    lasting_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, fields.whole(value, field.name))
