"""Parts of a plan: units of work, stages with their memory intervals, ranks, and the shortfall of memory. Constructors
raise CapslogError for invalid parts; `plans/rules.py` checks the parts of one plan together.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.record import check_parallel
from varuna_capslog.schedules import Action, RunShape, Schedule, StageGraph, backwards_at_once, schedule_of

__all__ = [
    "INTERVAL_KINDS",
    "KEEP",
    "LAYER_PARTS",
    "MemoryInterval",
    "PlanRank",
    "PlanStage",
    "Shortfall",
    "Units",
    "grains_of",
    "intervals_of",
    "pieces_of",
    "ranges_of",
    "recomputed_parts",
    "scheduled",
    "spans_of",
    "with_loss",
    "with_memory",
]

KEEP = "keep"
"""The kind of layers outside all memory intervals; no interval of a plan has this kind."""
INTERVAL_KINDS = ("recompute", "offload", "recompute+offload")
MOMENT_KINDS = ("host", "replica")
LAYER_PARTS = ("attention", "mlp", "norms", "experts")
"""The parts of a layer that an interval may recompute; `model/layer_parts` finds their operations."""
SPLIT_KINDS = ("none", "tensor", "sequence")


@dataclass(frozen=True)
class Units:
    """The work of one step: its finest microbatches. None: not known, which only the short form of a plan allows.

    per_step: units of a step, numbered from 0. samples: of one unit.
    blocks: accumulation blocks; block b holds the units [b n, (b + 1) n) with n = per_step / blocks.
    """

    per_step: int | None = None
    samples: int | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("per_step", "blocks"):
            check_optional(self, name, fields.whole, minimum=1, most=fields.MOST_CALLS)
        check_optional(self, "samples", fields.whole, minimum=1)
        if self.per_step is not None and self.per_step % (self.blocks or 1):
            raise CapslogError(
                f"units.blocks is {self.blocks}, which does not divide units.per_step, {self.per_step}; choose a "
                "number that does"
            )

    @property
    def of_block(self) -> int:
        """Units of one block. Raises CapslogError where they are not known."""
        if self.per_step is None or self.blocks is None:
            raise CapslogError("the plan does not say how many units and blocks a step has; give units")
        return self.per_step // self.blocks


@dataclass(frozen=True)
class MemoryInterval:
    """Layers [first, end) of a stage that have the same memory treatment between forward and backward.

    kind: "recompute" (their inputs stay, and they run again before their backward), "offload" (their saved tensors go
        to the host tier and come back) or "recompute+offload" (their inputs go to the host tier, and they run again).
        Intervals of `PlanStage.moments` have kind "host" or "replica".
    parts: of `LAYER_PARTS`, only with kind "recompute": the layers keep their graph, except what these parts of each
        layer save, and these parts run again inside the layer's backward. (): whole layers.

    In a file an interval is a list `[first, end, kind]`, or `[first, end, "recompute", parts]`.
    """

    first: int
    end: int
    kind: str
    parts: tuple[str, ...] = ()

    @property
    def recomputes(self) -> bool:
        """True where the layers run again as a whole."""
        return self.kind.startswith("recompute") and not self.parts

    @property
    def text(self) -> str:
        """The interval for people, such as `recompute 0-3` or `recompute 0-3 (attention, norms)`."""
        parts = f" ({', '.join(self.parts)})" if self.parts else ""
        return f"{self.kind} {self.first}-{self.end - 1}{parts}"

    @property
    def offloads(self) -> bool:
        """True where tensors go to the host tier."""
        return self.kind.endswith("offload")

    @classmethod
    def of(cls, value: Any, name: str, kinds: Sequence[str] = INTERVAL_KINDS) -> MemoryInterval:
        """Return the interval that `[first, end, kind]` or `[first, end, "recompute", parts]` means."""
        if isinstance(value, MemoryInterval):
            if not value.parts:
                return value
            value = value.entries
        entries = fields.listed(value, name)
        if len(entries) not in (3, 4):
            raise CapslogError(f"{name} has {len(entries)} entries; it must be [first layer, end, kind]")
        first, end = fields.interval(entries[:2], name)
        kind = fields.choice(entries[2], f"{name}[2]", kinds)
        return cls(first, end, kind, () if len(entries) == 3 else _layer_parts(entries[3], f"{name}[3]", kind))

    @property
    def entries(self) -> list[Any]:
        """The interval as a file has it."""
        return [self.first, self.end, self.kind, *([list(self.parts)] if self.parts else [])]


def _layer_parts(value: Any, name: str, kind: str) -> tuple[str, ...]:
    rows = fields.listed(value, name)
    if kind != "recompute":
        raise CapslogError(f"{name} names parts of layers beside {kind!r}; only 'recompute' has parts, so leave it out")
    if not rows or len(set(map(str, rows))) < len(rows):
        raise CapslogError(f"{name} is {list(rows)}; it must hold one or more different parts of {list(LAYER_PARTS)}")
    chosen = {fields.choice(row, f"{name}[{number}]", LAYER_PARTS) for number, row in enumerate(rows)}
    return tuple(part for part in LAYER_PARTS if part in chosen)


def intervals_of(run: RunShape, pieces: Iterable[tuple[int, int]], device: str = "cpu") -> tuple[MemoryInterval, ...]:
    """Return the memory intervals of a stage with these ranges of layers: all recomputed, or none, by the run.

    device: on "cpu" the inputs of a stage wait in place, also where the run keeps them on the host.
    """
    if not run.recomputes:
        return ()
    away = run.stage_inputs == "host" and not device.startswith("cpu")
    return tuple(MemoryInterval(*piece, "recompute+offload" if away else "recompute") for piece in pieces)


@dataclass(frozen=True)
class PlanStage:
    """Set of layers, for some blocks of a step, on one rank (on several ranks only where they split the layers).

    layers: pieces (first, end) of the chain in rising order, `end` not included.
    ranks: as many as `parallel.degree`.
    blocks: rising; None: all blocks. grain: units that the stage computes in one call.
    in_flight: most calls between the beginning of a forward and the end of its backward; None: the schedule's limit.
    memory: intervals in rising order; layers outside them keep their graph. None: as in the config
        (`pipeline.recompute`).
    parallel: {"kind", "degree"} of a split of the layers over ranks.
    moments: ranges of layers, rising, whose optimizer moments are not on the device between the updates: they wait in
        the host tier ("host"), or another replica keeps them and sends the updated values ("replica").
    bytes: predicted peak in a step. seconds: predicted, forward and backward of a microbatch. None: not predicted.
    """

    layers: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    blocks: tuple[int, ...] | None = None
    grain: int = 1
    in_flight: int | None = None
    memory: tuple[MemoryInterval, ...] | None = ()
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none", "degree": 1})
    bytes: int | None = None
    seconds: float | None = None
    moments: tuple[MemoryInterval, ...] = ()

    def __post_init__(self) -> None:
        pieces = tuple(fields.interval(piece, "layers") for piece in fields.listed(self.layers, "layers"))
        if not pieces or any(a[1] > b[0] for a, b in pairwise(pieces)):
            raise CapslogError("layers must hold one or more pieces [first, end] in rising order that do not overlap")
        set_field(self, "layers", pieces)
        set_field(self, "parallel", _split(self.parallel))
        rows = fields.listed(self.ranks, "ranks")
        ranks = tuple(fields.whole(rank, "ranks", most=fields.MOST_RANKS - 1) for rank in rows)
        degree = self.parallel["degree"]
        if len(set(ranks)) != len(ranks) or len(ranks) != degree:
            raise CapslogError(
                f"ranks is {list(ranks)}; it must hold {degree} different rank(s), as parallel.degree says"
            )
        set_field(self, "ranks", ranks)
        if self.blocks is not None:
            rows = fields.listed(self.blocks, "blocks")
            blocks = tuple(fields.whole(block, "blocks", most=fields.MOST_CALLS - 1) for block in rows)
            if not blocks or any(a >= b for a, b in pairwise(blocks)):
                raise CapslogError(f"blocks is {list(blocks)}; it must hold one or more blocks in rising order")
            set_field(self, "blocks", blocks)
        set_field(self, "grain", fields.whole(self.grain, "grain", minimum=1))
        check_optional(self, "in_flight", fields.whole, minimum=1)
        if self.memory is not None:
            self._check_intervals("memory", INTERVAL_KINDS)
        self._check_intervals("moments", MOMENT_KINDS)
        check_optional(self, "bytes", fields.whole, minimum=None)  # M_a may be below 0, and so may their sum
        check_optional(self, "seconds", fields.seconds)

    @property
    def first(self) -> int:
        """First layer."""
        return self.layers[0][0]

    @property
    def end(self) -> int:
        """Layer behind the last layer."""
        return self.layers[-1][1]

    @property
    def numbers(self) -> list[int]:
        """Layers of the stage, rising."""
        return [layer for first, end in self.layers for layer in range(first, end)]

    @property
    def spans(self) -> str:
        """Layers of the stage as text for people, such as 0-3, 8."""
        return spans_of(self.layers)

    @property
    def rank(self) -> int:
        """Rank, or the first of the ranks that split the stage."""
        return self.ranks[0]

    @property
    def whole(self) -> bool:
        """True where the stage is kept or recomputed as a whole (or as the config says)."""
        intervals = self.memory or ()
        pieces = [(interval.first, interval.end) for interval in intervals]
        return not intervals or (pieces == list(self.layers) and all(interval.recomputes for interval in intervals))

    def recomputes(self, run: RunShape) -> bool:
        """True where layers of the stage run again before their backward; parts of layers run again inside it."""
        return run.recomputes if self.memory is None else any(interval.recomputes for interval in self.memory)

    @property
    def moments_away(self) -> frozenset[int]:
        """Layers whose optimizer moments wait in the host tier."""
        return self._layers_with_moments("host")

    @property
    def moments_elsewhere(self) -> frozenset[int]:
        """Layers whose optimizer moments another replica keeps."""
        return self._layers_with_moments("replica")

    def _layers_with_moments(self, kind: str) -> frozenset[int]:
        return frozenset(
            layer for interval in self.moments if interval.kind == kind for layer in range(interval.first, interval.end)
        )

    @property
    def offloads(self) -> bool:
        """True where the plan offloads a part of the stage; with `memory` None, F, R and B include the run's copies."""
        return any(interval.offloads for interval in self.memory or ())

    def describe(self) -> str:
        """Return rank and layers as text for messages."""
        pieces = " and ".join(f"{first} to {end - 1}" if end > first + 1 else str(first) for first, end in self.layers)
        return f"rank {', '.join(map(str, self.ranks))}, layers {pieces}"

    def _check_intervals(self, name: str, kinds: Sequence[str]) -> None:
        rows = enumerate(fields.listed(getattr(self, name), name))
        intervals = tuple(MemoryInterval.of(row, f"{name}[{i}]", kinds) for i, row in rows)
        for before, after in pairwise(intervals):
            if after.first < before.end:
                raise CapslogError(
                    f"{name} intervals [{before.first}, {before.end}] and [{after.first}, {after.end}] overlap or do "
                    "not rise; each layer belongs to one interval at most"
                )
        for interval in intervals:
            piece = self.layers[max(0, bisect.bisect(self.layers, interval.first, key=itemgetter(0)) - 1)]
            if not (piece[0] <= interval.first and interval.end <= piece[1]):
                raise CapslogError(
                    f"the {name} interval [{interval.first}, {interval.end}] lies outside the stage "
                    f"({self.describe()}); an interval is a part of one piece of its stage"
                )
        set_field(self, name, intervals)


@dataclass(frozen=True)
class PlanRank:
    """Memory and time of one rank, with capacity and speed of its device.

    bytes, host_bytes: predicted peaks on the device and in the host tier. seconds: as of a stage. None: not predicted.
    capacity_bytes: None: no limit, or not known. speed: share of the fastest device's, above 0, at most 1; None: 1.
    """

    bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None
    capacity_bytes: int | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        check_optional(self, "bytes", fields.whole, minimum=None)
        check_optional(self, "host_bytes", fields.whole)
        check_optional(self, "seconds", fields.seconds)
        check_optional(self, "capacity_bytes", fields.whole, minimum=1)
        if self.speed is not None and not 0 < fields.seconds(self.speed, "speed") <= 1:
            raise CapslogError(f"speed is {self.speed}; give a number above 0 and at most 1, the fastest device's")


@dataclass(frozen=True)
class Shortfall:
    """Largest lack of memory, in bytes, of a plan that does not fit: of a stage (short form) or a rank (full form).

    devices_that_fit: would be enough for the planner that the plan's note names; None: even one per layer is too few.
    """

    stage: int | None = None
    bytes: int = 1
    devices_that_fit: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if (self.stage is None) == (self.rank is None):
            raise CapslogError("shortfall names a stage (short form) or a rank (full form); give one of the two")
        check_optional(self, "stage", fields.whole)
        check_optional(self, "rank", fields.whole)
        set_field(self, "bytes", fields.whole(self.bytes, "bytes", minimum=1))
        check_optional(self, "devices_that_fit", fields.whole, minimum=1)


def _split(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value.get("kind") == "data":
        raise CapslogError("parallel.kind is 'data'; give the blocks to several stages of the same layers instead")
    return check_parallel(value, SPLIT_KINDS)


def grains_of(stages: Iterable[PlanStage]) -> list[int]:
    """Return the grain of each layer, in order, where some layer has a grain above 1; else []. Grains are constant in a
    run, since several units in one call give other bits than separate calls.
    """
    grains = {layer: stage.grain for stage in stages for layer in stage.numbers}
    return [grains[layer] for layer in sorted(grains)] if max(grains.values()) > 1 else []


def with_loss(layers: Iterable[int], num_layers: int) -> set[int]:
    """Return the layers, and the loss (number L) if the last layer is among them."""
    numbers = {*layers}
    return numbers | {num_layers} if num_layers - 1 in numbers else numbers


def ranges_of(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of consecutive layers; `layers` are in rising order."""
    borders = [n for n in range(1, len(layers)) if layers[n] != layers[n - 1] + 1]
    return [(layers[a], layers[b - 1] + 1) for a, b in pairwise([0, *borders, len(layers)])]


def spans_of(ranges: Iterable[tuple[int, int]]) -> str:
    """Return ranges [first, end) of layers as text for people, such as 0-3, 8."""
    return ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ranges)


def pieces_of(first: int, end: int, intervals: Sequence[MemoryInterval]) -> list[MemoryInterval]:
    """Return all layers [first, end) as intervals: `intervals`, and pieces of kind KEEP for the other layers."""
    pieces, reached = [], first
    for interval in intervals:
        if interval.first > reached:
            pieces.append(MemoryInterval(reached, interval.first, KEEP))
        pieces.append(interval)
        reached = interval.end
    return [*pieces, MemoryInterval(reached, end, KEEP)] if reached < end else pieces


def recomputed_parts(stage: PlanStage) -> list[tuple[int, tuple[str, ...]]]:
    """Return (layer, parts) for each layer of a stage of which only parts run again."""
    return [
        (layer, interval.parts)
        for interval in stage.memory or ()
        if interval.parts
        for layer in range(interval.first, interval.end)
    ]


def with_memory(
    stages: Sequence[PlanStage],
    run: RunShape,
    actions: Iterable[Iterable[Action]] | None = None,
    device: str = "cpu",
) -> list[PlanStage]:
    """Return the stages, with memory intervals for those whose `memory` is None.

    actions: of every rank. A stage with an R in them runs again as a whole; a stage without keeps everything. If they
        are None, and for a stage whose every backward follows its forward at once, the run decides.
    device: as in `intervals_of`.
    """
    if all(stage.memory is not None for stage in stages):
        return list(stages)
    recomputing = None
    if actions is not None:
        rows = [list(row) for row in actions]
        recomputing = {action.stage for row in rows for action in row if action.kind == "R"}
        # only stages in several pieces: a stage in one piece whose backwards follow at once never runs again
        open_ = {number for number, stage in enumerate(stages) if stage.memory is None and len(stage.layers) > 1}
        if run.recomputes and open_ - recomputing:
            recomputing |= open_ & _only_at_once(rows)
    completed = []
    for number, stage in enumerate(stages):
        if stage.memory is not None:
            completed.append(stage)
            continue
        does = run.recomputes if recomputing is None else number in recomputing
        memory = intervals_of(replace(run, recompute=True), stage.layers, device) if does else ()
        completed.append(replace(stage, memory=memory))
    return completed


def _only_at_once(rows: Iterable[Sequence[Action]]) -> set[int]:
    """Return the stages that compute every backward directly after its forward."""
    at_once_only: set[int] = set()
    for row in rows:
        backwards = Counter(action.stage for action in row if action.kind in "BI")
        at_once = Counter(stage for stage, _ in backwards_at_once(row))
        at_once_only |= {stage for stage, count in backwards.items() if at_once[stage] == count}
    return at_once_only


def scheduled(name: str, stages: Sequence[PlanStage], graph: StageGraph, run: RunShape) -> Schedule:
    """Return the actions of one step under a schedule. graph: of the stages. run: for stages whose memory is None."""
    return schedule_of(
        name,
        graph,
        [stage.recomputes(run) for stage in stages],
        [stage.in_flight for stage in stages],
        [stage.offloads for stage in stages],
        run.k,
    )


def set_field(record: Any, name: str, value: Any) -> None:
    """Set a field of a frozen record to its checked value."""
    object.__setattr__(record, name, value)


def check_optional(record: Any, name: str, check: Callable[..., Any], **rules: Any) -> None:
    """Check a field and set it to the checked value; None stays None."""
    if (value := getattr(record, name)) is not None:
        set_field(record, name, check(value, name, **rules))
