"""Varuna's own split: the same number of cut points for every stage; the last stage takes the remaining layers.

Microsoft Varuna splits so without a profile. It is the baseline of the paper's Fig. 8 to 10, and considers no costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from varuna_capslog.memory.costs import StageCosts

__all__ = ["varuna_cuts"]


def varuna_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages; O(G).

    L layers have L - 1 cut points, and Varuna gives (cut points + 1) // stages layers to each stage but the last.
    """
    layers_per_stage = costs.num_layers // devices
    return [stage * layers_per_stage for stage in range(devices)]
