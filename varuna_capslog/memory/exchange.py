"""The bytes of gradients while a rank exchanges them at the end of a step, on top of what is resident.

The engine adds the blocks of a layer that several ranks hold, and the uses of a parameter that several layers share, in
one order everywhere (`engine/holders/gradients`): for that the others' sums are there together for a while. `fold` asks
for the most.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        others = [len(blocks) for peer, blocks in holders[layer].items() if peer != rank]
        most = max(most, waiting + _copies(kept[layer], others) * size[layer])
        waiting -= (kept[layer] - 1) * size[layer]
    if layers and layers[-1] in several:
        # the blocks of the last layer are let go when all is done
        waiting += (sum(map(len, holders[layers[-1]].values())) - 1) * size[layers[-1]]
    return max([most, *(waiting + more for more in _uses(ranges, rank, holders))])


def _copies(own: int, others: Sequence[int]) -> int:
    """The most sums of one layer's gradients that are there beside its own blocks while all holders exchange theirs.

    In each turn every holder sends a block, packed into one tensor of its own; the last turn's is there until the next
    is packed, and what was received stays.
    """
    most = 0
    for turn in range(max(own, *others)):
        before, after = (sum(min(count, turns) for count in others) for turns in (turn, turn + 1))
        packing = (turn < own) * (1 + (turn > 0))
        most = max(most, before + packing, after + (turn < own))
    return most


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
