"""Piper's planner: any convex stages of a graph and their data-parallel degrees, by the least time per microbatch.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, Sec. 4. A
downset is a set of layers that holds, with a layer, all that read from it; a stage is the difference of two.

    dp[D][s] = min over D' inside D, degree d of max(dp[D'][s - d], TPS(D \\ D', d, s))
    TPS(S, d, s) = (seconds + transfers in and out) / d + exchange    if static + ceil(s / d) saved fits, else infinite

s is the sum of the degrees from the stage to the loss, which says how many microbatches are in flight. As published, d
divides the microbatches, and devices may be left over. The published state also counts devices: without tensor
parallelism these are s.

Piper further chooses tensor parallelism, and which layers run again. No layer offers the first here today, and the
second is what `budget` is for; both are left out. Gradients are exchanged as `GraphCosts.exchange_seconds` says, not by
the published 4 (d - 1) w / d of a parameter server.

The number of downsets is the product of the branches' lengths, and its square is the time: that is Piper's limit, and
why GraphPipe's Table 3.1 has none of its plans for 7 branches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.costs import Floats, GraphCosts, ReplicatedStage

__all__ = ["MOST_DOWNSETS", "downsets", "piper_stages"]

MOST_DOWNSETS = 10_000
"""Beyond, the search is not begun. (The published program stops at 40,000.)"""


def piper_stages(costs: GraphCosts, most: int = MOST_DOWNSETS) -> list[ReplicatedStage] | None:
    """Return the stages in an order in which each stands behind those that it reads from; None where none fit.

    State: downset, devices. Transition: the first stage of it, its degree. O(downsets^2 x devices x degrees).

    Raises CapslogError for a graph of more than `most` downsets.
    """
    search = _Downsets(costs, most)
    search.run()
    return search.stages()


def downsets(num_layers: int, edges: tuple[tuple[int, int, int], ...], most: int) -> NDArray[np.bool_]:
    """Return [n, L]: every downset as a row that says which layers it holds, by rising size.

    Raises CapslogError where there are more than `most`.
    """
    readers: list[set[int]] = [set() for _ in range(num_layers)]
    for writer, reader, _ in edges:
        readers[writer].add(reader)
    found: dict[frozenset[int], None] = {frozenset(): None}
    edge = list(found)
    while edge:
        grown: dict[frozenset[int], None] = {}
        for one in edge:
            for layer in range(num_layers):
                if layer not in one and readers[layer] <= one:
                    grown[one | {layer}] = None
        found |= grown
        if len(found) > most:
            raise CapslogError(
                f"the graph of the layers has more than {most} downsets, whose pairs planner 'piper' weighs one by "
                "one; choose graphpipe, or give the model as fewer layers"
            )
        edge = list(grown)
    rows = np.zeros((len(found), num_layers), dtype=np.bool_)
    for number, one in enumerate(found):
        rows[number, list(one)] = True
    return rows


class _Downsets:
    """One search; `best[D, s]`, and the stage that begins it."""

    def __init__(self, costs: GraphCosts, most: int) -> None:
        self.costs, self.sets = costs, downsets(costs.num_layers, costs.edges, most)
        count, devices = len(self.sets), costs.devices
        self.best = np.full((count, devices + 1), np.inf)
        self.best[0] = 0.0
        self.best[0, 1:] = np.inf
        self.chosen = np.zeros((count, devices + 1, 2), dtype=np.int64)
        blocks = costs.blocks or costs.microbatches
        self.degrees = [one for one in range(1, costs.most_replicas + 1) if blocks % one == 0]

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
            own = {name: part[number] - part[inside] for name, part in sums.items()}
            time = own["seconds"] + self._transfers(number, inside)
            weights = parameters[number] - parameters[inside]
            for degree in self.degrees:
                self._improve(number, inside, degree, time / degree + costs.exchange_seconds(weights, degree), own)

    def _improve(
        self, number: int, inside: NDArray[np.int64], degree: int, tps: Floats, own: dict[str, Floats]
    ) -> None:
        for together in range(degree, self.costs.devices + 1):
            found = np.maximum(self.best[inside, together - degree], tps)
            if self.costs.usable is not None:
                held = own["static"] + -(-together // degree) * own["saved"]
                found = np.where(held <= self.costs.usable, found, np.inf)
            place = int(np.argmin(found))
            if found[place] < self.best[number, together]:
                self.best[number, together] = found[place]
                self.chosen[number, together] = inside[place], degree

    def _transfers(self, number: int, inside: NDArray[np.int64]) -> Floats:
        """Seconds of the tensors that a stage takes and hands on, forwards and back."""
        edges, link = self.costs.edges, self.costs.link
        if not edges or not link.seconds(1):
            return np.zeros(len(inside))
        writers, readers = np.array([one[0] for one in edges]), np.array([one[1] for one in edges])
        seconds = np.array([2 * link.seconds(one[2]) for one in edges])
        above = ~self.sets[number][writers]  # written before the stage
        later = self.sets[inside][:, readers]  # read behind it
        taken = (above & self.sets[number][readers]) @ seconds - later @ (above * seconds)
        given = (later & ~self.sets[inside][:, writers] & ~above) @ seconds
        return np.asarray(taken + given)

    def stages(self) -> list[ReplicatedStage] | None:
        """The stages of the best answer with any number of the devices, of equal ones that with fewest."""
        number, devices = len(self.sets) - 1, int(np.argmin(self.best[-1]))
        if not np.isfinite(self.best[number, devices]):
            return None
        found = []
        while number:
            smaller, degree = map(int, self.chosen[number, devices])
            layers = np.flatnonzero(self.sets[number] & ~self.sets[smaller])
            found.append(ReplicatedStage(tuple(map(int, layers)), degree))
            number, devices = smaller, devices - degree
        return found
