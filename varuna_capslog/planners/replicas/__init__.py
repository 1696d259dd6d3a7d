"""Planners that give each stage devices of its own number: `pipedream`, `piper`, `graphpipe`, `capture`.

They answer with stages, of which `planning/placed/replicated` makes plans, plays them and judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.capture import capture_stages
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage, check_tensors
from varuna_capslog.planners.replicas.graphpipe import graphpipe_stages
from varuna_capslog.planners.replicas.pipedream import pipedream_stages
from varuna_capslog.planners.replicas.piper import piper_stages
from varuna_capslog.planners.replicas.series_parallel import downset_count, tree_of

__all__ = ["COMPARES_PEAKS", "NEEDS_TENSORS", "REPLICATED", "GraphCosts", "ReplicatedStage", "check_tensors"]

_FEW_DOWNSETS = 400
"""Up to so many `graphpipe` weighs Piper's stages too, which may hold parts of several branches."""


def _pipedream(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    found = pipedream_stages(costs)
    return [] if found is None else [found]


def _piper(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    found = piper_stages(costs)
    return [] if found is None else [found]


def _graphpipe(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """GraphPipe's stage graphs, and those of the other two: cuts of the chain, and stages across branches, which the
    paper excludes and lopsided branches need.
    """
    found = graphpipe_stages(costs) + _pipedream(costs)
    if downset_count(tree_of(costs.num_layers, ((one, other) for one, other, _ in costs.edges))) > _FEW_DOWNSETS:
        return found
    try:
        across = piper_stages(costs, _FEW_DOWNSETS)
    except CapslogError:
        return found
    return found if across is None else [*found, across]


def _capture(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """For each number of blocks that a step may have: more of them wait for the exchange, fewer are larger."""
    every = [one for one in range(costs.microbatches, 0, -1) if costs.microbatches % one == 0]
    found: list[list[ReplicatedStage]] = []
    for blocks in [costs.blocks] if costs.blocks else every:
        try:
            stages = capture_stages(replace(costs, blocks=blocks))
        except CapslogError:
            if not found:
                raise
            break  # fewer blocks than a stage needs replicas
        if stages not in found:
            found.append(stages)
    return found


REPLICATED: dict[str, Callable[[GraphCosts], list[list[ReplicatedStage]]]] = {
    "pipedream": _pipedream,
    "piper": _piper,
    "graphpipe": _graphpipe,
    "capture": _capture,
}
"""name -> the stages that may be the planner's answer, the likeliest first; [] where none fit."""

NEEDS_TENSORS = ("piper", "graphpipe")
"""Those that plan a graph; the others take the layers as a line."""

COMPARES_PEAKS = ("capture",)
"""Those that look for the smallest peak, and need the bytes of layers whether or not the devices have a limit."""
