"""GraphPipe's planner: stages of a series-parallel graph with replicas, to minimise the time of the slowest stage.

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism", ASPLOS
2025, Sec. 5 (Algorithm 2), 6 (Algorithm 3) and Table 3.2 of the thesis that prints it. For a limit t of the time per
microbatch a dynamic program finds stages within t, and bisection finds the least t.

    state: a part of the tree, and the stages behind it (i microbatches in flight, calls of a at a time)
    value: the Pareto front of (devices of the part, i and a of its first stages)
    transitions: the part as one stage; in series, the later parts and then the earlier ones; in parallel, the branches,
    of which neighbours may share one stage

A stage takes the fewest replicas with which it is within t and fits: with more, i and a of the stages before only grow.

Deviations from the printed text:

- Algorithm 2 keeps the result of a series split only inside its loop over parallel splits; here both are kept.
- Its two halves of a parallel split "share the same source and sink nodes", which some stage must hold. Here fork and
  join are layers in series with the branches, and a stage may also hold a join together with the end of one branch (as
  the published plan of the case study does) or with the last few branches, or a fork with the beginning of one branch.
- A stage of r replicas processes r microbatches at once, and r is the size of its calls in Table 3.2: the paper splits
  each microbatch among the replicas of a stage, while here each replica takes whole microbatches.
- The time per microbatch leaves out transfers and the filling of the pipeline. So several stage graphs are returned,
  also for larger limits t, and `planning/placed/replicated` simulates them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.schedules.generators import table_3_2

__all__ = [
    "CostedTree",
    "Parallel",
    "Series",
    "StageGraphs",
    "Together",
    "Tree",
    "coarsened",
    "downset_count",
    "graphpipe_stages",
    "layers_of",
    "tree_of",
]


# -- A graph of layers as a tree of series and parallel parts (GraphPipe, Sec. 3.5).
#
# In a series every layer of a part depends, directly or not, on every layer of the part before it; parallel parts do
# not depend on one another. Skip connections over layers change nothing, since only reachability counts. A part that
# is neither (an N: a reads x, b reads x and y) lies between two layers that all paths pass; its layers are taken in
# the order of the chain, as one branch. This is the conversion that the paper mentions.


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
    """Return the number of downsets (sets of layers that contain every reader of their layers), with the empty set."""
    if isinstance(tree, int | Together):
        return 2
    counts = [downset_count(part) for part in tree.parts]
    return math.prod(counts) if isinstance(tree, Parallel) else 1 + sum(count - 1 for count in counts)


def tree_of(num_layers: int, edges: Iterable[tuple[int, int]]) -> Tree:
    """Return the tree of all layers. edges: (layer that writes a tensor, higher layer that reads it)."""
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
    that take the least time together are merged first. seconds: of each layer.
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
    components = _components(layers, related)
    if len(components) > 1:
        return Parallel(tuple(_decomposed(part, related) for part in components))
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


# -- GraphPipe's planner


LONGER = (1.0, 1.15, 1.5)
"""Limits of the time per microbatch, as multiples of the least, whose stage graphs are simulated."""

_MOST_IN_SERIES = 32
"""Most parts of a series. In a longer series, neighbouring layers are merged, as the paper merges small operators."""

_PRECISION = 0.01
"""Relative precision at which the bisection of the limit ends."""


Sums = tuple[float, float, float, float]
"""Seconds, static, saved and parameter bytes of a set of layers."""

_NOTHING: Sums = (0.0, 0.0, 0.0, 0.0)


class _State(NamedTuple):
    """State of the stages behind a part; 0, 0 behind the last layer. in_flight: microbatches in flight in the first of
    these stages. at_once: the largest call of all of them.
    """

    in_flight: int
    at_once: int


class _PartialGraph(NamedTuple):
    """A partial stage graph: its devices, the `_State` of its first stages, and its stages as a linked list."""

    devices: int
    in_flight: int
    at_once: int
    stages: object

    @property
    def state(self) -> _State:
        return _State(self.in_flight, self.at_once)


_BEHIND_ALL = _State(0, 0)


def graphpipe_stages(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """Return stage graphs; [] where none fit. The first has the least time per microbatch and the fewest in flight. In
    each, a stage stands behind the stages from which it reads.
    """
    full_tree = tree_of(costs.num_layers, ((writer, reader) for writer, reader, _ in costs.edges))
    tree = CostedTree(costs, coarsened(full_tree, costs.seconds, _MOST_IN_SERIES))
    least = _least_limit(tree)
    if least is None:
        return []
    graphs: dict[tuple[ReplicatedStage, ...], None] = {}
    for longer in LONGER:
        for graph in StageGraphs(tree, least * longer).ranked_graphs():
            graphs[tuple(graph)] = None
    return [list(graph) for graph in graphs]


def _least_limit(tree: CostedTree) -> float | None:
    """Return the least time per microbatch of all stage graphs (Algorithm 2, lines 2 to 11); None if none fits."""
    costs = tree.costs
    total_seconds = sum(costs.seconds)
    below, enough = total_seconds / costs.devices, total_seconds / costs.devices
    while (reached := StageGraphs(tree, enough).least()) is None:
        if enough > 2 * total_seconds + costs.exchange_seconds(float(sum(costs.parameters)), costs.devices):
            return None
        below, enough = enough, 1.5 * enough
    while reached > below * (1 + _PRECISION):
        middle = (below + reached) / 2
        better = StageGraphs(tree, middle).least()
        if better is None:
            below = middle
        else:
            reached = better
    return reached


class CostedTree:
    """A tree with the costs of its parts; it recognises parts of equal costs."""

    def __init__(self, costs: GraphCosts, tree: Tree) -> None:
        self.costs, self.root = costs, tree
        self.sums = functools.cache(self._sums)
        self.running = functools.cache(self._running)
        self.signature = functools.cache(self._signature)
        self._first: dict[object, Tree] = {}

    def alike(self, tree: Tree) -> Tree:
        """Return the first part passed to this method that costs the same as `tree`, layer by layer."""
        return self._first.setdefault(self.signature(tree), tree)

    def different(self, part: Parallel) -> list[tuple[int, tuple[Tree, ...]]]:
        """Return the last branch of each group of equal branches: its number and its parts in series."""
        last = {self.signature(branch): number for number, branch in enumerate(part.parts)}
        branches = [(number, part.parts[number]) for number in last.values()]
        return [(number, branch.parts if isinstance(branch, Series) else (branch,)) for number, branch in branches]

    def _sums(self, tree: Tree) -> Sums:
        if isinstance(tree, int | Together):
            names = ("seconds", "static", "saved", "parameters")
            seconds, *others = (self.costs.total(name, layers_of(tree)) for name in names)
            return seconds, others[0], others[1], others[2]
        return functools.reduce(_sum, (self.sums(part) for part in tree.parts), _NOTHING)

    def _running(self, parts: tuple[Tree, ...]) -> tuple[float, ...]:
        """Return the running sums of the parts' seconds, beginning with 0."""
        return tuple(itertools.accumulate((self.sums(part)[0] for part in parts), initial=0.0))

    def _signature(self, tree: Tree) -> object:
        if isinstance(tree, int | Together):
            return self.sums(tree), len(layers_of(tree))
        return type(tree).__name__, tuple(self.signature(part) for part in tree.parts)


class StageGraphs:
    """Searches the stage graphs in which no stage takes longer than `limit` seconds per microbatch."""

    def __init__(self, tree: CostedTree, limit: float) -> None:
        self.tree, self.costs, self.limit = tree, tree.costs, limit
        self._in_series: dict[tuple[Series, int, int, _State], list[_PartialGraph]] = {}
        self._beside: dict[tuple[tuple[Tree, ...], _State], list[_PartialGraph]] = {}
        self._replicas = functools.cache(self._fewest_replicas)

    def ranked_graphs(self) -> list[list[ReplicatedStage]]:
        """Return the stage graphs by rising microbatches in flight in their first stages (PICKBETTER), then devices."""
        ranked = sorted(self._whole(), key=lambda graph: (graph.in_flight, graph.at_once, graph.devices))
        return [list(_listed(graph.stages)) for graph in ranked]

    def least(self) -> float | None:
        """Return the least time per microbatch of a stage graph's slowest stage; None where there is no stage graph."""
        return min((self._slowest(graph.stages) for graph in self._whole()), default=None)

    def _whole(self) -> list[_PartialGraph]:
        root = self.tree.root
        tree = root if isinstance(root, Series) else Series((root,))
        return self._series(tree, 0, len(tree.parts), _BEHIND_ALL)

    def _slowest(self, stages: object) -> float:
        if isinstance(stages, _TreeStage):
            return self._seconds(functools.reduce(_sum, map(self.tree.sums, stages.parts)), stages.replicas)
        if isinstance(stages, _Moved):
            return self._slowest(stages.stages)
        return max(map(self._slowest, stages), default=0.0) if isinstance(stages, tuple) else 0.0

    def _seconds(self, sums: Sums, replicas: int) -> float:
        """Return the busiest replica's seconds per microbatch, with its part of the gradient exchange (ESTIMATETPS)."""
        return sums[0] * self.costs.share(replicas) + self.costs.exchange_seconds(sums[3], replicas)

    # -- the three kinds of parts

    def _stage(self, parts: tuple[Tree, ...], sums: Sums, behind: _State) -> _PartialGraph | None:
        """Return the parts as one stage (lines 24 to 28); None where it is too slow or too large."""
        fewest = self._replicas(sums, behind)
        return None if fewest is None else _PartialGraph(*fewest, _TreeStage(parts, fewest[0]))

    def _fewest_replicas(self, sums: Sums, behind: _State) -> tuple[int, int, int] | None:
        """Return the fewest replicas with which a stage keeps the limit and fits, and its state; None if none do."""
        costs, (seconds, static, saved, _) = self.costs, sums
        for replicas in range(max(1, int(seconds / self.limit)), costs.most_replicas + 1):
            if self._seconds(sums, replicas) > self.limit * (1 + 1e-12):
                continue
            # Algorithm 3, line 5
            in_flight = replicas
            if behind.in_flight:
                in_flight = table_3_2(1, replicas, 1, behind.at_once, behind.in_flight)
                in_flight = min(in_flight, costs.microbatches)  # there are no more in a step
            if costs.holds(static, saved, -(-in_flight // replicas)):
                return replicas, in_flight, max(replicas, behind.at_once)
        return None

    def _least_devices(self, seconds: float) -> int:
        """Return the fewest devices that do `seconds` of work within the limit, however it is divided."""
        return math.ceil(seconds / self.limit * (1 - 1e-9))

    def _series(self, tree: Series, first: int, end: int, behind: _State) -> list[_PartialGraph]:
        """Return the best partial stage graphs of parts first .. end-1 of a series."""
        if first == end:
            return [_PartialGraph(0, behind.in_flight, behind.at_once, None)]
        key = tree, first, end, behind
        if key not in self._in_series:
            self._in_series[key] = _best(self._of_series(tree, first, end, behind), self.costs.devices)
        return self._in_series[key]

    def _of_series(self, tree: Series, first: int, end: int, behind: _State) -> Iterator[_PartialGraph]:
        sums = _NOTHING
        for begin in range(end - 1, first - 1, -1):
            part = tree.parts[begin]
            if isinstance(part, Parallel):
                if begin == end - 1:
                    for partial in self._parallel(part.parts, behind):
                        yield from self._before(tree, first, begin, partial)
                    yield from self._with_a_begin(tree, first, begin, behind)
                else:
                    yield from self._with_an_end(tree, first, begin, end, behind)
            sums = _sum(sums, self.tree.sums(part))
            stage = self._stage(tree.parts[begin:end], sums, behind)
            if stage is not None:
                yield from self._before(tree, first, begin, stage)
            elif sums[0] > self.limit * self.costs.devices:
                return

    def _before(self, tree: Series, first: int, end: int, later: _PartialGraph) -> Iterator[_PartialGraph]:
        """Yield the stages `later` with all possible stages of the parts before them (lines 31 to 37)."""
        running = self.tree.running(tree.parts)
        if later.devices + self._least_devices(running[end] - running[first]) > self.costs.devices:
            return
        for earlier in self._series(tree, first, end, later.state):
            yield _PartialGraph(
                earlier.devices + later.devices, earlier.in_flight, earlier.at_once, (earlier.stages, later.stages)
            )

    def _with_an_end(self, tree: Series, first: int, place: int, end: int, behind: _State) -> Iterator[_PartialGraph]:
        """Yield graphs in which a join and parts behind it share a stage with a branch's end or the last branches."""
        part, after = tree.parts[place], tree.parts[place + 1 : end]
        assert isinstance(part, Parallel)
        tail = functools.reduce(_sum, map(self.tree.sums, after), _NOTHING)
        for shared, remaining in self._ends(part):
            sums = functools.reduce(_sum, map(self.tree.sums, shared), tail)
            stage = self._stage((*shared, *after), sums, behind)
            if stage is None:
                continue
            if stage.devices + self._least_devices(self.tree.running(remaining)[-1]) > self.costs.devices:
                continue
            for beside in self._parallel(remaining, stage.state):
                both = beside._replace(devices=beside.devices + stage.devices, stages=(beside.stages, stage.stages))
                yield from self._before(tree, first, place, both)

    def _ends(self, part: Parallel) -> Iterator[tuple[tuple[Tree, ...], tuple[Tree, ...]]]:
        """Yield each set of parts that may share a stage with a join, and the remaining branches."""
        for number, parts in self.tree.different(part):
            for begin in range(len(parts) - 1, -1, -1):
                yield parts[begin:], _replaced(part, number, parts[:begin])
        for begin in range(len(part.parts) - 2, 0, -1):
            yield part.parts[begin:], part.parts[:begin]

    def _with_a_begin(self, tree: Series, first: int, place: int, behind: _State) -> Iterator[_PartialGraph]:
        """Yield graphs in which one stage holds parts before parallel branches and the beginning of one branch."""
        part = tree.parts[place]
        if place == first or not isinstance(part, Parallel) or isinstance(tree.parts[place - 1], Parallel):
            return
        for number, parts in self.tree.different(part):
            head = _NOTHING
            for end in range(1, len(parts) + 1):
                head = _sum(head, self.tree.sums(parts[end - 1]))
                for beside in self._parallel(_replaced(part, number, parts[end:]), behind):
                    sums = head
                    for begin in range(place - 1, first - 1, -1):
                        if isinstance(tree.parts[begin], Parallel):
                            break
                        sums = _sum(sums, self.tree.sums(tree.parts[begin]))
                        stage = self._stage((*tree.parts[begin:place], *parts[:end]), sums, beside.state)
                        if stage is None:
                            break
                        both = stage._replace(
                            devices=beside.devices + stage.devices, stages=(stage.stages, beside.stages)
                        )
                        yield from self._before(tree, first, begin, both)

    def _parallel(self, branches: tuple[Tree, ...], behind: _State) -> list[_PartialGraph]:
        """Return the best partial stage graphs of branches, of which neighbours may share a stage (lines 38 to 44)."""
        key = branches, behind
        if key not in self._beside:
            best, running = [[_PartialGraph(0, behind.in_flight, behind.at_once, None)]], self.tree.running(branches)
            for end in range(1, len(branches) + 1):
                later = self._least_devices(running[-1] - running[end])
                best.append(_best(self._of_branches(branches, end, behind, best), self.costs.devices - later))
            self._beside[key] = best[-1]
        return self._beside[key]

    def _of_branches(
        self, branches: tuple[Tree, ...], end: int, behind: _State, best: Sequence[list[_PartialGraph]]
    ) -> Iterator[_PartialGraph]:
        last = branches[end - 1]
        if isinstance(last, Series):
            first = self.tree.alike(last)
            assert isinstance(first, Series), "of the same signature"
            branch_graphs = self._series(first, 0, len(first.parts), behind)
            if first != last:
                moved = dict(zip(_in_order(first), _in_order(last), strict=True))
                branch_graphs = [partial._replace(stages=_Moved(moved, partial.stages)) for partial in branch_graphs]
            yield from (_joined(earlier, branch) for earlier in best[end - 1] for branch in branch_graphs)
        sums = _NOTHING
        for begin in range(end - 1, -1, -1):
            sums = _sum(sums, self.tree.sums(branches[begin]))
            stage = self._stage(branches[begin:end], sums, behind)
            if stage is None:
                return
            yield from (_joined(earlier, stage) for earlier in best[begin])


class _TreeStage(NamedTuple):
    parts: tuple[Tree, ...]
    replicas: int


class _Moved(NamedTuple):
    """Stages of a branch, applied to the layers of an equal branch."""

    layer_of: dict[int, int]
    stages: object


@functools.lru_cache(maxsize=4096)
def _in_order(tree: Tree) -> tuple[int, ...]:
    if isinstance(tree, int | Together):
        return layers_of(tree)
    return tuple(layer for part in tree.parts for layer in _in_order(part))


def _sum(first: Sums, second: Sums) -> Sums:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]


def _joined(first: _PartialGraph, second: _PartialGraph) -> _PartialGraph:
    """Combine parallel stages. The stages before them wait for the slower gradient, so the larger numbers hold."""
    return _PartialGraph(
        first.devices + second.devices,
        max(first.in_flight, second.in_flight),
        max(first.at_once, second.at_once),
        (first.stages, second.stages),
    )


def _best(rows: Iterable[_PartialGraph], devices: int) -> list[_PartialGraph]:
    """Return the Pareto front in devices, microbatches in flight and calls, of at most `devices` devices."""
    best: list[_PartialGraph] = []
    for candidate in sorted(rows, key=operator.itemgetter(0, 1, 2)):
        if candidate.devices > devices:
            break
        if not any(kept.in_flight <= candidate.in_flight and kept.at_once <= candidate.at_once for kept in best):
            best.append(candidate)
    return best


def _replaced(part: Parallel, number: int, parts: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Return the branches with `parts` in place of branch `number`."""
    branch = parts[0] if len(parts) == 1 else Series(parts)
    branches = branch.parts if isinstance(branch, Parallel) else (branch,) if parts else ()
    return (*part.parts[:number], *branches, *part.parts[number + 1 :])


def _listed(stages: object) -> Iterator[ReplicatedStage]:
    """Yield the stages of a linked list, in order."""
    if isinstance(stages, _TreeStage):
        layers = sorted(layer for part in stages.parts for layer in layers_of(part))
        yield ReplicatedStage(tuple(layers), stages.replicas)
    elif isinstance(stages, _Moved):
        for stage in _listed(stages.stages):
            yield replace(stage, layers=tuple(sorted(stages.layer_of[layer] for layer in stage.layers)))
    elif isinstance(stages, tuple):
        for node in stages:
            yield from _listed(node)
