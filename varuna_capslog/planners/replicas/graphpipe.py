"""GraphPipe's planner: stages of a series-parallel graph with replicas, so that the slowest is as fast as can be.

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism", ASPLOS
2025, Sec. 5 (Algorithm 2), 6 (Algorithm 3) and Table 3.2 of the thesis that prints it. For a limit t of the time per
microbatch a dynamic program finds stages that keep it, and bisection finds the least t.

    state: a part of the tree, and the stages behind it (i microbatches in flight, calls of a at a time)
    value: every (devices, i, a) of its first stages of which none is better in all three
    transitions: the part as one stage; in series, what is behind and then what is before; in parallel, the branches,
    of which neighbours may share one stage

A stage takes the fewest replicas with which it keeps t and fits. More of them would never help the stages before it,
since i and a only grow with them.

Where we deviate from the printed text:

- Algorithm 2 keeps what a series split finds only inside its loop over parallel splits, so that it is lost; here both
  are kept.
- Its two halves of a parallel split "share the same source and sink nodes", which some stage must hold. Here fork and
  join are layers in series with the branches, and a stage may also hold a join together with the end of one branch (as
  the published plan of the case study does) or with the last few branches, or a fork with the begin of one.
- A stage of r replicas works on r microbatches at once, and Table 3.2 takes r for the size of its calls: the paper
  parts each microbatch among the replicas of its stage, the contract gives each of them whole ones.
- The time per microbatch leaves out transfers, and how the pipeline fills. So several stage graphs come back, those of
  larger limits t too, and `planning/placed/replicated` plays them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.planners.replicas.series_parallel import (
    Parallel,
    Series,
    Together,
    Tree,
    coarsened,
    layers_of,
    tree_of,
)
from varuna_capslog.schedules.in_flight import table_3_2

__all__ = ["LONGER", "CostedTree", "StageGraphs", "graphpipe_stages"]

LONGER = (1.0, 1.15, 1.5)
"""Limits of the time per microbatch, in parts of the least, whose stage graphs are played."""

_MOST_IN_SERIES = 32
"""Parts of a series that are told apart; of longer ones, neighbouring layers are joined to groups, as the paper joins
small operators.
"""

_PRECISION = 0.01
"""Where the bisection of the limit ends, as a part of it."""


Sums = tuple[float, float, float, float]
"""Seconds, static, saved and parameter bytes of some layers."""

_NOTHING: Sums = (0.0, 0.0, 0.0, 0.0)


class _State(NamedTuple):
    """Stages behind a part: microbatches in flight in the first of them, and the largest call on the way to the loss;
    0, 0 behind the last layer.
    """

    in_flight: int
    at_once: int


class _Found(NamedTuple):
    """Some stages: their devices, what `_State` says of the first of them, and themselves as a linked list."""

    devices: int
    in_flight: int
    at_once: int
    stages: object

    @property
    def state(self) -> _State:
        return _State(self.in_flight, self.at_once)


_BEHIND_ALL = _State(0, 0)


def graphpipe_stages(costs: GraphCosts) -> list[list[ReplicatedStage]]:
    """Return stage graphs, the one of the least time per microbatch with the fewest in flight first; [] where none fit.

    Each is in an order in which a stage stands behind those that it reads from.
    """
    whole = tree_of(costs.num_layers, ((writer, reader) for writer, reader, _ in costs.edges))
    tree = CostedTree(costs, coarsened(whole, costs.seconds, _MOST_IN_SERIES))
    least = _least_limit(tree)
    if least is None:
        return []
    found: dict[tuple[ReplicatedStage, ...], None] = {}
    for longer in LONGER:
        for one in StageGraphs(tree, least * longer).found():
            found[tuple(one)] = None
    return [list(one) for one in found]


def _least_limit(tree: CostedTree) -> float | None:
    """Algorithm 2, lines 2 to 11: the least time per microbatch that some stages keep; None where none fit."""
    costs = tree.costs
    whole = sum(costs.seconds)
    below, enough = whole / costs.devices, whole / costs.devices
    while (reached := StageGraphs(tree, enough).least()) is None:
        if enough > 2 * whole + costs.exchange_seconds(float(sum(costs.parameters)), costs.devices):
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
    """A tree with what its parts cost, and which of them are alike."""

    def __init__(self, costs: GraphCosts, tree: Tree) -> None:
        self.costs, self.root = costs, tree
        self.sums = functools.cache(self._sums)
        self.running = functools.cache(self._running)
        self.signature = functools.cache(self._signature)
        self._first: dict[object, Tree] = {}

    def alike(self, tree: Tree) -> Tree:
        """The first part that was asked for of those that cost the same, layer by layer."""
        return self._first.setdefault(self.signature(tree), tree)

    def different(self, part: Parallel) -> list[tuple[int, tuple[Tree, ...]]]:
        """The last of the branches that are alike, each with its number and the parts that are in series."""
        last = {self.signature(one): number for number, one in enumerate(part.parts)}
        branches = [(number, part.parts[number]) for number in last.values()]
        return [(number, one.parts if isinstance(one, Series) else (one,)) for number, one in branches]

    def _sums(self, tree: Tree) -> Sums:
        if isinstance(tree, int | Together):
            names = ("seconds", "static", "saved", "parameters")
            seconds, *others = (self.costs.total(name, layers_of(tree)) for name in names)
            return seconds, others[0], others[1], others[2]
        return functools.reduce(_sum, (self.sums(part) for part in tree.parts), _NOTHING)

    def _running(self, parts: tuple[Tree, ...]) -> tuple[float, ...]:
        """Running sums of the seconds of parts, beginning with 0."""
        return tuple(itertools.accumulate((self.sums(part)[0] for part in parts), initial=0.0))

    def _signature(self, tree: Tree) -> object:
        if isinstance(tree, int | Together):
            return self.sums(tree), len(layers_of(tree))
        return type(tree).__name__, tuple(self.signature(one) for one in tree.parts)


class StageGraphs:
    """The stage graphs in which no stage takes longer than `limit` seconds per microbatch."""

    def __init__(self, tree: CostedTree, limit: float) -> None:
        self.tree, self.costs, self.limit = tree, tree.costs, limit
        self._in_series: dict[tuple[Series, int, int, _State], list[_Found]] = {}
        self._beside: dict[tuple[tuple[Tree, ...], _State], list[_Found]] = {}
        self._replicas = functools.cache(self._fewest_replicas)

    def found(self) -> list[list[ReplicatedStage]]:
        """By rising microbatches in flight in the first stages (PICKBETTER), then devices."""
        ranked = sorted(self._whole(), key=lambda one: (one.in_flight, one.at_once, one.devices))
        return [list(_listed(one.stages)) for one in ranked]

    def least(self) -> float | None:
        """The least time per microbatch of the slowest stage of a stage graph; None without any."""
        return min((self._slowest(one.stages) for one in self._whole()), default=None)

    def _whole(self) -> list[_Found]:
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
        """ESTIMATETPS: of the busiest replica, with its part of the exchange of gradients."""
        return sums[0] * self.costs.share(replicas) + self.costs.exchange_seconds(sums[3], replicas)

    # -- the three kinds of parts

    def _stage(self, parts: tuple[Tree, ...], sums: Sums, behind: _State) -> _Found | None:
        """Lines 24 to 28: the parts as one stage; None where it is too slow or too large."""
        found = self._replicas(sums, behind)
        return None if found is None else _Found(*found, _TreeStage(parts, found[0]))

    def _fewest_replicas(self, sums: Sums, behind: _State) -> tuple[int, int, int] | None:
        """The fewest replicas with which a stage keeps the limit and fits, and its state."""
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
        """Devices without which so much work takes longer than the limit, however it is shared."""
        return math.ceil(seconds / self.limit * (1 - 1e-9))

    def _series(self, tree: Series, first: int, end: int, behind: _State) -> list[_Found]:
        """Parts first .. end-1 of a series."""
        if first == end:
            return [_Found(0, behind.in_flight, behind.at_once, None)]
        key = tree, first, end, behind
        if key not in self._in_series:
            self._in_series[key] = _best(self._of_series(tree, first, end, behind), self.costs.devices)
        return self._in_series[key]

    def _of_series(self, tree: Series, first: int, end: int, behind: _State) -> Iterator[_Found]:
        sums = _NOTHING
        for begin in range(end - 1, first - 1, -1):
            part = tree.parts[begin]
            if isinstance(part, Parallel):
                if begin == end - 1:
                    for one in self._parallel(part.parts, behind):
                        yield from self._before(tree, first, begin, one)
                    yield from self._with_a_begin(tree, first, begin, behind)
                else:
                    yield from self._with_an_end(tree, first, begin, end, behind)
            sums = _sum(sums, self.tree.sums(part))
            stage = self._stage(tree.parts[begin:end], sums, behind)
            if stage is not None:
                yield from self._before(tree, first, begin, stage)
            elif sums[0] > self.limit * self.costs.devices:
                return

    def _before(self, tree: Series, first: int, end: int, found: _Found) -> Iterator[_Found]:
        """Lines 31 to 37: all that stands before some stages, and they."""
        running = self.tree.running(tree.parts)
        if found.devices + self._least_devices(running[end] - running[first]) > self.costs.devices:
            return
        for one in self._series(tree, first, end, found.state):
            yield _Found(one.devices + found.devices, one.in_flight, one.at_once, (one.stages, found.stages))

    def _with_an_end(self, tree: Series, first: int, place: int, end: int, behind: _State) -> Iterator[_Found]:
        """What is in series behind parallel branches, and the end of one of these or the last few, as one stage."""
        part, after = tree.parts[place], tree.parts[place + 1 : end]
        assert isinstance(part, Parallel)
        tail = functools.reduce(_sum, map(self.tree.sums, after), _NOTHING)
        for own, left in self._ends(part):
            sums = functools.reduce(_sum, map(self.tree.sums, own), tail)
            stage = self._stage((*own, *after), sums, behind)
            if stage is None:
                continue
            if stage.devices + self._least_devices(self.tree.running(left)[-1]) > self.costs.devices:
                continue
            for beside in self._parallel(left, stage.state):
                both = beside._replace(devices=beside.devices + stage.devices, stages=(beside.stages, stage.stages))
                yield from self._before(tree, first, place, both)

    def _ends(self, part: Parallel) -> Iterator[tuple[tuple[Tree, ...], tuple[Tree, ...]]]:
        """What may share a stage with a join, and the branches that are left then."""
        for number, parts in self.tree.different(part):
            for begin in range(len(parts) - 1, -1, -1):
                yield parts[begin:], _replaced(part, number, parts[:begin])
        for begin in range(len(part.parts) - 2, 0, -1):
            yield part.parts[begin:], part.parts[:begin]

    def _with_a_begin(self, tree: Series, first: int, place: int, behind: _State) -> Iterator[_Found]:
        """What is in series before parallel branches, and the begin of one of these, as one stage."""
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

    def _parallel(self, branches: tuple[Tree, ...], behind: _State) -> list[_Found]:
        """Lines 38 to 44: branches beside one another; those that are neighbours may share one stage."""
        key = branches, behind
        if key not in self._beside:
            best, running = [[_Found(0, behind.in_flight, behind.at_once, None)]], self.tree.running(branches)
            for end in range(1, len(branches) + 1):
                later = self._least_devices(running[-1] - running[end])
                best.append(_best(self._of_branches(branches, end, behind, best), self.costs.devices - later))
            self._beside[key] = best[-1]
        return self._beside[key]

    def _of_branches(
        self, branches: tuple[Tree, ...], end: int, behind: _State, best: Sequence[list[_Found]]
    ) -> Iterator[_Found]:
        last = branches[end - 1]
        if isinstance(last, Series):
            first = self.tree.alike(last)
            assert isinstance(first, Series), "of the same signature"
            alone = self._series(first, 0, len(first.parts), behind)
            if first != last:
                moved = dict(zip(_in_order(first), _in_order(last), strict=True))
                alone = [one._replace(stages=_Moved(moved, one.stages)) for one in alone]
            yield from (_joined(one, other) for one in best[end - 1] for other in alone)
        sums = _NOTHING
        for begin in range(end - 1, -1, -1):
            sums = _sum(sums, self.tree.sums(branches[begin]))
            stage = self._stage(branches[begin:end], sums, behind)
            if stage is None:
                return
            yield from (_joined(one, stage) for one in best[begin])


class _TreeStage(NamedTuple):
    """Parts of the tree as one stage."""

    parts: tuple[Tree, ...]
    replicas: int


class _Moved(NamedTuple):
    """Stages of a branch, for the layers of another one that is alike."""

    layer_of: dict[int, int]
    stages: object


@functools.lru_cache(maxsize=4096)
def _in_order(tree: Tree) -> tuple[int, ...]:
    """All layers, part by part."""
    if isinstance(tree, int | Together):
        return layers_of(tree)
    return tuple(layer for part in tree.parts for layer in _in_order(part))


def _sum(one: Sums, other: Sums) -> Sums:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _joined(one: _Found, other: _Found) -> _Found:
    """Stages beside one another: what stands before them waits for the slower to answer."""
    return _Found(
        one.devices + other.devices,
        max(one.in_flight, other.in_flight),
        max(one.at_once, other.at_once),
        (one.stages, other.stages),
    )


def _best(rows: Iterable[_Found], devices: int) -> list[_Found]:
    """Those that no other one is as good as in devices, microbatches in flight and calls."""
    found: list[_Found] = []
    for one in sorted(rows, key=operator.itemgetter(0, 1, 2)):
        if one.devices > devices:
            break
        if not any(other.in_flight <= one.in_flight and other.at_once <= one.at_once for other in found):
            found.append(one)
    return found


def _replaced(part: Parallel, number: int, parts: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """The branches with other parts of one of them."""
    alone = parts[0] if len(parts) == 1 else Series(parts)
    own = alone.parts if isinstance(alone, Parallel) else (alone,) if parts else ()
    return (*part.parts[:number], *own, *part.parts[number + 1 :])


def _listed(stages: object) -> Iterator[ReplicatedStage]:
    """The stages of a linked list, in order."""
    if isinstance(stages, _TreeStage):
        layers = sorted(layer for part in stages.parts for layer in layers_of(part))
        yield ReplicatedStage(tuple(layers), stages.replicas)
    elif isinstance(stages, _Moved):
        for one in _listed(stages.stages):
            yield replace(one, layers=tuple(sorted(stages.layer_of[layer] for layer in one.layers)))
    elif isinstance(stages, tuple):
        for one in stages:
            yield from _listed(one)
