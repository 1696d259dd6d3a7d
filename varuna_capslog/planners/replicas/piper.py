"""Piper's planner: convex stages of a graph and their data-parallel degrees, for the least time per microbatch.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, Sec. 4.
A downset is a set of layers that contains every reader of its layers; a stage is the difference of two downsets.

    dp[D][s] = min over D' inside D, degree d of max(dp[D'][s - d], TPS(D \\ D', d, s))
    TPS(S, d, s) = (seconds + transfers in and out) / d + exchange    if static + ceil(s / d) saved fits, else infinite

s is the sum of the degrees from the stage to the loss, which determines the microbatches in flight. As published, d
divides the microbatches, and devices may be left over. Piper also chooses tensor parallelism and recomputation; here it
does not: `GraphCosts` has no seconds of tensor-parallel layers, and planner `budget` chooses recomputed layers. The
published state also counts devices; without tensor parallelism their number is s. The gradient exchange takes
`GraphCosts.exchange_seconds`, not the published 4 (d - 1) w / d of a parameter server.

The number of downsets is the product of the branches' lengths, and the search time grows with its square:
GraphPipe's Table 3.1 has no plan of Piper for 7 branches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.costs import Floats, GraphCosts, ReplicatedStage

__all__ = ["downsets", "piper_stages"]

MOST_DOWNSETS = 10_000
"""Most downsets of a graph. (The published program stops at 40,000.)"""


def piper_stages(costs: GraphCosts, most: int = MOST_DOWNSETS) -> list[ReplicatedStage] | None:
    """Return the stages, each behind the stages that it reads from; None where none fit. State: downset, devices.
    Transition: the downset's first stage and this stage's degree. O(downsets^2 x devices x degrees).

    Raises CapslogError for a graph of more than `most` downsets.
    """
    search = _Downsets(costs, most)
    search.run()
    return search.stages()


def downsets(num_layers: int, edges: tuple[tuple[int, int, int], ...], most: int) -> NDArray[np.bool_]:
    """Return [n, L]: a row per downset, True for its layers, by rising size. Raises CapslogError above `most` rows."""
    readers: list[set[int]] = [set() for _ in range(num_layers)]
    for writer, reader, _ in edges:
        readers[writer].add(reader)
    all_sets: dict[frozenset[int], None] = {frozenset(): None}
    frontier = list(all_sets)
    while frontier:
        grown: dict[frozenset[int], None] = {}
        for downset in frontier:
            for layer in range(num_layers):
                if layer not in downset and readers[layer] <= downset:
                    grown[downset | {layer}] = None
        all_sets |= grown
        if len(all_sets) > most:
            raise CapslogError(
                f"the graph of the layers has more than {most} downsets, whose pairs planner 'piper' weighs one by "
                "one; choose graphpipe, or give the model as fewer layers"
            )
        frontier = list(grown)
    rows = np.zeros((len(all_sets), num_layers), dtype=np.bool_)
    for number, downset in enumerate(all_sets):
        rows[number, list(downset)] = True
    return rows


class _Downsets:
    """Dynamic program over the downsets. best: dp[D, s]. chosen: [D, s], the D' and the degree of D's first stage."""

    def __init__(self, costs: GraphCosts, most: int) -> None:
        self.costs, self.sets = costs, downsets(costs.num_layers, costs.edges, most)
        count, devices = len(self.sets), costs.devices
        self.best = np.full((count, devices + 1), np.inf)
        self.best[0] = 0.0
        self.best[0, 1:] = np.inf
        self.chosen = np.zeros((count, devices + 1, 2), dtype=np.int64)
        blocks = costs.blocks or costs.microbatches
        self.degrees = [degree for degree in range(1, costs.most_replicas + 1) if blocks % degree == 0]

    def run(self) -> None:
        """Fill the table, by rising downsets."""
        costs = self.costs
        packed = np.packbits(self.sets, axis=1)
        columns = {name: np.asarray(getattr(costs, name), float) for name in ("seconds", "static", "saved")}
        sums = {name: self.sets @ column for name, column in columns.items()}
        parameters = self.sets @ np.asarray(costs.parameters, float)
        sizes = self.sets.sum(axis=1)
        for number in range(1, len(self.sets)):
            smaller = np.flatnonzero(sizes[:number] < sizes[number])
            inside = smaller[~(packed[smaller] & ~packed[number]).any(axis=1)]
            stage_sums = {name: part[number] - part[inside] for name, part in sums.items()}
            time = stage_sums["seconds"] + self._transfers(number, inside)
            weights = parameters[number] - parameters[inside]
            for degree in self.degrees:
                self._improve(
                    number, inside, degree, time / degree + costs.exchange_seconds(weights, degree), stage_sums
                )

    def _improve(
        self, number: int, inside: NDArray[np.int64], degree: int, tps: Floats, stage_sums: dict[str, Floats]
    ) -> None:
        for together in range(degree, self.costs.devices + 1):
            times = np.maximum(self.best[inside, together - degree], tps)
            if self.costs.usable is not None:
                held = stage_sums["static"] + -(-together // degree) * stage_sums["saved"]
                times = np.where(held <= self.costs.usable, times, np.inf)
            place = int(np.argmin(times))
            if times[place] < self.best[number, together]:
                self.best[number, together] = times[place]
                self.chosen[number, together] = inside[place], degree

    def _transfers(self, number: int, inside: NDArray[np.int64]) -> Floats:
        """Return the seconds of the tensors that a stage receives and sends, forward and backward."""
        edges, link = self.costs.edges, self.costs.link
        if not edges or not link.seconds(1):
            return np.zeros(len(inside))
        writers, readers = np.array([edge[0] for edge in edges]), np.array([edge[1] for edge in edges])
        seconds = np.array([2 * link.seconds(edge[2]) for edge in edges])
        above = ~self.sets[number][writers]  # written before the stage
        later = self.sets[inside][:, readers]  # read behind it
        received = (above & self.sets[number][readers]) @ seconds - later @ (above * seconds)
        sent = (later & ~self.sets[inside][:, writers] & ~above) @ seconds
        return np.asarray(received + sent)

    def stages(self) -> list[ReplicatedStage] | None:
        """Return the stages of the best plan on any number of devices; ties are broken by fewer devices."""
        number, devices = len(self.sets) - 1, int(np.argmin(self.best[-1]))
        if not np.isfinite(self.best[number, devices]):
            return None
        stages = []
        while number:
            smaller, degree = map(int, self.chosen[number, devices])
            layers = np.flatnonzero(self.sets[number] & ~self.sets[smaller])
            stages.append(ReplicatedStage(tuple(map(int, layers)), degree))
            number, devices = smaller, devices - degree
        return stages
