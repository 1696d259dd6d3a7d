"""A graph of layers as a tree of series and parallel parts (GraphPipe, Sec. 3.5).

In series every layer of a part is needed, by some way, for every layer of the next; in parallel no layer of one part is
needed for any of another. Layers that read past others change nothing, since only the ways count. A part that is
neither (an N: a reads x, b reads x and y) lies between two layers that all ways pass; its layers are taken in the order
of the chain, as one branch, which is the conversion that the paper speaks of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Parallel", "Series", "Tree", "layers_of", "tree_of"]


@dataclass(frozen=True)
class Series:
    """Parts one behind the other, none of them in series itself."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Parallel:
    """Parts beside one another, by their first layer, none of them parallel itself."""

    parts: tuple[Tree, ...]


Tree = int | Series | Parallel
"""A layer, or parts."""


def layers_of(tree: Tree) -> tuple[int, ...]:
    """All layers, rising."""
    if isinstance(tree, int):
        return (tree,)
    return tuple(sorted(layer for part in tree.parts for layer in layers_of(part)))


def tree_of(num_layers: int, edges: Iterable[tuple[int, int]]) -> Tree:
    """The tree of all layers.

    edges: (layer that writes a tensor, layer that reads it), each from a lower to a higher layer.
    """
    before = [0] * num_layers  # layer -> the set of all that it needs, as bits
    for writer, reader in sorted(edges, key=lambda edge: edge[1]):
        before[reader] |= before[writer] | 1 << writer
    related = list(before)
    for layer, needed in enumerate(before):
        for other in _bits(needed):
            related[other] |= 1 << layer
    return _decomposed((1 << num_layers) - 1, related)


def _decomposed(layers: int, related: Sequence[int]) -> Tree:
    if layers.bit_count() == 1:
        return layers.bit_length() - 1
    beside = _components(layers, related)
    if len(beside) > 1:
        return Parallel(tuple(_decomposed(part, related) for part in beside))
    behind = _components(layers, [~one for one in related])
    if len(behind) == 1:
        return Series(tuple(_bits(layers)))
    found: list[Tree] = []
    for part in behind:
        tree = _decomposed(part, related)
        found += tree.parts if isinstance(tree, Series) else (tree,)
    return Series(tuple(found))


def _components(layers: int, neighbours: Sequence[int]) -> list[int]:
    """The connected parts of some layers, by their first layer."""
    found = []
    while layers:
        part = edge = layers & -layers
        while edge:
            reached = 0
            for layer in _bits(edge):
                reached |= neighbours[layer]
            edge = reached & layers & ~part
            part |= edge
        found.append(part)
        layers &= ~part
    return found


def _bits(layers: int) -> list[int]:
    found = []
    while layers:
        lowest = layers & -layers
        found.append(lowest.bit_length() - 1)
        layers ^= lowest
    return found
