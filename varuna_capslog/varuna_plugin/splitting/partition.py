"""A trace cut into stages: the parameters and pieces of each stage. Pure data and functions; the same on every rank.

Stages are runs of pieces (the parts between CutPoints). A parameter or buffer belongs to every stage that uses it; the
first of these is its owner, which counts it once in the gradient norm and whose file holds it in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.splitting.tracing import CutSpec, Trace

__all__ = ["Partition", "TieGroup", "tie_groups", "uniform_cuts"]


def uniform_cuts(num_pieces: int, num_stages: int) -> tuple[int, ...]:
    """Return Varuna's own split: equally many pieces per stage, rounded down; the last stage takes the rest.

    Raises CapslogError where there are fewer pieces than stages.
    """
    if num_pieces < num_stages:
        raise CapslogError(
            f"the model has {num_pieces - 1} CutPoints, so {num_pieces} pieces, but {num_stages} stages; place more "
            "CutPoints or use fewer stages"
        )
    return tuple(stage * (num_pieces // num_stages) for stage in range(num_stages))


@dataclass(frozen=True)
class TieGroup:
    """Parameters that have one value and one gradient: one used by several stages, or several declared as shared.

    Attributes:
        names: the parameters.
        stages: all stages that hold one of them, ascending; the first counts it in the norm.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """A trace and the first piece of each stage.

    Raises CapslogError unless the cuts fit the number of pieces.
    """

    trace: Trace
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "cuts", fields.cut_list(self.cuts, self.trace.num_pieces))
        except CapslogError as error:
            raise CapslogError(
                f"{error} (the model has {len(self.trace.cuts)} CutPoints, so pieces 0 to {len(self.trace.cuts)})"
            ) from None

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline."""
        return len(self.cuts)

    def pieces(self, stage: int) -> range:
        """Return the pieces of a stage."""
        end = self.cuts[stage + 1] if stage + 1 < len(self.cuts) else self.trace.num_pieces
        return range(self.cuts[stage], end)

    def stage_of(self, piece: int) -> int:
        """Return the stage that holds a piece."""
        return sum(cut <= piece for cut in self.cuts) - 1

    @cached_property
    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """Stages that use each parameter and buffer, ascending."""
        return {
            name: tuple(sorted({self.stage_of(piece) for piece in pieces}))
            for name, pieces in (*self.trace.parameters.items(), *self.trace.buffers.items())
        }

    @cached_property
    def home(self) -> dict[str, int]:
        """Piece whose checkpoint file holds each parameter and buffer: the first that uses it."""
        return {name: pieces[0] for name, pieces in (*self.trace.parameters.items(), *self.trace.buffers.items())}

    def entry(self, stage: int) -> CutSpec | None:
        """Return the cut before a stage; None for the first."""
        return self.trace.cuts[self.cuts[stage] - 1] if stage > 0 else None

    def exit(self, stage: int) -> CutSpec | None:
        """Return the cut behind a stage; None for the last."""
        return self.entry(stage + 1) if stage + 1 < self.num_stages else None


def tie_groups(partition: Partition, declared: Iterable[Sequence[str]] = ()) -> tuple[TieGroup, ...]:
    """Return all ties, sorted by first name.

    Args:
        declared: Varuna's `shared_weights`: names of parameters with equal values whose gradients belong together.

    Raises CapslogError for a declared name that is no parameter of the model.
    """
    leader = {name: name for name in partition.trace.parameters}

    for names in declared:
        for name in names:
            if name not in leader:
                raise CapslogError(
                    f"shared_weights names {name!r}, which is no parameter of the model (or the second name of one "
                    "that is already the same tensor: leave it out)"
                )
            old, new = leader[name], leader[names[0]]
            leader = {parameter: new if first == old else first for parameter, first in leader.items()}
    classes: dict[str, list[str]] = {}
    for name in partition.trace.parameters:
        classes.setdefault(leader[name], []).append(name)
    groups = []
    for names in classes.values():
        stages = sorted({stage for name in names for stage in partition.stages_of[name]})
        if len(names) > 1 or len(stages) > 1:
            groups.append(TieGroup(tuple(sorted(names)), tuple(stages)))
    return tuple(sorted(groups, key=lambda group: group.names))
