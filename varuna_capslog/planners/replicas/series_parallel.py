"""A graph of layers as a tree of series and parallel parts (GraphPipe, Sec. 3.5).

In a series every layer of a part depends, directly or not, on every layer of the part before it; parallel parts do not
depend on one another. Skip connections over layers change nothing, since only reachability counts. A part that is
neither (an N: a reads x, b reads x and y) lies between two layers that all paths pass; its layers are taken in the
order of the chain, as one branch. This is the conversion that the paper mentions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Parallel", "Series", "Together", "Tree", "coarsened", "downset_count", "layers_of", "tree_of"]


@dataclass(frozen=True)
class Together:
    """Consecutive layers merged to one node."""

    layers: tuple[int, ...]


@dataclass(frozen=True)
class Series:
    """Parts in series, none of them a series itself."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Parallel:
    """Parallel parts, sorted by their first layer, none of them parallel itself."""

    parts: tuple[Tree, ...]


Tree = int | Together | Series | Parallel
"""A layer, merged layers, or parts."""


def layers_of(tree: Tree) -> tuple[int, ...]:
    """Return all layers of a tree, rising."""
    if isinstance(tree, int | Together):
        return (tree,) if isinstance(tree, int) else tree.layers
    return tuple(sorted(layer for part in tree.parts for layer in layers_of(part)))


def downset_count(tree: Tree) -> int:
    """Return the number of downsets: sets that hold, with a layer, all layers that need it, the empty set included."""
    if isinstance(tree, int | Together):
        return 2
    counts = [downset_count(part) for part in tree.parts]
    return math.prod(counts) if isinstance(tree, Parallel) else 1 + sum(count - 1 for count in counts)


def tree_of(num_layers: int, edges: Iterable[tuple[int, int]]) -> Tree:
    """Return the tree of all layers.

    edges: (layer that writes a tensor, layer that reads it), each from a lower to a higher layer.
    """
    before = [0] * num_layers  # layer -> all layers that it needs, as bits
    for writer, reader in sorted(edges, key=lambda edge: edge[1]):
        before[reader] |= before[writer] | 1 << writer
    related = list(before)
    for layer, needed in enumerate(before):
        for source in _bits(needed):
            related[source] |= 1 << layer
    return _decomposed((1 << num_layers) - 1, related)


def coarsened(tree: Tree, seconds: Sequence[float], most: int) -> Tree:
    """Return the tree with at most `most` parts in a series, as far as merging neighbouring layers allows. Neighbours
    that take the least time together are merged first.

    seconds: of each layer.
    """
    if isinstance(tree, Parallel):
        return Parallel(tuple(coarsened(part, seconds, most) for part in tree.parts))
    if not isinstance(tree, Series):
        return tree
    parts = [coarsened(part, seconds, most) for part in tree.parts]
    took = [sum(seconds[layer] for layer in layers_of(part)) for part in parts]
    while len(parts) > most:
        pairs = [place for place in range(len(parts) - 1) if not any(map(_has_parts, parts[place : place + 2]))]
        if not pairs:
            break
        place = min(pairs, key=lambda place: took[place] + took[place + 1])
        parts[place : place + 2] = [Together((*layers_of(parts[place]), *layers_of(parts[place + 1])))]
        took[place : place + 2] = [took[place] + took[place + 1]]
    return Series(tuple(parts)) if len(parts) > 1 else parts[0]


def _has_parts(tree: Tree) -> bool:
    return isinstance(tree, Series | Parallel)


def _decomposed(layers: int, related: Sequence[int]) -> Tree:
    if layers.bit_count() == 1:
        return layers.bit_length() - 1
    beside = _components(layers, related)
    if len(beside) > 1:
        return Parallel(tuple(_decomposed(part, related) for part in beside))
    behind = _components(layers, [~neighbours for neighbours in related])
    if len(behind) == 1:
        return Series(tuple(_bits(layers)))
    parts: list[Tree] = []
    for part in behind:
        tree = _decomposed(part, related)
        parts += tree.parts if isinstance(tree, Series) else (tree,)
    return Series(tuple(parts))


def _components(layers: int, neighbours: Sequence[int]) -> list[int]:
    """Return the connected components of a set of layers, sorted by their first layer."""
    components = []
    while layers:
        part = edge = layers & -layers
        while edge:
            reached = 0
            for layer in _bits(edge):
                reached |= neighbours[layer]
            edge = reached & layers & ~part
            part |= edge
        components.append(part)
        layers &= ~part
    return components


def _bits(layers: int) -> list[int]:
    indices = []
    while layers:
        lowest = layers & -layers
        indices.append(lowest.bit_length() - 1)
        layers ^= lowest
    return indices
