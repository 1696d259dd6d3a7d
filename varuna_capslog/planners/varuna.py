"""Varuna's own split, which needs no profile: the baseline of the paper's Fig. 8 to 10."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_capslog.memory.costs import StageCosts

__all__ = ["varuna_cuts"]


def varuna_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages; O(G). Of L - 1 cut points, each stage but the last takes (cut
    points + 1) // stages layers; the last takes the remaining layers. Costs are not considered.
    """
    layers_per_stage = costs.num_layers // devices
    return [stage * layers_per_stage for stage in range(devices)]
