"""Simulates one step of a plan: how long it takes, where ranks idle, and what each stage holds at every moment. Imports
no torch. benchmarks/simulator compares it with real runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import Table
from varuna_capslog.base.units import format_bytes, format_seconds
from varuna_capslog.memory.fold import Course, RankFold, StageMemory, fold_course, memory_courses, peak_of, stage_memory
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import play
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units, ranges_of, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    DEFAULT_RUN,
    Action,
    RunShape,
    TimedAction,
    Timeline,
    from_strings,
)

__all__ = [
    "UPDATE_RATE",
    "AgainstKeeping",
    "PipelineStep",
    "RankStep",
    "Simulation",
    "against_keeping",
    "simulate_plan",
    "treatments",
]


@dataclass(frozen=True)
class PipelineStep:
    """Timeline and memory of one step on one pipeline.

    ranks: the plan's rank of each row of the timeline. stages: the plan's stage of each stage in the timeline.
    timeline: as from `schedules.simulate`, with the updates (U) that follow the exchange of gradients.
    memory: per stage, (seconds, bytes from then on). folds: per row, the bytes of its rank (`memory/fold`). None: the
        profile lacks the runs.
    """

    ranks: list[int]
    timeline: Timeline
    stages: list[int]
    memory: list[Course] | None
    folds: list[RankFold] | None = None

    @property
    def stage_of_row(self) -> list[list[int]]:
        """Stages of each row of the timeline."""
        return [sorted({timed.action.stage for timed in row}) for row in self.timeline.actions]

    @property
    def peaks(self) -> list[int] | None:
        """Peak bytes of each stage."""
        return None if self.memory is None else [peak_of(course) for course in self.memory]

    @property
    def rank_bytes(self) -> list[int] | None:
        """Peak bytes of the rank of each row; None where they cannot be folded."""
        return None if self.folds is None else [fold.peak_bytes for fold in self.folds]

    @property
    def rank_memory(self) -> list[Course] | None:
        """Bytes over time of the rank of each row; None where they cannot be folded."""
        rows = self.timeline.actions
        return None if self.folds is None else [fold_course(*pair) for pair in zip(rows, self.folds, strict=True)]


@dataclass(frozen=True)
class RankStep:
    """Step of one rank. pipeline: number of its pipeline. idle_share: of the step, 0 .. 1. in_flight: for each of its
    stages, the most microbatches in flight. peak_bytes: None where it is not known.
    """

    pipeline: int
    rank: int
    stages: list[int]
    busy_seconds: float
    idle_share: float
    in_flight: list[int]
    peak_bytes: int | None

    def cells(self, capacity_bytes: int | None) -> list[str]:
        """Return a row of `Simulation.table`; its last cell, the margin, is empty without a capacity."""
        known = self.peak_bytes is not None and capacity_bytes is not None
        return [
            str(self.pipeline),
            str(self.rank),
            ", ".join(map(str, self.stages)),
            format_seconds(self.busy_seconds),
            f"{100 * self.idle_share:.1f} %",
            ", ".join(map(str, self.in_flight)),
            "unknown" if self.peak_bytes is None else format_bytes(self.peak_bytes),
            format_bytes((capacity_bytes or 0) - (self.peak_bytes or 0)) if known else "",
        ]


@dataclass(frozen=True, repr=False)
class Simulation:
    """Simulated step of a whole plan; its pipelines all end together. It prints as a table. None: not known.

    step_seconds: from the first forward to the last rank's update.
    bubble_fraction: share of all ranks' time in which they neither compute nor update, 0 .. 1.
    exchange_seconds: for gradients, and updated values, between pipelines. update_seconds: the slowest rank's update.
    samples: of one step. num_microbatches: over all pipelines. notes: sentences on what could not be counted.
    """

    pipelines: list[PipelineStep]
    step_seconds: float
    bubble_fraction: float
    exchange_seconds: float
    update_seconds: float | None
    samples: int | None
    schedule: str
    recompute: bool
    num_microbatches: int
    link: Link
    notes: list[str]

    @property
    def samples_per_second(self) -> float | None:
        """Throughput; None where the microbatch size is not known or the step takes no time."""
        return self.samples / self.step_seconds if self.samples and self.step_seconds > 0 else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of the largest stage."""
        peaks = [peak for pipeline in self.pipelines for peak in pipeline.peaks or []]
        return max(peaks) if peaks else None

    @property
    def rank_steps(self) -> Iterator[RankStep]:
        """Step of each rank, in the order of the pipelines and their rows."""
        for number, pipeline in enumerate(self.pipelines):
            line, peaks = pipeline.timeline, pipeline.peaks
            rows = zip(pipeline.ranks, pipeline.stage_of_row, line.busy_seconds, strict=True)
            for row, (rank, stages, busy) in enumerate(rows):
                peak = None if peaks is None else sum(peaks[stage] for stage in stages)
                peak = peak if pipeline.rank_bytes is None else pipeline.rank_bytes[row]
                idle = 1 - busy / self.step_seconds if self.step_seconds > 0 else 0.0
                in_flight = [line.max_in_flight[stage] for stage in stages]
                yield RankStep(number, rank, stages, busy, idle, in_flight, peak)

    def table(self, capacities: Sequence[int] | None = None) -> Table:
        """Return a table of the ranks with a line on the whole step. capacities: bytes of the device of each rank, in
        the order of `rank_steps`, for its margin.
        """
        steps = list(self.rank_steps)
        sizes: Sequence[int | None] = capacities or [None] * len(steps)
        rows = [step.cells(size) for step, size in zip(steps, sizes, strict=True)]
        if len(self.pipelines) == 1:  # a column without text is left out
            rows = [["", *row[1:]] for row in rows]
        title = f"{self.schedule}{' with recomputation' if self.recompute else ''}, {self._microbatches}"
        headings = ("pipeline", "rank", "stages", "busy", "idle", "in flight", "peak", "margin")
        return Table(title, headings, rows, notes=[self._whole_step])

    @property
    def _microbatches(self) -> str:
        return f"{self.num_microbatches} microbatch{'' if self.num_microbatches == 1 else 'es'}"

    @property
    def _whole_step(self) -> str:
        peaks = [step.peak_bytes for step in self.rank_steps if step.peak_bytes is not None]
        parts = [f"step {format_seconds(self.step_seconds)}", f"bubble {100 * self.bubble_fraction:.1f} %"]
        parts += [] if self.samples_per_second is None else [f"{self.samples_per_second:.4g} samples/s"]
        parts += [f"largest peak {format_bytes(max(peaks))}"] if peaks else []
        return ", ".join(parts)

    def _shown(self) -> Table:
        table = self.table()
        return dataclasses.replace(table, notes=[*table.notes, *self.notes])

    def __str__(self) -> str:
        return self._shown().text()

    def __repr__(self) -> str:
        return f"Simulation({self.schedule}, {self._microbatches}: {self._whole_step})"

    def _repr_html_(self) -> str:
        return self._shown().html()

    def to_json(self) -> dict[str, Any]:
        """Return the simulation for programs; memory over time as [seconds, bytes]."""
        return {
            "schedule": self.schedule,
            "recompute": self.recompute,
            "num_microbatches": self.num_microbatches,
            "link": dataclasses.asdict(self.link),
            "step_seconds": self.step_seconds,
            "bubble_fraction": self.bubble_fraction,
            "exchange_seconds": self.exchange_seconds,
            "update_seconds": self.update_seconds,
            "samples_per_second": self.samples_per_second,
            "peak_bytes": self.peak_bytes,
            "pipelines": [
                {
                    "ranks": pipeline.ranks,
                    "stages_of_rank": pipeline.stage_of_row,
                    "busy_seconds": pipeline.timeline.busy_seconds,
                    "max_in_flight": pipeline.timeline.max_in_flight,
                    "max_live_graphs": pipeline.timeline.max_live_graphs,
                    "stage_peak_bytes": pipeline.peaks,
                    "rank_peak_bytes": pipeline.rank_bytes,
                    "memory": _as_lists(pipeline.memory),
                    "rank_memory": _as_lists(pipeline.rank_memory),
                }
                for pipeline in self.pipelines
            ],
            "notes": self.notes,
        }


def simulate_plan(
    profile: Profile,
    plan: Plan,
    *,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    recompute: bool | None = None,
    run: RunShape = DEFAULT_RUN,
    link: Link | None = None,
    speeds: Sequence[float] | None = None,
) -> Simulation:
    """Simulate one step of `plan` with the profile's seconds and bytes.

    Args:
        schedule, num_microbatches (of one pipeline): override the plan's; if neither has them, `varuna` and
            `DEFAULT_MICROBATCHES_PER_STAGE` per stage, with a note.
        recompute: for stages whose memory the plan leaves open; default: as in the profile's conditions, else True.
        run: only its stage_inputs and k are read.
        link: between any two ranks, and to the host tiers; default: transfers and copies take no time.
        speeds: as in `schedules.simulate`, for one pipeline's ranks.

    Raises CapslogError where profile and plan do not match, the profile lacks seconds, or tensors for routes "direct",
    or the schedule is impossible.
    """
    played = play(profile, plan, schedule, num_microbatches, recompute, run, link or Link(), speeds)
    run, notes, link = played.run, played.notes, link or Link()
    pipelines: list[PipelineStep] = []
    total = sum(len(part.graph.routes) for part, *_ in played.steps)
    of_rank = _rank_folds(profile, plan, run, played.named, total, notes)
    for part, actions, step, seconds, chosen in played.steps:
        timeline = _with_updates(step.timeline, seconds.other.get("U", ()), played.together, played.step_seconds)
        count = max(len(row) for row in part.graph.microbatches)
        parts = None
        if plan.routes == "relay":
            unknown = notes if of_rank is None else []  # the memory of ranks says more
            parts = _course_parts(profile, chosen, dataclasses.replace(run, num_microbatches=count), unknown)
        memory = None if parts is None else memory_courses(timeline.actions, actions, parts)
        folds = None if of_rank is None else [of_rank[rank] for rank in part.ranks]
        pipelines.append(PipelineStep(part.ranks, timeline, part.stages, memory, folds))
    width = sum(len(pipeline.ranks) for pipeline in pipelines)
    busy = sum(sum(pipeline.timeline.busy_seconds) for pipeline in pipelines)
    size = plan.microbatch_size or profile.conditions.get("microbatch_size")
    step_seconds = played.step_seconds
    return Simulation(
        pipelines=pipelines,
        step_seconds=step_seconds,
        bubble_fraction=1.0 - busy / (width * step_seconds) if step_seconds > 0 else 0.0,
        exchange_seconds=played.exchange,
        update_seconds=played.update,
        samples=None if size is None else total * size,
        schedule=run.schedule,
        recompute=any(stage.recomputes(run) for stage in played.filled),
        num_microbatches=total,
        link=link,
        notes=list(dict.fromkeys(notes)),
    )


def _course_parts(
    profile: Profile, stages: Sequence[PlanStage], run: RunShape, notes: list[str]
) -> list[StageMemory] | None:
    """Return the inputs of `memory.fold` where all stages keep or all recompute everything; else None, and a note."""
    uniform = all(
        stage.whole
        and len(stage.layers) == stage.grain == 1
        and (stage.memory is None or stage.recomputes(run) == run.recomputes)
        for stage in stages
    )
    parts: list[StageMemory] | str = "stages are kept, recomputed or offloaded in parts"
    if uniform:
        parts = stage_memory(profile, [(stage.first, stage.end) for stage in stages], run)
    if isinstance(parts, str):
        notes.append(f"memory over time is unknown: {parts}")
        return None
    return parts


def _as_lists(courses: list[Course] | None) -> list[list[list[float]]] | None:
    return None if courses is None else [[list(point) for point in row] for row in courses]


def _rank_folds(
    profile: Profile, plan: Plan, run: RunShape, named: bool, count: int, notes: list[str]
) -> list[RankFold] | None:
    """Bytes of every rank in the simulated step of `count` microbatches; None where they cannot be folded. named: the
    actions are those of the schedule, not the plan's own.
    """
    served = [block for stage in plan.stages for block in stage.blocks or ()]
    blocks = plan.units.blocks or 1 + max(served, default=0)
    if count % blocks:
        return None
    units = Units(count, plan.units.samples, blocks)
    played = dataclasses.replace(
        plan, units=units, schedule=run.schedule, actions=None if named else plan.actions, fits=None, shortfall=None
    )
    try:
        return fold_plan(profile, played, run)
    except CapslogError as error:
        if plan.routes == "direct":  # else the stages' own bytes are shown
            notes.append(f"the ranks' bytes are unknown: {error}")
        return None


def _with_updates(timeline: Timeline, update: Sequence[float], begin_seconds: float, step_seconds: float) -> Timeline:
    """Append each rank's updates, if any, to the timeline; no rank updates before all have voted."""
    rows = [list(row) for row in timeline.actions]
    for rank, row in enumerate(rows if update else []):
        clock = begin_seconds
        for stage in sorted({timed.action.stage for timed in row}):
            row.append(TimedAction(rank, Action(stage, "U"), clock, clock + update[stage]))
            clock += update[stage]
    return dataclasses.replace(timeline, actions=rows, step_seconds=step_seconds)


# -- Memory treatment of each stage's layers under a plan, and its cost in seconds against keeping everything.
#
# The reference step has the same stages and schedule, and keeps everything, whether or not that fits a device. Nothing
# is judged here.


@dataclass(frozen=True)
class StageTreatment:
    """Layers of a stage as ranges (first, end), by their memory treatment between forward and backward.

    offloaded: layers whose saved activations go to the host tier. inputs_offloaded: recomputed layers whose inputs do.
    moments_away, moments_elsewhere: layers whose optimizer moments are in the host tier, or kept by another replica.
    in_parts: intervals that recompute parts of their layers; these are not in `kept`.
    """

    kept: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[int, int], ...]
    offloaded: tuple[tuple[int, int], ...]
    inputs_offloaded: tuple[tuple[int, int], ...]
    moments_away: tuple[tuple[int, int], ...] = ()
    moments_elsewhere: tuple[tuple[int, int], ...] = ()
    in_parts: tuple[MemoryInterval, ...] = ()


@dataclass(frozen=True)
class AgainstKeeping:
    """Step of a plan beside the step that keeps everything.

    stage_seconds: by which each stage's actions take longer in a step; copies beside the computation do not count.
    moved_bytes: bytes per step that each rank sends to its host tier and gets back; None where they cannot be folded.
    """

    step: Simulation
    keeping: Simulation
    stage_seconds: tuple[float, ...]
    moved_bytes: tuple[int, ...] | None

    @property
    def seconds(self) -> float:
        """Seconds by which the whole step is longer."""
        return _difference(self.step.step_seconds, self.keeping.step_seconds)


def treatments(plan: Plan, run: RunShape, device: str = "cpu") -> list[StageTreatment]:
    """Return the memory treatment of each stage's layers; run, device: for stages whose memory the plan leaves open."""
    actions = None if plan.actions is None else from_strings(plan.actions)
    return [_treatment(stage) for stage in with_memory(plan.stages, run, actions, device)]


def _treatment(stage: PlanStage) -> StageTreatment:
    intervals = stage.memory or ()
    in_parts = tuple(interval for interval in intervals if interval.parts)
    kinds = {
        layer: "parts" if interval.parts else interval.kind
        for interval in intervals
        for layer in range(interval.first, interval.end)
    }

    def ranges(*wanted: str | None) -> tuple[tuple[int, int], ...]:
        layers = [layer for layer in stage.numbers if kinds.get(layer) in wanted]
        return tuple(ranges_of(layers)) if layers else ()

    again = "recompute", "recompute+offload"
    away, elsewhere = (
        tuple(ranges_of(sorted(layers))) if layers else () for layers in (stage.moments_away, stage.moments_elsewhere)
    )
    return StageTreatment(ranges(None), ranges(*again), ranges("offload"), ranges(again[1]), away, elsewhere, in_parts)


def against_keeping(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> AgainstKeeping | None:
    """Compare the plan's step with a step in which its stages keep everything; None for a plan with its own
    action lists, and where the profile lacks data for a step. run: of the whole plan, for what it leaves open.
    """
    if plan.actions is not None:
        return None
    stages = tuple(dataclasses.replace(stage, memory=(), moments=()) for stage in plan.stages)
    keeping = dataclasses.replace(plan, stages=stages, fits=None, shortfall=None)
    try:
        play = functools.partial(simulate_plan, profile, recompute=run.recompute, run=run, link=link)
        step = play(plan)
        kept = step if stages == plan.stages else play(keeping)
    except CapslogError:  # no seconds, or no tensors
        return None
    pairs = zip(_work(step, len(stages)), _work(kept, len(stages)), strict=True)
    return AgainstKeeping(step, kept, tuple(_difference(*pair) for pair in pairs), _moved(step))


def _difference(seconds: float, reference: float) -> float:
    """Return seconds - reference; 0 where the sums differ by rounding alone."""
    return 0.0 if abs(seconds - reference) <= 1e-9 * max(seconds, reference) else seconds - reference


def _work(step: Simulation, num_stages: int) -> list[float]:
    """Seconds of the actions of each stage of the plan."""
    seconds = [0.0] * num_stages
    for pipeline in step.pipelines:
        for row in pipeline.timeline.actions:
            for timed in row:
                seconds[pipeline.stages[timed.action.stage]] += timed.end_seconds - timed.start_seconds
    return seconds


def _moved(step: Simulation) -> tuple[int, ...] | None:
    moved: dict[int, int] = {}
    for pipeline in step.pipelines:
        if pipeline.folds is None:
            return None
        moved |= {rank: fold.moved_bytes for rank, fold in zip(pipeline.ranks, pipeline.folds, strict=True)}
    return tuple(moved.get(rank, 0) for rank in range(max(moved) + 1))
