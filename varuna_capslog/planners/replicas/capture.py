"""CAPTURE's planner: cuts and data-parallel degrees over nodes of k devices, for the smallest peak.

Dreuning, Verstoep, Bal, van Nieuwpoort, "CAPTURE: Memory-Centric Partitioning for Distributed DNN Training with Hybrid
Parallelism", HiPC 2023, Sec. III. Stages stand on the nodes in order; the degrees of those on one node sum to k, so
that no device is left over, and each is a power of two. Among plans of equal peak the device with the largest bytes is
left out and the others compared, again and again.

    M_p(l, m, 1) = M_i(l) + sum of M_a(k) for k = l+1 .. m
    M_p(l, m, d) = weights + activations / d

Algorithm 4 enumerates the placements, which takes exponential time. The dynamic program here has the same answers: the
peaks of the devices, in falling order, of the stages from layer l on are best whatever stands before, since all plans
of a state have equally many. State: first layer, devices used from the end (which say the node). The layer merger is
as printed: while there are more groups than asked, the two neighbours with the smallest M_i together become one.

Where we deviate, unless `printed` is asked:

- The printed peak does not know where a stage stands: every sample of a step that a replica takes counts. Under 1F1B a
  stage holds calls only until the loss has come back, so that with n devices from it to the loss, itself included,
  ceil(n / d) calls are in flight on each of its devices. This program knows n, and takes that.
- For degrees above 4 the paper draws a logarithm a + b ln(d) through the predictions for 2 and 4. Its own model is
  a + b / d, and the logarithm gives the weights alone for 8 and less than these beyond. The number of calls gives every
  degree its own bytes here, so that nothing is fitted.
- Tensor parallelism is left out, since no layer offers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage

__all__ = ["MOST_GROUPS", "DegreePeaks", "capture_stages", "merged"]

MOST_GROUPS = 64
"""Layers beyond so many are merged; the paper leaves the number to its user."""

_MEASURED = 4
"""The largest degree that the paper profiles."""


@dataclass(frozen=True)
class DegreePeaks:
    """Bytes of a device that holds layers first .. end-1 together with others.

    printed: by the paper's predictor, for all samples of a step.
    """

    costs: GraphCosts
    printed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_alone", AdditiveCosts.of_statistics(self.costs.isolated, self.costs.added))

    def of(self, first: int, end: int, degree: int, behind: int) -> float:
        """Bytes on each of `degree` devices, with so many devices `behind` the stage."""
        if self.printed and degree > _MEASURED:
            two, four = self.of(first, end, 2, behind), self.of(first, end, _MEASURED, behind)
            slope = (four - two) / math.log(2)
            return two + slope * math.log(degree / 2)
        calls = -(-self.costs.microbatches // degree)
        if not self.printed:
            calls = min(calls, -(-(behind + degree) // degree))
        alone: AdditiveCosts = self._alone  # type: ignore[attr-defined]
        saved = self.costs.sums["saved"]
        return alone.stage_bytes(first, end) + (calls - 1) * float(saved[end] - saved[first])


def merged(costs: GraphCosts, groups: int) -> list[int]:
    """The first layer of each of so many groups, and L: what the layer merger leaves (Sec. III-A3)."""
    alone = AdditiveCosts.of_statistics(costs.isolated, costs.added)
    bounds = list(range(costs.num_layers + 1))
    while len(bounds) - 1 > max(1, groups):
        together = [alone.stage_bytes(bounds[at], bounds[at + 2]) for at in range(len(bounds) - 2)]
        del bounds[together.index(min(together)) + 1]
    return bounds


def capture_stages(costs: GraphCosts, printed: bool = False, groups: int = MOST_GROUPS) -> list[ReplicatedStage]:
    """Return the stages in order, on all devices, node by node; whatever a device may hold, the smallest peak.

    O(groups^2 x devices x log k), each step a comparison of at most `devices` numbers.

    Raises CapslogError where the nodes are not alike, or the layers are too few for them.
    """
    devices, size = costs.devices, costs.link.node_devices or costs.devices
    if devices % size:
        raise CapslogError(
            f"{devices} devices are no whole number of nodes with {size}; choose a node size (--node-devices, or "
            "pipeline.node_devices) that divides the devices"
        )
    bounds, peaks = merged(costs, groups), DegreePeaks(costs, printed)
    count = len(bounds) - 1
    degrees = [1 << power for power in range(size.bit_length()) if 1 << power <= costs.most_replicas]
    best: dict[tuple[int, int], tuple[list[float], int, int]] = {(count, 0): ([], 0, 0)}
    for used in range(1, devices + 1):
        room = (used - 1) % size + 1  # of the devices counted, those on the node that the stage stands on
        for first in range(count):
            found: tuple[list[float], int, int] | None = None
            for degree in (one for one in degrees if one <= room):
                for end in range(first + 1, count + 1):
                    rest = best.get((end, used - degree))
                    if rest is None:
                        continue
                    peak = peaks.of(bounds[first], bounds[end], degree, used - degree)
                    if found is not None and max([peak, *rest[0][:1]]) > found[0][0]:
                        continue
                    row = sorted([peak] * degree + rest[0], reverse=True)
                    if found is None or row < found[0]:
                        found = row, end, degree
            if found is not None:
                best[first, used] = found
    if (0, devices) not in best:
        raise CapslogError(
            f"planner 'capture' gives each of {devices // size} nodes stages whose degrees (powers of two, at most "
            f"{degrees[-1]}) sum to {size}, but {count} layers are too few for that; choose fewer devices, another "
            "node size, or planner pipedream"
        )
    at, used, stages = 0, devices, list[ReplicatedStage]()
    while at < count:
        _, end, degree = best[at, used]
        stages.append(ReplicatedStage(tuple(range(bounds[at], bounds[end])), degree))
        at, used = end, used - degree
    return stages
