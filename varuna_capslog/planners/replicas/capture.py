"""CAPTURE's planner: cuts and data-parallel degrees over nodes of k devices, for the smallest peak.

Dreuning, Verstoep, Bal, van Nieuwpoort, "CAPTURE: Memory-Centric Partitioning for Distributed DNN Training with Hybrid
Parallelism", HiPC 2023, Sec. III. Stages stand on the nodes in order; the degrees of those on one node sum to k, so
that no device is left over, and each is a power of two. Ties are broken by the next-largest device peak, and so on.

    M_p(l, m, 1) = M_i(l) + sum of M_a(k) for k = l+1 .. m
    M_p(l, m, d) = weights + activations / d

Algorithm 4 enumerates the placements, which takes exponential time. The dynamic program here has the same answers: the
best device peaks, in falling order, of the stages from layer l on do not depend on the stages before them, since all
plans of a state have equally many. State: first layer, devices used from the end (which determine the node), and the
microbatches in flight behind. The layer merger is as printed: while there are too many groups, it merges the two
neighbours with the smallest M_i together.

Deviations, unless `printed` is True:

- The printed peak does not depend on a stage's position: every sample of a step that a replica takes counts. Under 1F1B
  a stage holds a call only until its gradient has come back, so the calls in flight are those that
  `schedules/generators` gives for the stages behind it in the plan.
- Replicas keep the gradients of each of their blocks until the exchange, which the paper's all-reduce does not. With
  `costs.blocks` blocks in a step a replica holds ceil(blocks / d) - 1 more gradients of its parameters, and takes as
  many microbatches at once as a block has.
- For degrees above 4 the paper fits a logarithm a + b ln(d) through the predictions for 2 and 4. Its own model is
  a + b / d; the logarithm predicts only the weights for 8, and less than the weights beyond. Here the bytes of every
  degree follow from its number of calls, and nothing is fitted.
- Tensor parallelism is left out, since no layer offers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.schedules.generators import table_3_2

__all__ = ["DegreePeaks", "capture_stages", "merged"]

MOST_GROUPS = 64
"""Most groups of layers; more layers are merged to so many. The paper leaves the number to its user."""

_MEASURED = 4
"""The largest degree that the paper profiles."""


@dataclass(frozen=True)
class DegreePeaks:
    """Predicts the bytes of each device of a replicated stage. printed: as the paper, from all samples of a step."""

    costs: GraphCosts
    printed: bool = False

    @cached_property
    def _alone(self) -> AdditiveCosts:
        return AdditiveCosts.of_statistics(self.costs.isolated, self.costs.added)

    def of(self, first: int, end: int, degree: int, in_flight: int) -> float:
        """Return the bytes of layers first .. end-1 on each of `degree` devices. in_flight: of all these together."""
        if self.printed and degree > _MEASURED:
            two, four = self.of(first, end, 2, in_flight), self.of(first, end, _MEASURED, in_flight)
            slope = (four - two) / math.log(2)
            return two + slope * math.log(degree / 2)
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
    alone = AdditiveCosts.of_statistics(costs.isolated, costs.added)
    bounds = list(range(costs.num_layers + 1))
    while len(bounds) - 1 > max(1, groups):
        together = [alone.stage_bytes(bounds[at], bounds[at + 2]) for at in range(len(bounds) - 2)]
        del bounds[together.index(min(together)) + 1]
    return bounds


def capture_stages(costs: GraphCosts, printed: bool = False, groups: int = MOST_GROUPS) -> list[ReplicatedStage]:
    """Return the stages of the smallest peak in order, on all devices, node by node; capacities are not checked.
    O(groups^2 x devices x log k) times the numbers in flight, each step a comparison of at most `devices` numbers.
    Raises CapslogError where the nodes are not alike, or the layers are too few for them.
    """
    devices, size = costs.devices, costs.link.node_devices or costs.devices
    if devices % size:
        raise CapslogError(
            f"{devices} devices are no whole number of nodes with {size}; choose a node size "
            "(pipeline.node_devices) that divides the devices"
        )
    bounds, peaks = merged(costs, groups), DegreePeaks(costs, printed)
    of_block = costs.microbatches // (costs.blocks or costs.microbatches)
    count = len(bounds) - 1
    degrees = [1 << power for power in range(size.bit_length()) if 1 << power <= costs.most_replicas]
    best: dict[tuple[int, int], list[_Rest]] = {(count, 0): [_Rest([], 0, 0)]}
    for used in range(1, devices + 1):
        room = (used - 1) % size + 1  # counted devices on the node of this stage
        for first in range(count):
            tails: list[_Rest] = []
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


@dataclass
class _Rest:
    """Stages from some layer to the loss. row: bytes of their devices, the largest first. in_flight, end, degree: of
    the first stage. at_once: microbatches that the widest stage takes at once. behind: the stages behind the first.
    """

    row: list[float]
    in_flight: int
    at_once: int
    end: int = 0
    degree: int = 0
    behind: _Rest | None = None

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
    tails: list[_Rest], behind: _Rest, peak: float, in_flight: int, at_once: int, end: int, degree: int, printed: bool
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
    made = _Rest(row, in_flight, at_once, end, degree, behind)
    tails[:] = [tail for tail in tails if not made.no_worse(tail.row, tail.in_flight, tail.at_once)]
    tails.append(made)
