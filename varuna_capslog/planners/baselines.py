"""Cuts without regard to schedules, transfers or capacities: Varuna's own split, and torchgpipe's balance."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_capslog.memory.costs import StageCosts
from varuna_capslog.profiles.record import Profile

__all__ = ["block_partition", "seconds_balanced_cuts", "size_balanced_cuts", "varuna_cuts"]


# -- Varuna's own split, which needs no profile: the baseline of the paper's Fig. 8 to 10.


def varuna_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages; O(G). With L - 1 cut points, each stage but the last has
    (cut points + 1) // stages layers; the last has the remaining layers. Costs are not considered.
    """
    layers_per_stage = costs.num_layers // devices
    return [stage * layers_per_stage for stage in range(devices)]


# -- torchgpipe's balance: consecutive layers in blocks whose sums differ by at most the largest element.
#
# Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020, balances the layers of
# GPipe (Huang et al., 2019) by seconds (`gpipe`) or by bytes (`gpipe-size`) with the block partition of Bárány and
# Grinberg, "Block Partitions of Sequences", 2015.


_LEAST = 1e-9
"""Smaller elements are raised to this share of the largest element, so that no block of layers sums to 0."""


def seconds_balanced_cuts(profile: Profile, devices: int) -> list[int]:
    """Return the first layer of each stage, balanced by forward and backward seconds (`balance_by_time`). Raises
    CapslogError naming the first layer without seconds.
    """
    pairs = zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
    return block_partition([forward + backward for forward, backward in pairs], devices)


def size_balanced_cuts(profile: Profile, devices: int) -> list[int]:
    """Return the first layer of each stage, balanced by the bytes that the forward of one microbatch saves and by
    parameters, gradients and moments (`balance_by_size`). Raises CapslogError naming the first layer without them.
    """
    pairs = zip(profile.column("saved_bytes"), profile.column("static_bytes"), strict=True)
    return block_partition([saved + static for saved, static in pairs], devices)


def block_partition(sequence: Sequence[float], blocks: int) -> list[int]:
    """Return the index of the first element of each of `blocks` nonempty blocks of consecutive elements.
    sequence: numbers of at least 0; at least as many as blocks. Each step is a step of the proof: B_p is a block with
    the largest sum M, B_q the nearest block to it with the smallest sum m. While M > m + 1 (in units of the largest
    element), B_q takes the adjacent element from its neighbour on the side of B_p.
    """
    largest = max(sequence) or 1.0
    units = [max(number / largest, _LEAST) for number in sequence]
    bounds = [len(units) * block // blocks for block in range(blocks + 1)]

    def size(block: int) -> float:
        return sum(units[bounds[block] : bounds[block + 1]])

    while True:
        most, p = max((size(block), block) for block in range(blocks))
        giver = None
        while giver != p:
            least, _, q = min((size(block), abs(block - p), block) for block in range(blocks))
            if most <= least + 1.0:
                return bounds[:-1]
            if p < q:
                giver = q - 1
                bounds[q] -= 1
            else:
                giver = q + 1
                bounds[q + 1] += 1
