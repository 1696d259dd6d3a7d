"""MadPipe-DP (Sec. 4.2) and Algorithm 1: allocate stages to P - 1 normal processors, which hold one stage each, and to
one special processor, which may hold any number.

    g(k, l, V) = ceil((V + U(k, l)) / T)             microbatches in flight of a stage, V behind its forward
    x (+) y    = x + y where both end in one period, else T ceil(x / T) + y
    normal:      M(k, l, g) <= M                      V' = (V (+) U(k, l)) (+) C(k - 1)
    special:     m_P + M(k, l, g - 1) <= M            t_P' = t_P + U(k, l);  m_P' = m_P + M(k, l, g - 1)

The printed T(l, p, t_P, m_P, V) is the smallest period of such an allocation for a given T. Algorithm 1 looks for the T
that minimises max(T, T(L, P - 1, 0, 0, 0)): the smallest T for which some allocation has a period of at most T.
`allocation_within` answers that question with labels in place of the printed grid, and `best_allocation` bisects.

State       layers 0 .. end-1 that have no stage yet, and a label: normal processors used, V, t_P, m_P.
Transition  the last stage of these layers: its first layer, and whether it is special.
Cost        none: a label dominates another if none of its four numbers is larger, since (+) is monotonic. m_P is kept
            as two numbers: bytes that the special processor always holds, and bytes of a running stage.
Complexity  O(L x stages x labels); more than `_LABELS` labels of a state are thinned on the printed grid of t_P and
            m_P, keeping the smallest V of each cell. So V is never rounded.

Deviations from the printed text, which is wrong or imprecise in three places:

- The paper's V' has C(k); but the message from the layers before a stage crosses the cut before layer k.
- Algorithm 1 overwrites the old T before it takes min(T, old T) as a lower bound. The bound then is T itself, which is
  infinite where nothing fits at the first T.
- A special stage also holds the microbatch whose forward is running, so m_P + a <= M must hold as well, for the m_P of
  all stages.
- The two buffers of each message are those of the paper's machine. Where the profile has the bytes of our engine's
  stages, M is the stage's peak: its working bytes, messages included, exist only while it computes.

The printed M(k, l, g - 1) is the least that the special processor can hold; its schedule may hold more. Each way to
count it (`COUNTINGS`) yields its own allocations, and their schedules are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.inflight import stage_costs
from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["CLOSE", "COUNTINGS", "Allocation", "ChainCosts", "allocation_within", "best_allocation"]


# -- MadPipe's model of the costs: a chain of layers, with seconds and bytes of one microbatch (Sec. 3 and 4.2.1).


@dataclass(frozen=True)
class ChainCosts:
    """Costs of a chain of L layers, and the number of devices. forward, backward: [L] seconds of one microbatch.
    transfer: [L + 1] seconds of one message over the cut before each layer. crossing: [L + 1] bytes of this
    message, 0 at both ends; the paper's a_l. saved: [L] bytes that each microbatch in flight holds; the paper's
    a_{i-1}. static: [L] bytes that a layer always holds: the paper's 3 W under two versions of the weights (2BW), else
    parameters, gradients and moments. usable: bytes that every device may hold; None: no limit. shared: both directions
    share one link, as in the paper, which is then busy for C = 2 a / beta. waiting, working: [L + 1, L + 1] bytes of
    layers first .. end-1 at [first, end]: of a call that waits, in place of `saved`, and those that their stage needs
    while it computes, messages included; None: as the paper counts.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    static: tuple[float, ...]
    saved: tuple[float, ...]
    crossing: tuple[float, ...]
    transfer: tuple[float, ...]
    devices: int
    usable: float | None = None
    shared: bool = False
    waiting: Floats | None = None
    working: Floats | None = None

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        devices: int,
        usable: int | None = None,
        link: Link | None = None,
        two_versions: bool = False,
    ) -> ChainCosts:
        """Return the costs of a profile. two_versions: static bytes of 2BW: two versions of the weights and a gradient.

        Where devices have a limit and the profile has the runs of all layers and pairs, `waiting` and `working` are
        those of our engine, except under two versions.

        Raises CapslogError naming the first layer that lacks a number: its seconds; the bytes that it holds, where
        devices have a limit; the bytes across the cut behind it, where devices have a limit or the link takes time.
        """
        link = link or Link()
        limited, timed = usable is not None, link.seconds(1) != link.seconds(0)
        forward, backward = profile.column("forward_seconds"), profile.column("backward_seconds")
        held = profile.column("parameter_bytes" if two_versions else "static_bytes") if limited else []
        saved = profile.column("saved_bytes") if limited else []
        layers, crossing = profile.num_layers, [0] * (profile.num_layers + 1)
        if (limited or timed) and layers > 1 and devices > 1:
            crossing[1:layers] = profile.column("boundary_bytes")[:-1]
        chain = cls(
            tuple(forward),
            tuple(backward),
            tuple(3.0 * size if two_versions else float(size) for size in held or [0] * layers),
            tuple(float(size) for size in saved or [0] * layers),
            tuple(float(size) for size in crossing),
            (0.0, *(link.seconds(size) for size in crossing[1:layers]), 0.0),
            devices,
            usable,
            link.shared,
        )
        return chain._as_engine_holds(profile) if limited and not two_versions else chain

    def _as_engine_holds(self, profile: Profile) -> ChainCosts:
        """Return the costs with the bytes of our engine's stages; as they are where the profile lacks the runs."""
        try:
            costs = stage_costs("1f1b", profile, RunShape(None, "1f1b", False))
        except CapslogError:
            return self
        size = self.num_layers + 1
        waiting, alone = np.zeros((2, size, size))
        waiting[:-1], alone[:-1] = costs.saved, np.where(costs.range_bytes == NEVER, 0, costs.range_bytes)
        static = self.sums["static"]
        working = np.triu(alone - (static[None, :] - static[:, None]) - waiting, 1)
        return dataclasses.replace(self, waiting=waiting, working=working)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward)

    def merged(self, most: int) -> tuple[ChainCosts, list[int]]:
        """Merge the two neighbouring layers with the fewest seconds together until at most `most` layers remain. Return
        the new chain, and the first layer of each of its layers, followed by L.
        """
        bounds, seconds = list(range(self.num_layers + 1)), self.sums["seconds"]
        while len(bounds) - 1 > most:
            both = [float(seconds[bounds[at + 2]] - seconds[bounds[at]]) for at in range(len(bounds) - 2)]
            del bounds[both.index(min(both)) + 1]

        def together(row: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(row[first:end]) for first, end in itertools.pairwise(bounds))

        chain = dataclasses.replace(
            self,
            forward=together(self.forward),
            backward=together(self.backward),
            static=together(self.static),
            saved=together(self.saved),
            crossing=tuple(self.crossing[cut] for cut in bounds),
            transfer=tuple(self.transfer[cut] for cut in bounds),
            waiting=None if self.waiting is None else self.waiting[np.ix_(bounds, bounds)],
            working=None if self.working is None else self.working[np.ix_(bounds, bounds)],
        )
        return chain, bounds

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Running sums [L + 1] of seconds (forward and backward), static and saved, by name."""
        seconds = [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]
        rows: dict[str, Sequence[float]] = {"seconds": seconds, "static": self.static, "saved": self.saved}
        return {name: np.concatenate([[0.0], np.cumsum(row)]) for name, row in rows.items()}

    @cached_property
    def ranges(self) -> dict[str, Floats]:
        """[L + 1, L + 1] at [first, end]: seconds, static, saved, working (0 as the paper counts), by name."""
        ranges = {name: row[None, :] - row[:, None] for name, row in self.sums.items()}
        ranges["working"] = np.zeros_like(ranges["static"]) if self.working is None else self.working
        return ranges if self.waiting is None else ranges | {"saved": self.waiting}

    def of(self, name: str, first: int, end: int) -> float:
        """Return the seconds, static, saved or working bytes of layers first .. end-1."""
        return float(self.ranges[name][first, end])

    def buffers(self, cut: int) -> float:
        """Return the bytes that a stage always holds for its messages over a cut."""
        return 2.0 * self.crossing[cut] if self.working is None else 0.0

    def delay(self, cut: int) -> float:
        """Return the paper's C: seconds of an activation and its gradient over the cut before layer `cut`."""
        return 2.0 * self.transfer[cut]

    def link_load(self, cut: int) -> float:
        """Return the seconds for which a link is busy with one microbatch that crosses this cut."""
        return self.delay(cut) if self.shared else self.transfer[cut]

    def memory(self, first: int, end: int, in_flight: int) -> float:
        """Return M(k, l, g): bytes of a stage."""
        always = self.of("static", first, end) + self.buffers(first) + self.buffers(end)
        return always + in_flight * self.of("saved", first, end) + self.of("working", first, end)


# -- MadPipe-DP (Sec. 4.2)


COUNTINGS = ("least", "most", "none", "printed")
"""Memory of the special processor while one of its stages runs: "least" counts g - 1 calls of every stage, and one more
of the running stage; "most" also one more of each stage before it; "none" has P normal processors and no special one;
"printed" counts g - 1 calls."""

_LABELS = 300
"""Most labels of a state; more are thinned."""

_GRID = (50, 11)
"""Cells of t_P and m_P to which labels are thinned, for each number of processors used."""

CLOSE = 1e-3
"""Relative difference of two periods at which the bisection ends."""

_ROUNDING = 1e-9

_USED, _DELAY, _LOAD, _HELD, _RUNNING, _BEHIND, _END, _SPECIAL = range(8)
"""Columns of labels: the four numbers (m_P in two parts: bytes held always, and the most beside them while a stage
runs), then the label from which it was made, the end of its first stage, and 1 where that stage is special."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AllocatedStage:
    """Layers first .. end-1 on a rank. special: the rank may hold several stages."""

    first: int
    end: int
    rank: int
    special: bool = False


@dataclass(frozen=True)
class Allocation:
    """Stages in the order of the chain; ranks are numbered in the order of their first stage. period: seconds at which
    all processors and links keep up and the microbatches in flight fit, as Sec. 4.2.1 counts them.
    """

    stages: tuple[AllocatedStage, ...]
    period: float

    @classmethod
    def of(cls, costs: ChainCosts, parts: Iterable[tuple[int, int, bool]], period: float = 0.0) -> Allocation:
        """Make the allocation of `parts`: (first, end, special) in order. A `period` below `load` is raised to it."""
        stages, special, count = list[AllocatedStage](), -1, 0
        for first, end, shared in parts:
            rank = special if shared and special >= 0 else count
            special = rank if shared else special
            count += rank == count
            stages.append(AllocatedStage(first, end, rank, shared))
        allocation = cls(tuple(stages), 0.0)
        return cls(allocation.stages, max(period, allocation.load(costs)))

    @property
    def contiguous(self) -> bool:
        """True where every rank has one stage."""
        return len({stage.rank for stage in self.stages}) == len(self.stages)

    def load(self, costs: ChainCosts) -> float:
        """Return the seconds of the busiest processor or link for one microbatch."""
        ranks = dict.fromkeys((stage.rank for stage in self.stages), 0.0)
        for stage in self.stages:
            ranks[stage.rank] += costs.of("seconds", stage.first, stage.end)
        return max([*ranks.values(), *(costs.link_load(stage.first) for stage in self.stages[1:])])

    def step_bound(self, costs: ChainCosts, microbatches: int) -> float:
        """Return a lower bound of the seconds of a step: a rank works for each microbatch, besides the way of the first
        to its first stage and of the last back from it.
        """
        work, before = dict[int, float](), dict[int, float]()
        for stage in self.stages:
            work[stage.rank] = work.get(stage.rank, 0.0) + costs.of("seconds", stage.first, stage.end)
            before.setdefault(stage.rank, costs.of("seconds", 0, stage.first))
        return max(microbatches * seconds + before[rank] for rank, seconds in work.items())


def best_allocation(costs: ChainCosts, counting: str = "least", at_least: float = 0.0) -> Allocation | None:
    """Return the allocation of the smallest period, within `CLOSE`; None where none fits even without any overlap.
    counting: member of `COUNTINGS`. at_least: known lower bound of the period, in seconds.
    """
    total = costs.of("seconds", 0, costs.num_layers)
    longest = max(forward + backward for forward, backward in zip(costs.forward, costs.backward, strict=True))
    lower = max(total / costs.devices, longest, at_least)  # Algorithm 1, line 1, and no layer is split
    upper = max(total + sum(map(costs.delay, range(1, costs.num_layers))), lower)  # line 2
    best = allocation_within(costs, upper, counting=counting)
    if best is None or upper <= 0:
        return best
    target, begin, step = lower * (1 + _ROUNDING), lower, CLOSE  # line 3
    while True:
        allocation = allocation_within(costs, target, counting=counting)
        if allocation is None:
            lower = max(lower, target)
        else:
            load = allocation.load(costs) * (1 + _ROUNDING)
            if load < target and (tighter := allocation_within(costs, load, counting=counting)):
                allocation, target = tighter, load
            best, upper, step = Allocation(allocation.stages, target), target, math.inf
        if upper <= lower * (1 + CLOSE):
            return best
        # line 9; until something fits, the target grows from the lower bound, since the best is seldom far from it
        target, step = min((lower + upper) / 2, begin * (1 + step)), 4 * step


def allocation_within(
    costs: ChainCosts, target: float, bound: float | None = None, counting: str = "least"
) -> Allocation | None:
    """Return an allocation that fits, with microbatches in flight counted for the period `target`; None if none does.
    Ties are broken by the fewest bytes of the special processor. bound: seconds that no processor or link exceeds,
    so that bound is at least T(L, P - 1, 0, 0, 0); default: `target`.
    """
    layers, special = costs.num_layers, counting != "none"
    most_ordinary = costs.devices - special
    bound = target if bound is None else bound
    cuts = np.arange(layers + 1)
    rows: list[list[Floats]] = [[] for _ in cuts]
    rows[layers].append(np.array([[0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0, 0.0]]))
    kept: list[Floats] = []
    count = 0
    seconds = costs.sums["seconds"]
    links = np.array([costs.link_load(cut) for cut in range(layers + 1)])
    possible = links <= bound * (1 + _ROUNDING)
    for end in range(layers, 0, -1):
        if not rows[end]:
            continue
        labels = np.concatenate(rows[end])
        room = (costs.devices - labels[:, _USED]) * bound - labels[:, _LOAD]  # of the unused processors
        labels = _superfluous_left_out(labels[room >= seconds[end] * (1 - _ROUNDING)], costs, bound)
        numbers = np.arange(count, count + len(labels))
        kept.append(labels)
        count += len(labels)
        firsts = cuts[:end][possible[:end] & (seconds[end] - seconds[:end] <= bound * (1 + _ROUNDING))]
        if not len(firsts) or not len(labels):
            continue
        stage = _Stages(costs, firsts, end, target, labels)
        usable = np.inf if costs.usable is None else costs.usable * (1 + _ROUNDING)
        normal = (labels[:, _USED] < most_ordinary) & (stage.memory <= usable)
        held, running = (np.broadcast_to(labels[:, at], normal.shape) for at in (_HELD, _RUNNING))
        _add(rows, stage, numbers, normal, held, running)
        if not special:
            continue
        held, running = labels[:, _HELD] + stage.held, stage.running(counting)
        fits = (labels[:, _LOAD] + stage.seconds <= bound * (1 + _ROUNDING)) & (held + running <= usable)
        _add(rows, stage, numbers, fits, held, running, special=True)
    if not rows[0]:
        return None
    ways = np.concatenate(rows[0])
    return Allocation.of(
        costs, _stages_of(ways[np.lexsort((ways[:, _LOAD], ways[:, _HELD] + ways[:, _RUNNING]))[0]], kept), target
    )


class _Stages:
    """Stages of layers firsts[k] .. end-1 before each of the labels: arrays [K, 1] and [K, N]."""

    def __init__(self, costs: ChainCosts, firsts: NDArray[np.intp], end: int, target: float, labels: Floats) -> None:
        self.firsts, self.end, self.labels = firsts, end, labels
        part = {name: row[firsts, end][:, None] for name, row in costs.ranges.items()}
        self.seconds, self.saved, self.working = part["seconds"], part["saved"], part["working"]
        buffers = np.array([costs.buffers(cut) for cut in range(costs.num_layers + 1)])
        always = part["static"] + (buffers[firsts] + buffers[end])[:, None]
        transfer = np.asarray(costs.transfer)
        delay = labels[:, _DELAY]
        in_flight = _periods(delay + self.seconds, target)
        behind = _plus(np.broadcast_to(delay, in_flight.shape), self.seconds, target)
        self.delay = _plus(behind, 2.0 * transfer[firsts][:, None], target)
        self.held = always + (in_flight - 1) * self.saved

    @property
    def memory(self) -> Floats:
        """M(k, l, g)."""
        return self.held + self.saved + self.working

    def running(self, counting: str) -> Floats:
        """Return the most bytes of the special processor beside those that its stages always hold."""
        before = self.labels[:, _RUNNING]
        if counting == "most":
            return self.saved + np.maximum(before, self.working)
        return np.maximum(before, self.working + (self.saved if counting == "least" else 0.0))


def _periods(seconds: Floats, target: float) -> Floats:
    periods: Floats = np.ceil(seconds / target - _ROUNDING)
    return periods


def _plus(delay: Floats, added: Floats, target: float) -> Floats:
    """Compute the (+) of Sec. 4.2.2."""
    periods, both = _periods(delay, target), delay + added
    total: Floats = np.where(_periods(both, target) == periods, both, target * periods + added)
    return total


def _add(
    rows: list[list[Floats]],
    stage: _Stages,
    numbers: NDArray[np.intp],
    fits: NDArray[np.bool_],
    held: Floats,
    running: Floats,
    special: bool = False,
) -> None:
    """Add the labels of these stages to the rows of their first layers. held, running: of the special processor."""
    for place, first in enumerate(stage.firsts.tolist()):
        chosen = np.flatnonzero(fits[place])
        if not len(chosen):
            continue
        made = stage.labels[chosen]
        made[:, _DELAY] = stage.delay[place, chosen]
        made[:, _HELD], made[:, _RUNNING] = held[place, chosen], running[place, chosen]
        if special:
            made[:, _LOAD] += stage.seconds[place]
        else:
            made[:, _USED] += 1
        made[:, _BEHIND], made[:, _END], made[:, _SPECIAL] = numbers[chosen], stage.end, special
        rows[first].append(made)


def _superfluous_left_out(labels: Floats, costs: ChainCosts, bound: float) -> Floats:
    """Return the undominated labels; above `_LABELS` labels, thin them on a grid first."""
    if len(labels) > _LABELS:
        scale = np.array([bound or 1.0, costs.usable or 1.0]) / _GRID
        sizes = np.stack([labels[:, _LOAD], labels[:, _HELD] + labels[:, _RUNNING]], axis=1)
        cells = (sizes / scale).astype(np.int64)
        keys = (labels[:, _USED].astype(np.int64) * (_GRID[0] + 2) + cells[:, 0]) * (_GRID[1] + 2) + cells[:, 1]
        order = np.lexsort((sizes[:, 1], labels[:, _LOAD], labels[:, _DELAY], keys))
        keys = keys[order]
        labels = labels[order[np.concatenate([[True], keys[1:] != keys[:-1]])]]
    labels = labels[np.lexsort(labels[:, _RUNNING::-1].T)]
    numbers, count = labels[:, : _RUNNING + 1], len(labels)
    smaller = np.ones((count, count), dtype=np.bool_)
    for column in numbers.T:
        smaller &= column[:, None] <= column[None, :]
    beaten = np.triu(smaller, 1).any(axis=0)  # sorted: no label dominates an earlier label, unless they are equal
    undominated: Floats = labels[~beaten]
    return undominated


def _stages_of(label: Floats, kept: list[Floats]) -> list[tuple[int, int, bool]]:
    """Return the stages of a label of layer 0, in order."""
    labels = np.concatenate(kept)
    stages, first = list[tuple[int, int, bool]](), 0
    while label[_END] >= 0:
        end = int(label[_END])
        stages.append((first, end, bool(label[_SPECIAL])))
        first, label = end, labels[int(label[_BEHIND])]
    return stages
