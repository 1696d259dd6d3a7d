"""CAPTURE's planner: cuts and data-parallel degrees over nodes of k devices, for the smallest peak.

Dreuning, Verstoep, Bal, van Nieuwpoort, "CAPTURE: Memory-Centric Partitioning for Distributed DNN Training with Hybrid
Parallelism", HiPC 2023, Sec. III. Stages are placed on the nodes in order. Degrees are powers of two, and those of one
node's stages sum to k, so that no device is left over. Ties are broken by the next-largest device peak, and so on.

    M_p(l, m, 1) = M_i(l) + sum of M_a(k) for k = l+1 .. m
    M_p(l, m, d) = weights + activations / d

Algorithm 4 enumerates the placements, which takes exponential time. The dynamic program here has the same answers: the
best device peaks, in falling order, of the stages from layer l on do not depend on the stages before them, since all
plans of a state have equally many devices. State: first layer, devices used from the end (which determine the node),
and the microbatches in flight behind. The layer merger is as printed: while there are too many groups, it merges the
two neighbours with the smallest M_i together. M_p is not exactly the bytes of a rank, so `placements_by_bound` yields
more placements, which the caller folds.

Deviations, unless `printed` is True:

- The printed peak does not depend on a stage's position: every sample of a step that a replica takes counts. Under 1F1B
  a stage holds a call only until its gradient has come back, so the calls in flight are those that
  `schedules/generators` gives for the stages behind it in the plan.
- Replicas keep the gradients of each of their blocks until the exchange, unlike with the paper's all-reduce. With
  `costs.blocks` blocks in a step a replica holds ceil(blocks / d) - 1 more gradients of its parameters, and takes as
  many microbatches at once as a block has.
- For degrees above 4 the paper fits a logarithm a + b ln(d) through the predictions for 2 and 4. Its own model is
  a + b / d; the logarithm predicts only the weights for 8, and less than the weights beyond. Here the bytes of every
  degree follow from its number of calls, and nothing is fitted.
- Only `placements_by_bound` chooses tensor parallelism, for layers that `splits` has divided: the devices of a stage
  share the parts of each layer, and the first has all else. `fitted` predicts its bytes from a profile's runs.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import treated
from varuna_capslog.planners.intervals import stage_bytes
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.schedules.generators import table_3_2

__all__ = ["DegreePeaks", "KeptBytes", "capture_stages", "log_fit", "merged", "placements_by_bound"]

MOST_GROUPS = 64
"""Most groups of layers; more layers are merged to this number, which the paper leaves to its user."""

_MEASURED = 4
"""The largest degree that the paper profiles."""


def log_fit(low: tuple[int, float], high: tuple[int, float], degree: int) -> float:
    """Return a + b ln(degree) through two points (degree, bytes), Sec. III-B3."""
    slope = (high[1] - low[1]) / math.log(high[0] / low[0])
    return low[1] + slope * math.log(degree / low[0])


@dataclass(frozen=True)
class DegreePeaks:
    """Predicts the bytes of each device of a replicated stage. printed: as in the paper, by all samples of a step."""

    costs: GraphCosts
    printed: bool = False

    @cached_property
    def _alone(self) -> AdditiveCosts:
        return AdditiveCosts.of_statistics(self.costs.isolated, self.costs.added)

    def of(self, first: int, end: int, degree: int, in_flight: int) -> float:
        """Return the bytes of layers first .. end-1 on each of `degree` devices. in_flight: of all devices together."""
        if self.printed and degree > _MEASURED:
            two, four = ((known, self.of(first, end, known, in_flight)) for known in (2, _MEASURED))
            return log_fit(two, four, degree)
        costs, blocks = self.costs, self.costs.blocks or self.costs.microbatches
        calls, waiting = -(-blocks // degree) * (costs.microbatches // blocks), 0.0
        if not self.printed:
            calls = min(calls, -(-in_flight // degree))
            weights = costs.sums["parameters"]
            waiting = (-(-blocks // degree) - 1) * float(weights[end] - weights[first]) if degree > 1 else 0.0
        saved = costs.sums["saved"]
        return self._alone.stage_bytes(first, end) + (calls - 1) * float(saved[end] - saved[first]) + waiting


def merged(costs: GraphCosts, groups: int) -> list[int]:
    """Return the first layer of each of `groups` groups, and L, by the layer merger (Sec. III-A3)."""
    group_costs = AdditiveCosts.of_statistics(costs.isolated, costs.added)
    bounds = list(range(costs.num_layers + 1))
    while len(bounds) - 1 > max(1, groups):
        together = [group_costs.stage_bytes(bounds[at], bounds[at + 2]) for at in range(len(bounds) - 2)]
        del bounds[together.index(min(together)) + 1]
    return bounds


def capture_stages(costs: GraphCosts, printed: bool = False, groups: int = MOST_GROUPS) -> list[ReplicatedStage]:
    """Return the stages of the smallest peak in order, on all devices, node by node; capacities are not checked.
    O(groups^2 x devices x log k) times the numbers in flight, each step a comparison of at most `devices` numbers.
    Raises CapslogError where the nodes are not alike, or the layers are too few for them.
    """
    devices, size = costs.devices, _node_size(costs)
    bounds, peaks = merged(costs, groups), DegreePeaks(costs, printed)
    of_block = costs.microbatches // (costs.blocks or costs.microbatches)
    count = len(bounds) - 1
    degrees = _degrees(size, costs.most_replicas)
    best: dict[tuple[int, int], list[_Tail]] = {(count, 0): [_Tail([], 0, 0)]}
    for used in range(1, devices + 1):
        room = (used - 1) % size + 1  # used devices on the node of this stage
        for first in range(count):
            tails: list[_Tail] = []
            for degree in (degree for degree in degrees if degree <= room):
                for end in range(first + 1, count + 1):
                    for behind in best.get((end, used - degree), ()):
                        in_flight, at_once = behind.before(degree * of_block if degree > 1 else 1)
                        peak = peaks.of(bounds[first], bounds[end], degree, in_flight)
                        _keep(tails, behind, peak, in_flight, at_once, end, degree, printed)
            if tails:
                best[first, used] = tails
    if (0, devices) not in best:
        raise CapslogError(
            f"planner 'capture' gives each of {devices // size} nodes stages whose degrees (powers of two, at most "
            f"{degrees[-1]}) sum to {size}, but {count} layers are too few for that; choose fewer devices, another "
            "node size, or planner pipedream"
        )
    at, stages = min(best[0, devices], key=lambda tail: tail.row), list[ReplicatedStage]()
    first = 0
    while at.behind is not None:
        stages.append(ReplicatedStage(tuple(range(bounds[first], bounds[at.end])), at.degree))
        first, at = at.end, at.behind
    return stages


def _node_size(costs: GraphCosts) -> int:
    """Return the devices of a node. Raises CapslogError where the nodes are not alike."""
    size = costs.link.node_devices or costs.devices
    if costs.devices % size:
        raise CapslogError(
            f"{costs.devices} devices are no whole number of nodes with {size}; choose a node size "
            "(pipeline.node_devices) that divides the devices"
        )
    return size


def _degrees(size: int, most: int) -> list[int]:
    return [1 << power for power in range(size.bit_length()) if 1 << power <= most]


@dataclass
class _Tail:
    """Stages from some layer to the loss. row: bytes of their devices, the largest first. in_flight, end, degree: of
    the first stage. at_once: microbatches that the widest stage takes at once. behind: the stages behind the first.
    devices: of the first stage's layers, where several share them.
    """

    row: list[float]
    in_flight: int
    at_once: int
    end: int = 0
    degree: int = 0
    behind: _Tail | None = None
    devices: tuple[int, ...] = ()

    def before(self, size: int) -> tuple[int, int]:
        """Return in_flight and at_once with a stage of `size` microbatches at once before these (`stage_limits`)."""
        if not self.row:
            return size, size
        needed = table_3_2(1, size, 1, self.at_once, self.in_flight)
        return -(-needed // size) * size, max(size, self.at_once)

    def no_worse(self, row: list[float], in_flight: int, at_once: int) -> bool:
        """Return True where these stages dominate others: limits grow with the microbatches in flight behind."""
        return self.at_once == at_once and self.in_flight <= in_flight and self.row <= row


def _keep(
    tails: list[_Tail], behind: _Tail, peak: float, in_flight: int, at_once: int, end: int, degree: int, printed: bool
) -> None:
    """Add a stage before `behind`, unless one of `tails` dominates it, and drop those that it dominates."""
    if printed:
        in_flight = at_once = 1  # the printed peaks do not depend on them
    top = max([peak, *behind.row[:1]])
    if any(tail.at_once == at_once and tail.in_flight <= in_flight and tail.row[0] < top for tail in tails):
        return
    row = sorted([peak] * degree + behind.row, reverse=True)
    if any(tail.no_worse(row, in_flight, at_once) for tail in tails):
        return
    added = _Tail(row, in_flight, at_once, end, degree, behind)
    tails[:] = [tail for tail in tails if not added.no_worse(tail.row, tail.in_flight, tail.at_once)]
    tails.append(added)


# -- Placements in the order of a lower bound of their peak, for a caller that computes their exact bytes.
#
#     state: first layer, devices used from the end, microbatches in flight and the widest stage behind it, blocks
#     priority: the larger of the stages' bounds so far and the least that the layers before them need
#     transition: one more stage before these (best-first search, A*)
#
# The first placement whose bound reaches a known peak ends the search: no later placement is smaller.


_MOST_STATES = 20_000
"""Most states taken from the queue."""


class _BytesOfRange(NamedTuple):
    """Bytes of a range of layers. first, later: resident bytes and those of a block's first or later backward.
    held: by each other call in flight. gradients: of a block that waits. statistics: left by each forward.
    """

    resident: int
    first: int
    later: int
    held: int
    gradients: int
    statistics: int


class KeptBytes:
    """Least bytes of a device of a stage that keeps everything under 1F1B: what the fold counts without messages and
    the gradient exchange.
    """

    def __init__(self, ranges: RangeBytes, costs: GraphCosts) -> None:
        self._ranges, self._microbatches, self._blocks = ranges, costs.microbatches, costs.blocks or 1
        self.range_bytes = functools.cache(self._range_bytes)
        self._moments = functools.cache(self._moments_of)
        self.of = functools.cache(self._bytes)

    def _bytes(self, first: int, end: int, degree: int, in_flight: int, blocks: int | None) -> int:
        """Return the most bytes of layers first .. end-1 during any backward. in_flight: calls of a device. blocks:
        None: as the run has it.
        """
        range_bytes = self.range_bytes(first, end)
        return max(
            (range_bytes.first if fresh else range_bytes.later)
            + others * range_bytes.held
            + waiting * range_bytes.gradients
            + begun * range_bytes.statistics
            for others, begun, waiting, fresh in self._moments(degree, in_flight, blocks or self._blocks)
        )

    def _moments_of(self, degree: int, in_flight: int, blocks: int) -> set[tuple[int, int, int, bool]]:
        """Return for each backward: the other calls in flight, the forwards so far, the blocks whose gradients wait for
        the exchange, and whether it is the first of its block, so that its gradients appear layer by layer.
        """
        of_block = self._microbatches // blocks
        calls = -(-blocks // degree) * of_block
        ahead, moments = min(in_flight, calls), set[tuple[int, int, int, bool]]()
        for call in range(calls):
            waiting = min(call // of_block, calls if degree > 1 else 1)
            moments.add((min(ahead, calls - call) - 1, min(calls, call + ahead), waiting, call % of_block == 0))
        return moments

    def _ranges_of(self, layers: Sequence[int]) -> RangeBytes:
        return self._ranges

    def _range_bytes(self, first: int, end: int) -> _BytesOfRange:
        ranges = self._ranges_of(range(first, end))
        treatment = treated(ranges, ((first, end),), ())
        resident, statistics = int(ranges.resident(range(first, end))), int(ranges.statistics(first, end))
        later = stage_bytes(ranges, first, end, (), 1) - statistics
        others = int(treatment.held), int(ranges.made(first, end)), statistics
        return _BytesOfRange(resident, resident + int(treatment.first_backward), later, *others)


class SharedBytes(KeptBytes):
    """`KeptBytes` for plans with direct routes, in which d devices may share a stage: each has an equal part of the
    layers side by side, and the first device also has all other layers.
    """

    def __init__(self, ranges: RangeBytes, costs: GraphCosts) -> None:
        super().__init__(ranges, costs)
        self._rows, self._readers = costs.rows, dict[int, int]()
        for writer, reader, _ in costs.edges:
            self._readers[writer] = min(reader, self._readers.get(writer, reader))
        self.devices = functools.cache(self._devices)
        self.of_shared = functools.cache(self._shared)

    def _ranges_of(self, layers: Sequence[int]) -> RangeBytes:
        return self._ranges.of_stage(layers)

    def reader(self, layer: int) -> int:
        """Return the first layer that reads from this layer, or the next layer."""
        return self._readers.get(layer, layer + 1)

    def _devices(self, first: int, end: int, degree: int) -> tuple[int, ...]:
        """Return the device of each layer; () where a cut divides a row, or no row has `degree` equal parts."""
        rows = [row for row in self._rows if row[0] < end and first < row[1]]
        if any(row[0] < first or end < row[1] for row in rows):
            return ()
        devices = [0] * (end - first)
        for begin, behind in rows:
            part, rest = divmod(behind - begin, degree)
            if not rest:
                devices[begin - first : behind - first] = [number // part for number in range(behind - begin)]
        return tuple(devices) if any(devices) else ()

    def _shared(self, first: int, end: int, degree: int, in_flight: int) -> int:
        """Return the least bytes of the fullest device: its gradients at the update, or the graphs of its parts."""
        stage = ReplicatedStage(tuple(range(first, end)), 1, self.devices(first, end, degree))
        peaks, calls = [], min(in_flight, self._microbatches)
        for device in range(degree):
            pieces = [piece for number, piece in stage.pieces if number == device]
            layers = [layer for piece in pieces for layer in range(*piece)]
            ranges = self._ranges
            graphs = sum(ranges.saved(*piece) for piece in pieces) * calls if device else 0
            made = sum(ranges.made(*piece) for piece in pieces)
            peaks.append(int(ranges.resident(layers)) + max(made, graphs))
        return max(peaks)


@dataclass(frozen=True)
class _Placement:
    """Stages of a step in `blocks` accumulation blocks (None: as in the run). bound: least peak bytes of a device."""

    stages: list[ReplicatedStage]
    blocks: int | None
    bound: int


def placements_by_bound(
    costs: GraphCosts, ranges: RangeBytes, below: int | None = None, groups: int = MOST_GROUPS
) -> Iterator[_Placement]:
    """Yield placements and numbers of blocks by rising bound of their largest device, from at most `_MOST_STATES`
    states. below: only bounds below this number of bytes.
    """
    size, bounds = _node_size(costs), merged(costs, groups)
    counts = [count for count in range(1, costs.microbatches + 1) if costs.microbatches % count == 0]
    order, queue = itertools.count(), list[tuple[int, int, _Partial]]()
    peaks = [KeptBytes(ranges, costs), *([SharedBytes(ranges, costs)] if costs.rows else [])]
    spaces = [
        _Space(costs, bounds, size, blocks, bound, below)
        for bound in peaks
        for blocks in (None, *([costs.blocks] if costs.blocks else counts))
    ]
    for space in spaces:
        start = _Partial(space, len(bounds) - 1, 0, _Tail([], 0, 0), 0)
        if (least := space.least_before(start.first, 0)) is not None:
            heapq.heappush(queue, (least, next(order), start))
    for _ in range(_MOST_STATES):
        if not queue:
            return
        peak, _, partial = heapq.heappop(queue)
        if partial.first == 0:
            yield _Placement(list(partial.listed(bounds)), partial.space.blocks, peak)
            continue
        for longer in partial.space.longer(partial):
            least = partial.space.least_before(longer.first, longer.used)
            if least is not None:
                heapq.heappush(queue, (max(peak, longer.peak, least), next(order), longer))


class _Stage(NamedTuple):
    """A stage of the layers from `first` on that fits. peak: least bytes of a device. devices: as in `_Tail`."""

    first: int
    peak: int
    degree: int
    devices: tuple[int, ...] = ()


class _Space:
    """Placements with one number of blocks; blocks None: placements without replicas. With `SharedBytes` as bound:
    placements with a stage that devices share.
    """

    def __init__(
        self, costs: GraphCosts, bounds: list[int], size: int, blocks: int | None, bound: KeptBytes, below: int | None
    ) -> None:
        self._below = below
        self.costs, self.bounds, self.size, self.blocks = costs, bounds, size, blocks
        self._of_block = costs.microbatches // (blocks or 1)
        self._bound, self._least = bound, dict[tuple[int, int], int | None]()
        self._shared = bound if isinstance(bound, SharedBytes) else None

    def longer(self, partial: _Partial) -> Iterator[_Partial]:
        """Yield the placements with one more stage before those of `partial`."""
        shares, behind = self._shared is not None, partial.behind
        if self._shared is not None:  # routes are direct: the next stage may read nothing of these layers
            reader = self._shared.reader(self.bounds[partial.first] - 1)
            while behind.behind is not None and self.bounds[behind.end] <= reader:
                behind = behind.behind
        for degree, shared in self._ways(partial.used):
            in_flight, at_once = behind.before(1 if shared or degree == 1 else degree * self._of_block)
            for stage in self._stages(partial.first, degree, shared, in_flight):
                tail = _Tail([0], in_flight, at_once, partial.first, degree, partial.behind, stage.devices)
                widest, parts = max(partial.widest, 1 if shared else degree), partial.shares or shared
                if stage.first or ((widest > 1 or self.blocks is None) and parts == shares):
                    peak = max(partial.peak, stage.peak)
                    yield _Partial(self, stage.first, partial.used + degree, tail, peak, widest, parts)

    def least_before(self, end: int, used: int) -> int | None:
        """Return the least peak of layers 0 .. end-1 on the devices that are not used, with the fewest calls in flight;
        None where they cannot be placed.
        """
        free_devices = self.costs.devices - used
        if end == 0 or free_devices == 0:
            return 0 if end == free_devices == 0 else None
        if (end, used) not in self._least:
            peaks = []
            for degree, shared in self._ways(used):
                fewest = (1 if shared else degree) + (used > 0)
                for stage in self._stages(end, degree, shared, fewest):
                    others = self.least_before(stage.first, used + degree)
                    if others is not None:
                        peaks.append(max(others, stage.peak))
            self._least[end, used] = min(peaks, default=None)
        return self._least[end, used]

    def _ways(self, used: int) -> Iterator[tuple[int, bool]]:
        """Yield degree, and whether the devices share the layers, for a stage before those on `used` devices."""
        room = min(self.size - used % self.size, self.costs.devices - used)
        for degree in _degrees(room, room):
            if degree <= (self.blocks or 1):
                yield degree, False
            if degree > 1 and self._shared is not None:
                yield degree, True

    def _stages(self, end: int, degree: int, shared: bool, in_flight: int) -> Iterator[_Stage]:
        """Yield the stages that end before layer `end`."""
        calls, last = -(-in_flight // (1 if shared else degree)), self.bounds[end]
        for first in range(end - 1, -1, -1):
            begin = self.bounds[first]
            if shared and self._shared is not None:
                devices = self._shared.devices(begin, last, degree)
                if devices and self._is_below(peak := self._shared.of_shared(begin, last, degree, calls)):
                    yield _Stage(first, peak, degree, devices)
                continue
            if self._below is not None and self._bound.range_bytes(begin, last).resident >= self._below:
                return  # resident bytes only grow with the stage
            if self._is_below(peak := self._bound.of(begin, last, degree, calls, self.blocks)):
                yield _Stage(first, peak, degree)

    def _is_below(self, peak: int) -> bool:
        return self._below is None or peak < self._below


@dataclass(frozen=True)
class _Partial:
    """Stages of the layers from `first` on. used: their devices. peak: bound of the largest. widest: most replicas.
    shares: True where devices share a stage.
    """

    space: _Space
    first: int
    used: int
    behind: _Tail
    peak: int
    widest: int = 1
    shares: bool = False

    def listed(self, bounds: list[int]) -> Iterator[ReplicatedStage]:
        """Yield the stages in order."""
        first, tail = self.first, self.behind
        while tail.behind is not None:
            replicas = 1 if tail.devices else tail.degree
            yield ReplicatedStage(tuple(range(bounds[first], bounds[tail.end])), replicas, tail.devices)
            first, tail = tail.end, tail.behind
