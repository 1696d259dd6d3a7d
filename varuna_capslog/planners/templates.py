"""What a pipeline of so many devices of each kind takes at least, for every such combination at once.

`joint` composes a fleet from these combinations, called templates: a template says how many devices of each kind, not
yet in which order they stand or where the chain is cut; both are chosen with the bound and can be asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import StageCosts
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.schedules import RunShape, in_flight_limits

__all__ = ["DeviceKind", "Template", "Templates", "combinations", "without"]

Floats = NDArray[np.float64]
Template = tuple[int, ...]
"""How many devices of each kind."""


@dataclass(frozen=True)
class DeviceKind:
    """Devices that are alike: usable bytes (None: no limit) and speed (1: the profile's seconds hold)."""

    capacity: int | None
    speed: float


def combinations(counts: Sequence[int], most: int) -> list[Template]:
    """Return every template of 1 to `most` devices with at most counts[k] of kind k, shortest first."""
    every: list[Template] = [()]
    for count in counts:
        every = [(*one, more) for one in every for more in range(min(count, most - sum(one)) + 1)]
    return sorted((one for one in every if any(one)), key=lambda one: (sum(one), one))


class Templates:
    """Bounds and layouts of all templates for the microbatches of `run`, with `copy_bytes` more on each device.

    seconds_of[i]: no order of the devices of templates[i] and no cut list that fits takes less; inf where none fits.

    State       (g, l): layers l .. L-1 on g[k] devices of each kind k, timed from the begin of the first of them.
    Transition  (g - one of kind k, m) -> (g, l) with l < m: the first device is of kind k and holds layers l .. m-1.
    Cost        as in `throughput`, where its parts are explained. What a stage keeps in flight depends on the number of
                stages behind it, which g tells, so position-dependent memory is weighed as well.
    Complexity  O(T K L^2) for T templates of K kinds, a numpy step per number of stages and kind.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        kinds: Sequence[DeviceKind],
        costs: StageCosts,
        seconds: LayerSeconds,
        run: RunShape,
        copy_bytes: NDArray[np.int64] | None = None,
    ) -> None:
        self.kinds, self._costs, self._seconds = kinds, costs, seconds
        self._schedule, self._microbatches, self._copy_bytes = run.schedule, run.microbatches, copy_bytes
        self._recompute = run.recomputes
        self._forward = seconds.forward[None, :] - seconds.forward[:-1, None]
        self._both = self._forward + seconds.backward[None, :] - seconds.backward[:-1, None]
        num_layers = costs.num_layers
        empty: Template = (0,) * len(kinds)
        nothing = np.where(np.arange(num_layers + 1) == num_layers, 0.0, np.inf)
        self._step: dict[Template, Floats] = {empty: nothing}
        self._trip: dict[Template, Floats] = {empty: nothing}
        for behind, level in itertools.groupby(templates, key=lambda one: sum(one) - 1):
            self._fill(list(level), behind)
        self.seconds_of = np.array([self._step[one][0] for one in templates])

    def layout(self, template: Template) -> tuple[list[int], list[int]]:
        """Return the kind of each stage and the first layer of each stage that attain the bound of a template."""
        order, cuts = [], []
        first = 0
        while any(template):
            choices = []
            for kind in range(len(self.kinds)):
                if template[kind]:
                    rest = without(template, kind)
                    cost, _ = self._costs_of(kind, sum(rest), self._step[rest][None], self._trip[rest][None])
                    end = int(np.argmin(cost[0, first]))
                    choices.append((float(cost[0, first, end]), kind, end, rest))
            _, kind, end, rest = min(choices)
            order.append(kind)
            cuts.append(first)
            template, first = rest, end
        return order, cuts

    def _fill(self, level: list[Template], behind: int) -> None:
        best = {one: np.full((2, self._costs.num_layers + 1), np.inf) for one in level}
        for kind in range(len(self.kinds)):
            having = [one for one in level if one[kind]]
            if not having:
                continue
            rests = [without(one, kind) for one in having]
            step = np.stack([self._step[rest] for rest in rests])
            trip = np.stack([self._trip[rest] for rest in rests])
            cost, passed = self._costs_of(kind, behind, step, trip)
            for one, least in zip(having, np.stack([cost.min(axis=2), passed.min(axis=2)], axis=1), strict=True):
                np.minimum(best[one][:, :-1], least, out=best[one][:, :-1])
        for one, (step, trip) in best.items():
            self._step[one], self._trip[one] = step, trip

    def _costs_of(self, kind: int, behind: int, step: Floats, trip: Floats) -> tuple[Floats, Floats]:
        """[P, L, L + 1]: cost and round trip of a first device of this kind before each of P states behind."""
        num_microbatches, speed = self._microbatches, self.kinds[kind].speed
        transfer, sends = self._seconds.transfer, self._seconds.handover
        one, both_ways = self._both / speed, 2 * np.maximum(transfer, sends)
        # The last stage runs no forward twice, and others may keep the graph of one microbatch (`insert_recompute`).
        again = num_microbatches - 1 if self._recompute and behind else 0
        work = one * num_microbatches + self._forward * (again / speed)
        work += num_microbatches * sends + (num_microbatches - 1) * sends[:-1, None]
        limit = in_flight_limits(self._schedule, behind + 1, num_microbatches)[0]
        rounds = 1 + (num_microbatches - 1) // limit
        passed = np.where(self._fits(kind, behind), one + both_ways, np.inf)
        trips = passed + trip[:, None, :]
        cost = np.maximum(rounds * trips, trips + (num_microbatches - 1) * transfer)
        np.maximum(cost, work, out=cost)
        np.maximum(cost, passed + step[:, None, :], out=cost)
        return cost, trips

    def _fits(self, kind: int, behind: int) -> NDArray[np.bool_]:
        num_layers = self._costs.num_layers
        first, end = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None, :]
        fits = (end > first) & (num_layers - end >= behind)
        capacity = self.kinds[kind].capacity
        if capacity is not None:
            used = self._costs.matrix(1, behind + 2)
            if not self._costs.position_free:  # only a stage that begins with layer 0 is the first
                used = np.concatenate([self._costs.matrix(0, behind + 1)[:1], used[1:]])
            if self._copy_bytes is not None:
                used = used + self._copy_bytes
            fits &= used <= capacity
        return fits


def without(template: Template, kind: int) -> Template:
    """Return the template with one device of a kind less."""
    return (*template[:kind], template[kind] - 1, *template[kind + 1 :])
