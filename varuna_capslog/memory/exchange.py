"""The bytes of gradients while a rank exchanges them at the end of a step, on top of what is resident.

The engine adds the blocks of a layer that several ranks hold, and the uses of a parameter that several layers share, in
one order everywhere (`engine/holders/gradients`): for that the others' blocks of a slice, or their uses, are there
together for a while. `fold` asks for the most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from varuna_capslog.memory.range_bytes import RangeBytes

__all__ = ["Holders", "exchange"]

Holders = dict[int, dict[int, Sequence[int]]]
"""layer -> its ranks -> the blocks that each of them serves, rising."""


def exchange(ranges: RangeBytes, rank: int, holders: Holders) -> int:
    """The most bytes of gradients on a rank from its last backward to the vote."""
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
    """The most bytes beside this rank's own blocks of a layer of `size` bytes while all its holders add their slices.

    First every block is packed, by way of a copy of its own; the packed ones then take the place of the blocks.
    """
    own, blocks = len(ranks[rank]), sum(map(len, ranks.values()))
    part = math.ceil(size / len(ranks))
    return max((own + 1) * size, (blocks - own + 1) * part)


def _uses(ranges: RangeBytes, rank: int, holders: Holders) -> list[int]:
    """For each shared parameter on the rank: the most that is there beside the gradients of its uses here."""
    found = []
    own = [ranks[rank] for ranks in holders.values() if rank in ranks]
    block = min((blocks[0] for blocks in own), default=0)
    for shared in ranges.shared_parameters:
        here = [layer for layer in shared.layers if rank in holders[layer]]
        if not here or any(ranges.gradients[layer] < shared.bytes for layer in here):
            continue  # none of its uses, or it is frozen
        away = [holders[layer] for layer in shared.layers if layer not in here]
        peers = {peer for ranks in away for peer, blocks in ranks.items() if block in blocks}
        received = sum(peer in holders[layer] for peer in peers for layer in shared.layers)
        # what this rank packs for the others is let go before the sum is made
        found.append(shared.bytes * (received + max(len(here) if away else 0, 1)))
    return found
