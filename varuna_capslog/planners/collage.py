"""Collage's two levels of choosing a backend for every part of a model; here, a variant for every layer of a chain.

Jeon, thesis, chapter 2: level 1 adds up the costs of matched parts alone (Alg. 1); level 2 gives further parts to a
backend that optimizes across parts, and measures the whole model (in `start/collage_start`). Collage is a baseline: it
considers only seconds, while planner `budget` also considers bytes, cuts and memory intervals.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import PLAIN, alternatives_of, under

__all__ = ["LayerPattern", "evolved", "patterns_of", "placed", "seconds_under"]

Bits = tuple[bool, ...]


@dataclass(frozen=True)
class LayerPattern:
    """Layers that a backend computes together, and the seconds of a forward and a backward."""

    layers: frozenset[int]
    name: str
    seconds: float


@dataclass(frozen=True)
class Placement:
    """A cover of all layers by patterns, and the sum of their costs."""

    patterns: tuple[LayerPattern, ...]
    seconds: float

    @property
    def chosen(self) -> dict[int, str]:
        """Variant of each layer; layers that stay as configured are left out."""
        variants = {
            layer: pattern.name for pattern in self.patterns for layer in pattern.layers if pattern.name != PLAIN
        }
        return dict(sorted(variants.items()))


def seconds_under(profile: Profile, chosen: Mapping[int, str]) -> list[float]:
    """Return the forward and backward seconds of each layer under the chosen variants, from a profile with seconds."""
    layers = under(profile, chosen).layers
    return [(layer.forward_seconds or 0.0) + (layer.backward_seconds or 0.0) for layer in layers]


def patterns_of(profile: Profile) -> list[LayerPattern]:
    """Return a pattern for every layer and variant of the profile, and every run of neighbours in a joined variant."""
    patterns = [
        LayerPattern(frozenset([at]), PLAIN, layer_seconds)
        for at, layer_seconds in enumerate(seconds_under(profile, {}))
    ]
    alternatives, joined = alternatives_of(profile), profile.conditions.get(JOINED, ())
    for name in dict.fromkeys(name for names in alternatives.values() for name in names):
        for first in (layer for layer, names in alternatives.items() if name in names):
            run = [first]
            while name in joined and name in alternatives.get(run[-1] + 1, ()):
                run.append(run[-1] + 1)
            costs = seconds_under(profile, dict.fromkeys(run, name))
            patterns += [
                LayerPattern(frozenset(run[:size]), name, sum(costs[first : first + size]))
                for size in range(1, len(run) + 1)
            ]
    return patterns


def placed(
    num_layers: int,
    edges: Sequence[tuple[int, int]],
    patterns: Sequence[LayerPattern],
    switch_seconds: float = 0.0,
    joined: Collection[str] = (),
) -> Placement:
    """Return the cheapest cover (Alg. 1). Every layer must have a pattern of its own. edges: (writing, reading layer).
    joined: names of variants whose neighbouring layers k and k + 1 are always in one pattern, with the seconds of
    layers beside each other; the paper has none. Otherwise a run in two patterns would have a cost that no choice has.

    State: the set of covered layers, and those in a joined variant that have a neighbour outside the set. Transition:
    the frontier layer of the least depth is the root of a pattern. Cost (2.3): the pattern's cost and the switch
    epsilon, which counts once per pattern, also where the backend stays the same, as printed. Complexity O(N P S) for N
    layers, P patterns of a root and S states.

    As printed, lines 14 to 22 are inside the loop over new frontier layers. The last pattern has none of these, so the
    cost of the whole graph is never set; and C_opt has no initial value. Here these lines are behind that loop, and the
    cost of a set without an entry is infinite.
    """
    after: dict[int, list[int]] = {layer: [] for layer in range(num_layers)}
    depth = [0] * num_layers
    for writer, reader in sorted(edges):  # writers come before readers
        after[writer].append(reader)
        depth[reader] = max(depth[reader], depth[writer] + 1)
    order = sorted(range(num_layers), key=lambda layer: (depth[layer], layer))
    rank = {layer: place for place, layer in enumerate(order)}
    rooted: dict[int, list[LayerPattern]] = {layer: [] for layer in range(num_layers)}
    for pattern in patterns:
        rooted[min(pattern.layers, key=rank.__getitem__)].append(pattern)
    with_writer = {reader for _, reader in edges}
    queue = [rank[layer] for layer in range(num_layers) if layer not in with_writer]
    heapq.heapify(queue)
    added = set(queue)
    # state -> its cost, the state before, and the last pattern
    nothing = _Covered(frozenset())
    best: dict[_Covered, tuple[float, _Covered, LayerPattern | None]] = {nothing: (0.0, nothing, None)}
    before: set[int] = set()
    while queue:
        root = order[heapq.heappop(queue)]
        # a set that lacks an earlier layer can never be completed: that layer's patterns have been tried
        best_here = [(state, cost) for state, (cost, *_) in best.items() if before <= state.layers]
        for pattern in rooted[root]:
            for layer in pattern.layers:
                for reader in after[layer]:
                    if reader not in pattern.layers and rank[reader] not in added:
                        added.add(rank[reader])
                        heapq.heappush(queue, rank[reader])
            for state, cost in best_here:
                together, total = state.behind(pattern, joined), cost + pattern.seconds + switch_seconds
                if together is not None and (together not in best or best[together][0] > total):
                    best[together] = (total, state, pattern)
        before.add(root)
    whole = [state for state in best if len(state.layers) == num_layers]
    state = min(whole, key=lambda state: best[state][0])
    seconds, cover = best[state][0], list[LayerPattern]()
    while state.layers:
        _, state, last = best[state]
        assert last is not None
        cover.append(last)
    return Placement(tuple(reversed(cover)), seconds)


@dataclass(frozen=True)
class _Covered:
    """Covered layers; border: those in a joined variant beside a layer that is not covered, with its name."""

    layers: frozenset[int]
    border: frozenset[tuple[int, str]] = frozenset()

    def behind(self, pattern: LayerPattern, joined: Collection[str]) -> _Covered | None:
        """Return the state with one more pattern; None where it covers a layer again, or splits a joined run."""
        if self.layers & pattern.layers:
            return None
        together, border = self.layers | pattern.layers, self.border
        if pattern.name in joined:
            edge = {(layer + step, pattern.name) for layer in pattern.layers for step in (-1, 1)}
            if edge & border:
                return None
            border = border | {(layer, pattern.name) for layer in pattern.layers}
        still = {(at, name) for at, name in border if at + 1 not in together or (at and at - 1 not in together)}
        return _Covered(together, frozenset(still))


def evolved(
    size: int,
    seconds_of: Callable[[Sequence[Bits]], Sequence[float]],
    seed: int = 0,
    rounds: int = 4,
    population: int = 6,
    start: Bits | None = None,
) -> Bits:
    """Return the best bit string of an evolutionary search (2.4.3): mutation, selection, two-point crossover. A bit is
    True where its part is given to the backend that optimizes across parts. The first strings are all False, all True,
    and random. size: bits. seconds_of: measures strings, none twice. rounds: generations of `population` strings.
    start: a further first string.
    """
    draw = random.Random(seed)
    measured: dict[Bits, float] = {}

    def measure(strings: Iterable[Bits]) -> None:
        new = [string for string in dict.fromkeys(strings) if string not in measured]
        measured.update(zip(new, seconds_of(new) if new else (), strict=True))

    measure([(False,) * size, (True,) * size, *([] if start is None else [start])])
    measure(tuple(draw.random() < 0.5 for _ in range(size)) for _ in range(population - 2))
    for _ in range(rounds):
        parents = sorted(measured, key=measured.__getitem__)[: max(2, population // 2)]
        measure(_child(draw, *draw.sample(parents, 2)) for _ in range(population))
    return min(measured, key=measured.__getitem__)


def _child(draw: random.Random, parent: Bits, partner: Bits) -> Bits:
    first, end = sorted(draw.choices(range(len(parent) + 1), k=2))
    crossed = (*parent[:first], *partner[first:end], *parent[end:])
    return tuple(bit != (draw.random() < 1 / len(parent)) for bit in crossed)
