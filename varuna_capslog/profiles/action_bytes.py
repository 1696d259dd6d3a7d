"""What one microbatch takes at each of its actions on a stage; a part of an observation.

An estimate reads it from the stage's own program, and the fold of a rank's actions (`memory/fold`) adds it up. Without
it only a stage's peak is known, whichever action it belongs to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from varuna_capslog.base import fields

__all__ = ["HALVES", "LATER", "LEAST_MOMENT_BYTES", "ActionBytes"]

HALVES = ("input_half_bytes", "weight_half_bytes", "first_weight_half_bytes", "noted_bytes", "noted_seed_bytes")
"""What a profile says of backwards in two halves."""
LATER = (*HALVES, "moment_bytes", "lasting_bytes")
"""Left out of a file where it is not known."""

LEAST_MOMENT_BYTES = 512
"""Smaller moments stay on the device: an allocator for a GPU gives no smaller blocks, and step counts are read on the
host."""


@dataclass(frozen=True)
class ActionBytes:
    """Bytes of one microbatch on one stage, each the most beside what was there when the action began.

    forward_bytes: of a forward, or a recomputation, that keeps its graph; its inputs were there.
    bare_bytes: of a forward that keeps no graph; its inputs were there.
    backward_bytes: of a backward where the parameters have gradients already; its graph and the gradients of its
        outputs were there.
    first_backward_bytes: of a backward that makes the parameters' gradients.
    update_bytes: between the last backward and the end of the step, beside static_bytes.
    gradient_bytes: the parameters' gradients, a part of static_bytes.
    shared_bytes: the part of boundary_out_bytes whose storages the graph keeps as well.
    statistics_bytes: running statistics, which a forward leaves until the end of the step.
    graph_bytes: what a backward lets go of, the stage's inputs included: `saved_bytes` and what autograd does not show,
        such as states of random numbers, but nothing that others hold as well, such as targets. None: not known.
    moved_bytes: the part of it that "offload" takes to the host tier: what the layers saved. None: not known.
    staying_bytes: the part that stays on the device then: what the loss reads and saves, and what autograd does not
        show. None: not known.
    input_half_bytes: of the half of a backward that gives the gradients of the inputs; the graph and the gradients of
        the outputs were there. None: not known, here and below.
    weight_half_bytes: of the other half where the parameters have gradients already; what is held between the halves
        (`weight_bytes` of the observation) was there.
    first_weight_half_bytes: of one that makes the parameters' gradients.
    noted_bytes: the gradients that the first half notes for the other, a part of what is held between them.
    noted_seed_bytes: the part of these with which the backward began: gradients of the outputs.
    moment_bytes: the optimizer's moments, a part of static_bytes: those tensors of LEAST_MOMENT_BYTES or more, which
        may wait in the host tier. None: not known.
    lasting_bytes: what is there from the first step on beside static_bytes and is no tensor of the stage, such as the
        workspaces of cuBLAS; a part of the row's peak_bytes. A rank has it once, whatever stages and calls it has, and
        the most of its layers counts. None: nothing is known of it.
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
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                object.__setattr__(self, one.name, fields.whole(value, one.name))
