"""Collage's two levels of choosing a backend for every part of a model: here, a variant for every layer of a chain.

Jeon, thesis, chapter 2: level 1 adds up what matched parts cost alone (Alg. 1), level 2 gives further parts to a
backend that works across parts, and measures the whole. `start/collage_start` calls both; nothing here measures.
A baseline by name: it knows seconds alone, and planner `budget` weighs bytes, cuts and memory intervals too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.variants import PLAIN, alternatives_of, under

__all__ = ["LayerPattern", "Placement", "evolved", "patterns_of", "placed", "seconds_under"]

Bits = tuple[bool, ...]


@dataclass(frozen=True)
class LayerPattern:
    """Layers that one backend computes together, and the seconds of a forward and a backward."""

    layers: frozenset[int]
    name: str
    seconds: float


@dataclass(frozen=True)
class Placement:
    """A cover of all layers by patterns, and the sum of what they cost."""

    patterns: tuple[LayerPattern, ...]
    seconds: float

    @property
    def chosen(self) -> dict[int, str]:
        """Layer -> variant; layers that stay as configured are left out."""
        found = {layer: one.name for one in self.patterns for layer in one.layers if one.name != PLAIN}
        return dict(sorted(found.items()))


def seconds_under(profile: Profile, chosen: Mapping[int, str]) -> list[float]:
    """What each layer takes, forward and backward, where the layers are computed so; a profile with seconds."""
    layers = under(profile, chosen).layers
    return [(one.forward_seconds or 0.0) + (one.backward_seconds or 0.0) for one in layers]


def patterns_of(profile: Profile) -> list[LayerPattern]:
    """Every layer in every way that the profile has rows of, and every run of neighbours in one joined variant."""
    found = [LayerPattern(frozenset([at]), PLAIN, one) for at, one in enumerate(seconds_under(profile, {}))]
    own, joined = alternatives_of(profile), profile.conditions.get(JOINED, ())
    for name in dict.fromkeys(name for names in own.values() for name in names):
        for first in (layer for layer, names in own.items() if name in names):
            run = [first]
            while name in joined and name in own.get(run[-1] + 1, ()):
                run.append(run[-1] + 1)
            costs = seconds_under(profile, dict.fromkeys(run, name))
            found += [
                LayerPattern(frozenset(run[:size]), name, sum(costs[first : first + size]))
                for size in range(1, len(run) + 1)
            ]
    return found


def placed(
    num_layers: int, edges: Sequence[tuple[int, int]], patterns: Sequence[LayerPattern], switch_seconds: float = 0.0
) -> Placement:
    """The cheapest cover (Alg. 1). Every layer must have a pattern of its own.

    State: the set of layers that are covered. Transition: the frontier layer of the least depth is the root of a
    pattern. Cost (2.3): the pattern's own and the switch epsilon, which counts once a pattern, also where the backend
    stays the same, as printed. Complexity O(N P S) for N layers, P patterns of a root and S sets.

    As printed, lines 14 to 22 stand inside the loop over new frontier layers, which the last pattern has none of, so
    that the cost of the whole graph is never set; and C_opt has no first value. Here they stand behind that loop, and
    a set that is not known costs infinitely much.

    Args:
        edges: (layer that writes, layer that reads).
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
    # covered layers -> what they cost, and the pattern that came last
    best: dict[frozenset[int], tuple[float, frozenset[int], LayerPattern | None]] = {}
    best[frozenset()] = (0.0, frozenset(), None)
    before: set[int] = set()
    while queue:
        root = order[heapq.heappop(queue)]
        # sets without a layer before this one can never be completed: its root is behind
        best_here = [(covered, cost) for covered, (cost, *_) in best.items() if before <= covered]
        for pattern in rooted[root]:
            for layer in pattern.layers:
                for reader in after[layer]:
                    if reader not in pattern.layers and rank[reader] not in added:
                        added.add(rank[reader])
                        heapq.heappush(queue, rank[reader])
            for covered, cost in best_here:
                if covered & pattern.layers:
                    continue
                together, total = covered | pattern.layers, cost + pattern.seconds + switch_seconds
                if together not in best or best[together][0] > total:
                    best[together] = (total, covered, pattern)
        before.add(root)
    covered = frozenset(range(num_layers))
    seconds, found = best[covered][0], list[LayerPattern]()
    while covered:
        _, covered, last = best[covered]
        assert last is not None
        found.append(last)
    return Placement(tuple(reversed(found)), seconds)


def evolved(
    size: int,
    seconds_of: Callable[[Sequence[Bits]], Sequence[float]],
    seed: int = 0,
    rounds: int = 4,
    population: int = 6,
) -> Bits:
    """The best strings of bits that an evolutionary search meets (2.4.3): mutation, selection, two-point crossover.

    A bit says that a part is given to the backend that works across parts; the first strings are the one that gives
    it none, the one that gives it all, and drawn ones.

    Args:
        size: bits of a string.
        seconds_of: measures strings side by side; no string is asked for twice.
        rounds: generations.
        population: strings of one generation.
    """
    draw = random.Random(seed)
    known: dict[Bits, float] = {}

    def measure(strings: Iterable[Bits]) -> None:
        new = [one for one in dict.fromkeys(strings) if one not in known]
        known.update(zip(new, seconds_of(new) if new else (), strict=True))

    measure([(False,) * size, (True,) * size])
    measure(tuple(draw.random() < 0.5 for _ in range(size)) for _ in range(population - 2))
    for _ in range(rounds):
        parents = sorted(known, key=known.__getitem__)[: max(2, population // 2)]
        measure(_child(draw, *draw.sample(parents, 2)) for _ in range(population))
    return min(known, key=known.__getitem__)


def _child(draw: random.Random, one: Bits, other: Bits) -> Bits:
    first, end = sorted(draw.choices(range(len(one) + 1), k=2))
    crossed = (*one[:first], *other[first:end], *one[end:])
    return tuple(bit != (draw.random() < 1 / len(one)) for bit in crossed)
