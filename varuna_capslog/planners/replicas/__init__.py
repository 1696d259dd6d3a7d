"""Planners that choose the replicas of stages, from which `planning/placed/replicated` makes plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.capture import capture_stages, placements_by_bound
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage, check_tensors
from varuna_capslog.planners.replicas.graphpipe import downset_count, graphpipe_stages, tree_of
from varuna_capslog.planners.replicas.pipedream import pipedream_stages
from varuna_capslog.planners.replicas.piper import piper_stages

__all__ = [
    "COMPARES_PEAKS",
    "NEEDS_TENSORS",
    "REPLICATED",
    "GraphCosts",
    "ReplicatedStage",
    "check_tensors",
    "placements_by_bound",
]

_FEW_DOWNSETS = 400
"""Most downsets at which `graphpipe` also tries Piper's stages, which may hold parts of several branches."""


def _pipedream(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    stages = pipedream_stages(costs)
    return [] if stages is None else [stages]


def _piper(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    stages = piper_stages(costs)
    return [] if stages is None else [stages]


def _graphpipe(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """Return GraphPipe's stage graphs, and those of `pipedream` and `piper`: cuts of the chain, and stages across
    branches, which the paper excludes and branches of unequal cost need.
    """
    candidates = graphpipe_stages(costs) + _pipedream(costs)
    if (
        downset_count(tree_of(costs.num_layers, ((writer, reader) for writer, reader, _ in costs.edges)))
        > _FEW_DOWNSETS
    ):
        return candidates
    try:
        across = piper_stages(costs, _FEW_DOWNSETS)
    except CapslogError:
        return candidates
    return candidates if across is None else [*candidates, across]


def _capture(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """Return the stages for each number of blocks: with more blocks, more gradients wait; fewer blocks are larger."""
    block_counts = [count for count in range(costs.microbatches, 0, -1) if costs.microbatches % count == 0]
    candidates: list[list[ReplicatedStage]] = []
    for blocks in [costs.blocks] if costs.blocks else block_counts:
        try:
            stages = capture_stages(replace(costs, blocks=blocks))
        except CapslogError:
            if not candidates:
                raise
            break  # too few blocks for the replicas of a stage
        if stages not in candidates:
            candidates.append(stages)
    return candidates


REPLICATED: dict[str, Callable[[GraphCosts], list[list[ReplicatedStage]]]] = {
    "pipedream": _pipedream,
    "piper": _piper,
    "graphpipe": _graphpipe,
    "capture": _capture,
}
"""Planner of each name. It returns the candidate stage lists, the likeliest first; [] where none fit."""

NEEDS_TENSORS = ("piper", "graphpipe")
"""Planners of a graph; the others take the layers as a line."""

COMPARES_PEAKS = ("capture",)
"""Planners that minimise the peak; they need the layers' bytes also where the devices have no limit."""
