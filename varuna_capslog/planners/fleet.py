"""Integer program of `joint`: the number of pipelines of each template.

From the devices of each kind and the seconds of each template for 1, 2, ... blocks, it finds the least time in which
all blocks are done, and a fleet that uses most devices within this time. Dynamic programming composes small fleets
exactly. A large fleet is the linear relaxation (HiGHS, scipy), rounded down; only its other devices are composed so.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory import MEMORY_MODELS, NEVER, StageCosts
from varuna_capslog.memory.costs import raised
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, in_flight_limits

__all__ = ["DeviceKind", "Fleet", "Pipelines", "combinations", "compose", "enough_seconds", "least_seconds"]


Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

_SMALL = 1_000_000
"""Most states times templates of the dynamic program of a small fleet."""

_SLOTS = 6
"""Most pipelines that are added to the rounded relaxation of a large fleet."""

_NONE = -(1 << 40)
"""Number of blocks where no pipelines use exactly these devices."""


@dataclass(frozen=True)
class Fleet:
    """Pipelines as (template's number, blocks that it can take within `seconds`, number of pipelines)."""

    seconds: float
    pipelines: list[tuple[int, int, int]]


def compose(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats, least: float = 0.0) -> Fleet | None:
    """Return the fleet of the least time that uses most devices; None if there is none. sizes: [T, K], devices of kind
    k in template t. counts: [K], available devices. times: [shares, T], seconds of a template with 1, 2, ... blocks;
    inf where it cannot hold them. least: known lower bound of the time.

    Within a time each template has a gain, the blocks that it can take. A time is enough if pipelines whose gains sum
    to at least `blocks` can be made of the devices; more pipelines than blocks are never needed, since a gain is 1 or
    more. The gains rise with the time, so bisection over the times of the table finds the least. Exact for small
    fleets; for large ones the fleet exists but may not be the fastest, and `least_seconds` bounds the difference.
    """
    candidates = _candidates(sizes, counts, blocks, times, least)
    index = _first(len(candidates), lambda i: _used(sizes, counts, blocks, _gains(times, candidates[i])) is not None)
    if index is None:
        return None
    gains = _gains(times, candidates[index])
    used = _used(sizes, counts, blocks, gains, most_devices=True) or _used(sizes, counts, blocks, gains)
    assert used is not None, "the time was found to be enough"
    pipelines = [(number, int(gains[number]), count) for number, count in enumerate(used) if count]
    return Fleet(float(candidates[index]), pipelines)


def least_seconds(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats) -> float | None:
    """Return a lower bound of the time for all blocks: exact, or relaxed for large fleets; None if no fleet can."""
    candidates = _candidates(sizes, counts, blocks, times, 0.0)

    def enough(i: int) -> bool:
        useful = _not_dominated(sizes, gains := _gains(times, candidates[i]))
        if not useful or _is_small(sizes[useful], counts, blocks):
            return _used(sizes, counts, blocks, gains) is not None
        return _relaxed(sizes[useful], counts, blocks, gains[useful], gains[useful]) is not None

    index = _first(len(candidates), enough)
    return None if index is None else float(candidates[index])


def enough_seconds(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats) -> float:
    """Return a time that is enough for a fleet of `_uniform`; inf if there is no such fleet."""
    candidates = np.unique(times[np.isfinite(times)])
    index = _first(len(candidates), lambda i: _uniform(sizes, counts, _gains(times, candidates[i]), blocks) is not None)
    return float("inf") if index is None else float(candidates[index])


def _uniform(sizes: Numbers, counts: Sequence[int], gains: Numbers, blocks: int) -> Numbers | None:
    """Return a fleet for all blocks: of one template, or of one single-kind template per kind; None if none can."""
    number_of = np.min(np.where(sizes > 0, np.asarray(counts) // np.maximum(sizes, 1), 1 << 40), axis=1)
    done = number_of * gains
    used = np.zeros(len(sizes), dtype=np.int64)
    if done.max() >= blocks:
        used[np.argmax(done)] = number_of[np.argmax(done)]
        return used
    single_kind = (sizes > 0).sum(axis=1) == 1
    for kind in range(len(counts)):
        best = int(np.argmax(np.where(single_kind & (sizes[:, kind] > 0), done, -1)))
        used[best] = number_of[best] if single_kind[best] and sizes[best, kind] else used[best]
    return used if int(used @ gains) >= blocks else None


def _candidates(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats, least: float) -> Floats:
    enough = enough_seconds(sizes, counts, blocks, times)
    return np.unique(times[np.isfinite(times) & (times >= least * (1 - 1e-12)) & (times <= enough)])


def _gains(times: Floats, limit: float) -> Numbers:
    """Return [T]: the most blocks that each template does within the limit; 0 if none."""
    shares = np.arange(1, len(times) + 1)[:, None]
    return np.asarray(np.where(times <= limit, shares, 0).max(axis=0))


def _first(length: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first i in 0 .. length-1 with holds(i), or None. All later i must hold, too. Fast if i is small."""
    low, high = 0, 1
    while high < length and not holds(high - 1):
        low, high = high, 2 * high
    index = bisect_left(range(min(high, length)), True, low, key=holds)
    return index if index < length else None


def _used(
    sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers, most_devices: bool = False
) -> list[int] | None:
    """Return the number of pipelines of each template in a fleet that does all blocks, at most one per block; None if
    no fleet was found. most_devices: use as many devices as possible; otherwise dominated templates are ignored.
    """
    useful = np.flatnonzero(gains).tolist() if most_devices else _not_dominated(sizes, gains)
    if not useful:
        return None
    own_sizes, own_gains = sizes[useful], gains[useful]
    bulk = np.zeros(len(useful), dtype=np.int64)
    slots = blocks
    if not _is_small(own_sizes, counts, blocks):
        worth = own_sizes.sum(axis=1) if most_devices else own_gains
        relaxed = _relaxed(own_sizes, counts, blocks, own_gains, worth)
        if relaxed is None:
            return None
        bulk = np.floor(relaxed + 1e-9).astype(np.int64)
        slots = min(blocks - int(bulk.sum()), _SLOTS)
    remaining = np.asarray(counts) - bulk @ own_sizes
    composed = _composed(own_sizes, remaining.tolist(), slots, own_gains, blocks - int(bulk @ own_gains))
    if composed is None:
        bulk, composed = bulk * 0, _uniform(own_sizes, counts, own_gains, blocks)
    if composed is None:
        return None
    used = [0] * len(sizes)
    for number, count in zip(useful, (bulk + composed).tolist(), strict=True):
        used[number] = count
    return _lengthened(sizes, counts, gains, used) if most_devices else used


def _lengthened(sizes: Numbers, counts: Sequence[int], gains: Numbers, used: list[int]) -> list[int]:
    """Add unused devices to pipelines that take as many blocks with them; exact fleets have no such devices."""
    number_of = {tuple(size): number for number, size in enumerate(sizes.tolist())}
    remaining = np.asarray(counts) - np.asarray(used) @ sizes
    for kind in np.flatnonzero(remaining):
        for number in np.flatnonzero(used).tolist():
            longer = sizes[number].copy()
            longer[kind] += 1
            target = number_of.get(tuple(longer.tolist()))
            if target is not None and gains[target] >= gains[number]:
                moved = min(used[number], int(remaining[kind]))
                used[number], used[target] = used[number] - moved, used[target] + moved
                remaining[kind] -= moved
    return used


def _not_dominated(sizes: Numbers, gains: Numbers) -> list[int]:
    """Return the undominated templates: no other takes as many blocks with at most as many devices of each kind."""
    order = [int(number) for number in np.lexsort((sizes.sum(axis=1), -gains)) if gains[number] > 0]
    kept: list[int] = []
    for number in order:
        if not kept or not (sizes[kept] <= sizes[number]).all(axis=1).any():
            kept.append(number)
    return kept


def _is_small(sizes: Numbers, counts: Sequence[int], blocks: int) -> bool:
    slots = blocks if blocks < sum(counts) else 0  # as `_composed` counts them
    return float(np.prod([count + 1.0 for count in (*counts, slots)])) * len(sizes) <= _SMALL


def _relaxed(sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers, worth: Numbers) -> Floats | None:
    """Return fractional numbers of pipelines x >= 0 that maximise worth x, or None, such that sizes^T x <= counts,
    gains x >= blocks and sum of x <= blocks.
    """
    from scipy.optimize import linprog

    rules = np.concatenate([sizes.T, -gains[None, :], np.ones((1, len(sizes)))])
    solution = linprog(-worth.astype(np.float64), A_ub=rules, b_ub=[*counts, -blocks, blocks], method="highs")
    return None if solution.x is None else np.asarray(solution.x)


def _composed(sizes: Numbers, counts: Sequence[int], slots: int, gains: Numbers, blocks: int) -> Numbers | None:
    """Return the number of pipelines of each template, at most `slots` in all, that do `blocks` on most devices; None
    if none can. Where slots could be too few, they count as a kind of device, of which each template needs one.
    """
    if slots < sum(counts):
        sizes, counts = np.concatenate([sizes, np.ones((len(sizes), 1), dtype=np.int64)], axis=1), [*counts, slots]
        kinds = len(counts) - 1
    else:
        kinds = len(counts)
    most_blocks = _most_blocks(sizes, counts, gains)
    enough = np.argwhere(most_blocks >= max(blocks, 0))
    if not len(enough):
        return None
    order = np.lexsort((most_blocks[tuple(enough.T)], enough[:, :kinds].sum(axis=1)))
    state = enough[order[-1]]
    used = np.zeros(len(sizes), dtype=np.int64)
    while state.any():
        before = state - sizes
        fits = np.flatnonzero((before >= 0).all(axis=1))
        number = next(t for t in fits if most_blocks[tuple(before[t])] + gains[t] == most_blocks[tuple(state)])
        state = before[number]
        used[number] += 1
    return used


def _most_blocks(sizes: Numbers, counts: Sequence[int], gains: Numbers) -> Numbers:
    """Return, for every n, the most blocks that exactly n[k] devices of kind k can take; below 0 where none can.

    State       n: devices of each kind in use, the index of the result.
    Transition  n - c sizes[t] -> n: c more pipelines of template t, c = 1, 2, 4, ...: any number is a sum of these.
    Cost        the sum of gains, to be maximised.
    Complexity  O(T log N prod_k (counts[k] + 1)), T log N numpy steps.
    """
    most = np.full([count + 1 for count in counts], _NONE)
    most.flat[0] = 0
    for size, gain in zip(sizes.tolist(), gains.tolist(), strict=True):
        copies = 1
        while all(copies * each <= count for each, count in zip(size, counts, strict=True)):
            begins = [copies * each for each in size]
            after = tuple(slice(begin, None) for begin in begins)
            before = tuple(slice(0, length - begin) for begin, length in zip(begins, most.shape, strict=True))
            np.maximum(most[after], most[before] + copies * gain, out=most[after])
            copies *= 2
    return most


# -- Costs of the pipelines of a fleet: lower bounds of all templates at once, and the layout of a template.
#
# `joint` composes a fleet from combinations of devices, called templates: a template is the number of devices of each
# kind, without their order and the cuts; both are chosen with the bound and can be queried. `joint` first computes
# the bounds and then lays out the few templates that are worth it. Costs of a pipeline beyond its own stages are
# counted here: the gradients of further waiting blocks, and their exchange with other pipelines.


Template = tuple[int, ...]
"""Number of devices of each kind."""

_NARROW = 32
_WIDE = 128
"""Width of the beam search of a layout: while the fleet is composed, and at the end for the slowest pipelines."""

_FEW_ORDERS = 10
"""Most orders of a template's kinds that are all tried. Of more orders, only the order of the bound is tried, and in a
wide search three others."""


@dataclass(frozen=True)
class DeviceKind:
    """A kind of equal devices: usable bytes (None: no limit) and speed (1: that of the profile)."""

    capacity: int | None
    speed: float


def combinations(counts: Sequence[int], most: int) -> list[Template]:
    """Return every template of 1 to `most` devices with at most counts[k] of kind k, shortest first."""
    templates: list[Template] = [()]
    for count in counts:
        templates = [
            (*template, more) for template in templates for more in range(min(count, most - sum(template)) + 1)
        ]
    return sorted((template for template in templates if any(template)), key=lambda template: (sum(template), template))


@dataclass(frozen=True)
class Column:
    """Layout of a template with its share of blocks: kind of each stage, cuts, step seconds, bytes of each stage."""

    kinds: tuple[int, ...]
    cuts: tuple[int, ...]
    step_seconds: float
    stage_bytes: tuple[int, ...]


def waiting_blocks(profile: Profile, share: int, blocks: int) -> int:
    """Return how many more gradient sums than in the profiled runs wait on a stage of a pipeline with `share` of the
    blocks. A single pipeline adds up its blocks as they end; each of several keeps a sum per block until the exchange.
    """
    held = min(share, 2) - 1 if share == blocks else share - 1
    return max(0, held - (profile.conditions.get("accumulation_blocks", 1) > 1))


class Pipelines:
    """Computes bounds and layouts of all pipelines that can be made of the devices, for one profile. run: the whole
    step, whose blocks they divide. beside: bytes beside training, for each layer that a rank holds; default none.
    """

    def __init__(
        self,
        profile: Profile,
        kinds: Sequence[DeviceKind],
        templates: Sequence[Template],
        memory: str,
        run: RunShape,
        link: Link,
        beside: Sequence[int] | None = None,
    ) -> None:
        self.kinds, self.templates = list(kinds), list(templates)
        self.sizes = np.array(templates, dtype=np.int64)
        self.blocks, self.of_block = run.num_blocks, run.microbatches // run.num_blocks
        self.seconds = LayerSeconds.of_profile(profile, link)
        self._profile, self._memory, self._run, self._link = profile, memory, run, link
        weights = np.array([layer.parameter_bytes or 0 for layer in profile.layers], dtype=np.int64)
        self._parameter_bytes: NDArray[np.int64] = np.concatenate([[0], np.cumsum(weights)])
        lies = np.asarray(beside if beside is not None else np.zeros_like(weights), dtype=np.int64)
        self.beside_bytes: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lies)])
        self._of_share: dict[int, _Templates] = {}
        self._columns: dict[tuple[int, int], Column | None] = {}
        self._wide: set[tuple[int, int]] = set()

    def _of_blocks(self, share: int) -> RunShape:
        return replace(self._run, num_microbatches=share * self.of_block, num_blocks=share)

    def costs(self, share: int) -> StageCosts:
        """Return the bytes of every stage of a pipeline with `share` blocks, with the gradients of waiting blocks."""
        held = waiting_blocks(self._profile, share, self.blocks) * self._parameter_bytes + self.beside_bytes
        ranges = held[None, :] - held[:-1, None]
        costs = MEMORY_MODELS[self._memory].stage_costs(self._profile, self._of_blocks(share))
        return raised(costs, np.asarray(np.maximum(ranges, 0), dtype=np.int64))

    def _exchange_seconds(self, share: int, stage_parameters: float) -> float:
        """Return the seconds in which a stage of these bytes receives the gradients of the other pipelines' blocks."""
        if share == self.blocks or self._link.bandwidth is None:
            return 0.0
        return (self.blocks - share) * stage_parameters / self._link.bandwidth

    def bounds(self, share: int) -> NDArray[np.float64]:
        """Return the bounds of all templates with `share` blocks."""
        if share not in self._of_share:
            costs, run = self.costs(share), self._of_blocks(share)
            self._of_share[share] = _Templates(self.templates, self.kinds, costs, self.seconds, run)
        # The stage with most parameters has at least the average.
        least = self._exchange_seconds(share, float(self._parameter_bytes[-1])) / self.sizes.sum(axis=1)
        return self._of_share[share].seconds_of + least

    def column(self, number: int, share: int, wide: bool = False) -> Column | None:
        """Lay out and simulate a template with a share of blocks; return None where no tried order fits. `bounds` must
        have been called for this share. wide: search longer.
        """
        key = (number, share)
        if key not in self._columns or (wide and key not in self._wide):
            orders = dict.fromkeys(self._orders(number, share, wide))
            previous = [self._columns[key]] if key in self._columns else []
            tried = [*previous, *(self._laid_out(order, share, _WIDE if wide else _NARROW) for order in orders)]
            good = [column for column in tried if column is not None]
            self._columns[key] = min(good, key=lambda column: column.step_seconds) if good else None
            if wide:
                self._wide.add(key)
        return self._columns[key]

    def _orders(self, number: int, share: int, wide: bool) -> Iterator[tuple[int, ...]]:
        """Yield the orders of a template's kinds to lay out, the order of the bound first."""
        order = self._of_share[share].order_of(self.templates[number])
        yield order
        orders = list(itertools.islice(_all_orders(self.templates[number]), _FEW_ORDERS + 1))
        if len(orders) <= _FEW_ORDERS:
            yield from orders
        elif wide:
            yield from (order[::-1], tuple(sorted(order)), tuple(sorted(order, reverse=True)))

    def _laid_out(self, order: tuple[int, ...], share: int, beam: int) -> Column | None:
        kinds = [self.kinds[kind] for kind in order]
        costs = self.costs(share)
        capacities = [NEVER - 1 if kind.capacity is None else kind.capacity for kind in kinds]
        run = self._of_blocks(share)
        speeds = [kind.speed for kind in kinds]
        best = fastest_cuts(costs, self.seconds, run, len(kinds), capacities, speeds, beam)
        if best is None:
            return None
        held = np.diff(self._parameter_bytes[[*best.cuts, costs.num_layers]])
        step = best.step_seconds + self._exchange_seconds(share, float(held.max()))
        return Column(order, best.cuts, step, tuple(costs.peaks(best.cuts)))


def _all_orders(template: Template) -> Iterator[tuple[int, ...]]:
    if not any(template):
        yield ()
    for kind in range(len(template)):
        if template[kind]:
            yield from ((kind, *order) for order in _all_orders(_without(template, kind)))


class _Templates:
    """Bounds and layouts of all templates for the microbatches of `run`. seconds_of[i]: no order of the devices of
    templates[i] and no cut list that fits takes less; inf where none fits.

    State       (g, l): layers l .. L-1 on g[k] devices of each kind k, timed from the first stage's beginning.
    Transition  (g - one of kind k, m) -> (g, l) with l < m: the first device is of kind k and holds layers l .. m-1.
    Cost        that of `throughput._CutSearch._find_bounds`. The calls in flight of a stage depend on the number of
                stages behind it, which g determines, so memory may depend on the position.
    Complexity  O(T K L^2) for T templates of K kinds, a numpy step per number of stages and kind.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        kinds: Sequence[DeviceKind],
        costs: StageCosts,
        seconds: LayerSeconds,
        run: RunShape,
    ) -> None:
        self.kinds, self._costs, self._seconds, self._run = kinds, costs, seconds, run
        self._forward, self._both = seconds.of_ranges()
        self._one_trip, self._ahead, self._transfers = seconds.of_ways(run)
        num_layers = costs.num_layers
        empty: Template = (0,) * len(kinds)
        nothing = np.where(np.arange(num_layers + 1) == num_layers, 0.0, np.inf)
        self._step: dict[Template, Floats] = {empty: nothing}
        self._trip: dict[Template, Floats] = {empty: nothing}
        for behind, level in itertools.groupby(templates, key=lambda template: sum(template) - 1):
            self._fill(list(level), behind)
        self.seconds_of = np.array([self._step[template][0] for template in templates])

    def order_of(self, template: Template) -> tuple[int, ...]:
        """Return the kind of each stage of a layout that attains the bound of a template."""
        order: list[int] = []
        first = 0
        while any(template):
            choices = []
            for kind in range(len(self.kinds)):
                if template[kind]:
                    behind = _without(template, kind)
                    cost, _ = self._costs_of(kind, sum(behind), self._step[behind][None], self._trip[behind][None])
                    end = int(np.argmin(cost[0, first]))
                    choices.append((float(cost[0, first, end]), kind, end, behind))
            _, kind, end, behind = min(choices)
            order.append(kind)
            template, first = behind, end
        return tuple(order)

    def _fill(self, level: list[Template], behind: int) -> None:
        best = {template: np.full((2, self._costs.num_layers + 1), np.inf) for template in level}
        for kind in range(len(self.kinds)):
            having = [template for template in level if template[kind]]
            if not having:
                continue
            later = [_without(template, kind) for template in having]
            step = np.stack([self._step[state] for state in later])
            trip = np.stack([self._trip[state] for state in later])
            cost, passed = self._costs_of(kind, behind, step, trip)
            for template, least in zip(having, np.stack([cost.min(axis=2), passed.min(axis=2)], axis=1), strict=True):
                np.minimum(best[template][:, :-1], least, out=best[template][:, :-1])
        for template, (step, trip) in best.items():
            self._step[template], self._trip[template] = step, trip

    def _costs_of(self, kind: int, behind: int, step: Floats, trip: Floats) -> tuple[Floats, Floats]:
        """Return [P, L, L + 1]: cost and round trip of a first device of this kind before each of P later states."""
        num_microbatches, speed = self._run.microbatches, self.kinds[kind].speed
        transfer, sends = self._seconds.transfer, self._seconds.handover
        compute, across = self._both / speed, np.maximum(transfer, sends)
        # The last stage recomputes no forward, and others may keep the graph of one microbatch (`insert_recompute`).
        again = num_microbatches - 1 if self._run.recomputes and behind else 0
        work = compute * num_microbatches + self._forward * (again / speed)
        work += num_microbatches * sends + (num_microbatches - 1) * sends[:-1, None]
        limit = in_flight_limits(self._run.schedule, behind + 1, num_microbatches, self._run.k)[0]
        rounds = 1 + (num_microbatches - 1) // limit
        fits = self._fits(kind, behind)
        passed = np.where(fits, self._ahead / speed + self._transfers * across, np.inf)
        trips = np.where(fits, self._one_trip / speed + 2 * across, np.inf) + trip[:, None, :]
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
            fits &= used <= capacity
        return fits


def _without(template: Template, kind: int) -> Template:
    return (*template[:kind], template[kind] - 1, *template[kind + 1 :])
