"""The bytes of gradients while a rank exchanges them at the end of a step, on top of what is resident.

Every rank adds the gradient blocks of a layer that several ranks hold, and the gradients of a parameter that several
layers share, in the same order (`engine/holders/gradients`). It therefore holds the other ranks' blocks of its slice,
or their gradients, at the same time for a while. `fold` adds the peak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from varuna_capslog.memory.range_bytes import RangeBytes

__all__ = ["Holders", "exchange"]

Holders = dict[int, dict[int, Sequence[int]]]
"""layer -> its ranks -> the blocks that each of them serves, rising."""


def exchange(ranges: RangeBytes, rank: int, holders: Holders) -> int:
    """Return the peak bytes of gradients on a rank from its last backward to the vote."""
    layers = sorted(layer for layer, ranks in holders.items() if rank in ranks)
    size = {layer: int(ranges.gradients[layer]) for layer in layers}
    several = [layer for layer in layers if len(holders[layer]) > 1]
    kept = {layer: len(holders[layer][rank]) if layer in several else 1 for layer in layers}
    most = waiting = sum(kept[layer] * size[layer] for layer in layers)
    for layer in several:
        most = max(most, waiting + _beside(holders[layer], rank, size[layer]))
        waiting -= (kept[layer] - 1) * size[layer]
    return max([most, *(waiting + more for more in _uses(ranges, rank, holders))])


def _beside(ranks: Mapping[int, Sequence[int]], rank: int, size: int) -> int:
    """Return the peak bytes beside this rank's blocks of a layer of `size` bytes while its holders add their slices.

    First each block is copied and packed; the packed blocks then replace the originals.
    """
    own_blocks, blocks = len(ranks[rank]), sum(map(len, ranks.values()))
    part = math.ceil(size / len(ranks))
    return max((own_blocks + 1) * size, (blocks - own_blocks + 1) * part)


def _uses(ranges: RangeBytes, rank: int, holders: Holders) -> list[int]:
    """Return, for each shared parameter on the rank, the peak bytes beside the gradients of its local uses."""
    sizes = []
    block_lists = [ranks[rank] for ranks in holders.values() if rank in ranks]
    block = min((blocks[0] for blocks in block_lists), default=0)
    for shared in ranges.shared_parameters:
        local = [layer for layer in shared.layers if rank in holders[layer]]
        if not local or any(ranges.gradients[layer] < shared.bytes for layer in local):
            continue  # the rank has none of its uses, or the parameter is frozen
        away = [holders[layer] for layer in shared.layers if layer not in local]
        peers = {peer for ranks in away for peer, blocks in ranks.items() if block in blocks}
        received = sum(peer in holders[layer] for peer in peers for layer in shared.layers)
        # blocks that this rank packs for other ranks are freed before the sum is made
        sizes.append(shared.bytes * (received + max(len(local) if away else 0, 1)))
    return sizes
