"""The section on one step: the schedule's picture, its bubbles, and the simulated step time beside the measured one.

The times come from the profile; without times in the profile, every forward pass counts 1 and every backward 2, and the
section says so.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import gradient_edges, message_bytes, play, stage_seconds
from varuna_capslog.planning.simulation import PipelineStep, Simulation
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports import markup, plots
from varuna_capslog.reports.markup import UNKNOWN, Markup, duration, plural, significant
from varuna_capslog.reports.plots import Plot
from varuna_capslog.reports.run import RunRecord
from varuna_capslog.reports.style import (
    ALARM,
    AMBER,
    BLUE,
    GREY,
    INK,
    MOST_ABOVE,
    PALE,
    SKY,
    WIDTH,
    head_picture,
    name_rows,
    picture,
    plan_title,
    second_unit,
)
from varuna_capslog.schedules import (
    DEFAULT_K,
    KINDS,
    Action,
    Edge,
    RunShape,
    Schedule,
    StageGraph,
    StageSeconds,
    TimedAction,
    TimedMessage,
    Timeline,
    from_strings,
    simulate,
)

__all__ = [
    "COPY_THREAD",
    "Limits",
    "busy_parts",
    "draw_simulation",
    "plot_schedule",
    "simulation_title",
    "step_parts",
    "trace_events",
]

# -- Pictures of one step: a row per rank, a box per action with its microbatch's number; memory over time below.
#
# `step_parts` draws a simulated timeline (`varuna_capslog.schedules.simulate`), `capslog simulate` whole simulations.


_COLOURS = {"F": SKY, "R": AMBER, "B": BLUE, "I": BLUE, "W": "#5b87ad", "O": "#c9b7d6", "L": "#c9b7d6", "U": GREY}
_WHITE_TEXT = frozenset("BIW")
_MARKS = {"O": "^", "L": "v"}
"""Marks for the begin of a copy that takes no time of its rank, at the upper edge of the row."""
_MARK_COLOUR = "#7a4f96"
_SMALLEST, _LARGEST = 4.0, 8.5
"""Font sizes of the numbers in boxes, in points; where not even the smallest fits, boxes stay empty."""


_PLOT_COLOURS = {
    "F": plots.SKY, "R": plots.AMBER, "B": plots.BLUE, "I": plots.BLUE, "W": "#6f97c4", "O": "#b39ac6", "L": "#b39ac6",
    "U": plots.GREY,
}  # fmt: skip
_MOST_BOXES = 3000
"""Most actions of a step that are drawn: with more, the page is too large and the boxes are too narrow."""


def plot_schedule(timeline: Timeline, in_seconds: bool) -> Plot | None:
    """Return the timeline as rows of boxes with the numbers of the microbatches, `stage.microbatch` where a rank runs
    several stages; None for more than `_MOST_BOXES` actions. in_seconds: False where times count forward passes.
    """
    rows = timeline.actions
    if sum(map(len, rows)) > _MOST_BOXES:
        return None
    end = timeline.step_seconds or 1.0
    unit, unit_name = second_unit(end) if in_seconds else (1.0, "forward passes")
    several = any(len({timed.action.stage for timed in row}) > 1 for row in rows)
    names = [_row_name(rank, list({timed.action.stage for timed in row})) for rank, row in enumerate(rows)]
    boxes: dict[str, list[tuple[int, float, float, str, str]]] = {}
    for rank, row in enumerate(rows):
        for timed in row:
            begin, length = timed.start_seconds / unit, (timed.end_seconds - timed.start_seconds) / unit
            place = f"stage {timed.action.stage}" + (
                "" if timed.action.microbatch is None else f", microbatch {timed.action.microbatch}"
            )
            times = f"{significant(begin)} to {significant(begin + length)} {unit_name}"
            text = f"{KINDS[timed.action.kind]}, {place}: {times}"
            box = (rank, float(f"{begin:.5g}"), float(f"{length:.5g}"), _label(timed, several), text)
            boxes.setdefault(timed.action.kind, []).append(box)
    kinds = [(KINDS[kind], colour, boxes[kind]) for kind, colour in _PLOT_COLOURS.items() if kind in boxes]
    return plots.row_boxes(names, kinds, f"time [{unit_name}] from the start of the step", end / unit)


class Limits(NamedTuple):
    """Bytes of each row's device in a simulation, and the bytes of it that the row's peak may take."""

    capacity: Sequence[int]
    usable: Sequence[int]

    @classmethod
    def of(cls, simulation: Simulation, plan: Plan, profile: Profile) -> Limits | None:
        """Return the limits of the plan's devices, less the profile's headroom; None where a capacity is not known."""
        ranks = [rank for pipeline in simulation.pipelines for rank in pipeline.ranks]
        sizes, headroom = plan.capacities_of(ranks), Headroom.of(profile)
        return None if sizes is None else cls(sizes, [headroom.usable(size) for size in sizes])

    @property
    def text(self) -> str:
        """Text on the capacity, with its bytes where all devices have the same capacity."""
        alike = len(set(self.capacity)) == 1
        words = f"capacity {format_bytes(self.capacity[0])}" if alike else "capacity of the device"
        if self.usable == self.capacity:
            return words
        return f"{words} less headroom{f': {format_bytes(self.usable[0])}' if alike else ''}"


def simulation_title(simulation: Simulation, plan: Plan, profile: Profile | None) -> str:
    """Return the title of the picture of one step: model, devices, planner, schedule and microbatches."""
    own = plan.actions is not None and plan.schedule is None  # an order without a name
    again = " with recomputation" if simulation.recompute else ""
    schedule = None if own else f"schedule {simulation.schedule}{again}"
    return plan_title("One step", plan, profile, schedule, plural(simulation.num_microbatches, "microbatch", "es"))


def draw_simulation(
    path: Path, title: str, simulation: Simulation, limits: Limits | None = None, vector: bool = True
) -> bool:
    """Draw all pipelines' ranks and, where known, each rank's memory over time; return True where every box has its
    number. Writes `path` (PNG) and, with `vector`, the same picture as SVG beside it.

    The memory of a rank is computed along its list of actions; if that fails, it is the sum of its stages' memory.
    limits: of each row; drawn as lines where they are not far above the peaks, else named in the legend.
    """
    rows = [row for pipeline in simulation.pipelines for row in pipeline.timeline.actions]
    labels = _labels(simulation)
    end = simulation.step_seconds or 1.0
    height = max(0.22, min(0.42, 6.0 / len(rows)))
    courses = _rank_courses(simulation)
    deep = 0.0 if courses is None else max(0.3, min(0.6, 7.0 / len(rows))) * len(rows)
    with picture(path, height=1.75 + height * len(rows) + deep, vector=vector) as figure:
        if courses is None:
            axes = figure.add_subplot()
        else:
            axes, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height * len(rows), deep]})
            _draw_memory(below, courses, labels, end, limits)
        numbered = _draw_boxes(axes, rows, labels, end, height)
        if courses is not None:
            below.set_xlabel(axes.get_xlabel())
            axes.set_xlabel("")
        _key(figure, title, rows)
    return numbered


def _draw_boxes(
    axes: Axes, rows: Sequence[Sequence[TimedAction]], labels: Sequence[str], end: float, height: float
) -> bool:
    """Draw a row per rank from time 0 to `end`; return True where every box has its number."""
    unit, unit_name = second_unit(end)
    several = any(len({timed.action.stage for timed in row}) > 1 for row in rows)
    points = 72 * (WIDTH - 1.6) / end  # of axis per second
    numbered = True
    for rank, row in enumerate(rows):
        axes.broken_barh([(0, end / unit)], (rank - 0.41, 0.82), facecolors=PALE, linewidth=0)
        for kind in dict.fromkeys(timed.action.kind for timed in row):
            of_kind = [timed for timed in row if timed.action.kind == kind]
            boxes = [timed for timed in of_kind if timed.end_seconds > timed.start_seconds]
            if kind in _MARKS and not boxes:
                times = [timed.start_seconds / unit for timed in of_kind]
                axes.plot(times, [rank - 0.41] * len(times), clip_on=False, **_mark(kind))
            spans = [(timed.start_seconds / unit, (timed.end_seconds - timed.start_seconds) / unit) for timed in boxes]
            axes.broken_barh(spans, (rank - 0.41, 0.82), facecolors=_COLOURS[kind], edgecolors="white", linewidth=0.6)
            texts = [_label(timed, several) for timed in boxes]
            # all boxes of a kind in a row have numbers of one size, or none has: gaps would seem to mean something
            widths = [1.3 if text == "U" else len(text) for text in texts]
            room = [points * span[1] * unit / width for span, width in zip(spans, widths, strict=True)]
            size = min([_LARGEST, 72 * height * 0.8, *(1.45 * width for width in room)])
            if size < _SMALLEST:
                numbered = False
                continue
            for timed, text in zip(boxes, texts, strict=True):
                middle = (timed.start_seconds + timed.end_seconds) / 2 / unit
                colour = "white" if kind in _WHITE_TEXT else INK
                axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=colour)
    name_rows(axes, labels)
    axes.set_xlim(0, end / unit)
    axes.set_xlabel(f"time [{unit_name}] from the start of the step")
    axes.spines["left"].set_visible(False)
    return numbered


def _draw_memory(
    axes: Axes,
    courses: Sequence[Sequence[tuple[float, int]]],
    labels: Sequence[str],
    end: float,
    limits: Limits | None,
) -> None:
    """Draw a filled curve of bytes per rank, all on one scale, each with its peak; a dashed line is the capacity."""
    unit, _ = second_unit(end)
    peaks = [max(size for _, size in course) for course in courses]
    drawn = limits is not None and max(limits.usable) <= MOST_ABOVE * max([1, *peaks])
    lines = limits.usable if limits is not None and drawn else None
    scale = 0.74 / max([1, *peaks, *(lines or ())])
    for row, (course, peak) in enumerate(zip(courses, peaks, strict=True)):
        base = row + 0.41
        times = [seconds / unit for seconds, _ in course] + [end / unit]
        levels = [base - scale * size for _, size in course]
        axes.fill_between(times, base, [*levels, levels[-1]], step="post", color=SKY, linewidth=0)
        axes.step(times, [*levels, levels[-1]], where="post", color=BLUE, linewidth=0.9)
        if lines is not None:
            axes.plot([0, end / unit], [base - scale * lines[row]] * 2, **_CAPACITY)
        highest = [size for _, size in course].index(peak)
        axes.plot([times[highest]], [levels[highest]], clip_on=False, **_PEAK)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(f"peak {format_bytes(peak)}", (1, base), (4, 1), ha="left", va="bottom", fontsize=7.5, **place)
    name_rows(axes, labels)
    axes.spines["left"].set_visible(False)
    axes.set_ylabel("memory")
    _memory_key(axes, limits, drawn)


_CAPACITY: dict[str, Any] = {"color": ALARM, "linestyle": "--", "linewidth": 0.9}
_PEAK: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 3.5, "markeredgewidth": 0, "linestyle": "none"}


def _memory_key(axes: Axes, limits: Limits | None, drawn: bool) -> None:
    """Write a legend over the curves of memory: the peak, and the capacity, also where it is too high to be drawn."""
    handles: list[Artist] = [Line2D([], [], label="peak of the step", **_PEAK)]
    if limits is not None and drawn:
        handles.append(Line2D([], [], label=limits.text, **_CAPACITY))
    elif limits is not None:
        handles.append(Patch(facecolor="none", label=f"{limits.text}, far above the curves"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2)


def _row_name(rank: int, stages: Sequence[int]) -> str:
    """Return the name of a row: its stage, or its rank where the rank runs several."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"rank {rank}"


def _labels(simulation: Simulation) -> list[str]:
    """Return a name per row, with the pipeline's number before it where there are several."""
    return [
        (f"{number}: " if len(simulation.pipelines) > 1 else "") + _row_name(rank, stages)
        for number, pipeline in enumerate(simulation.pipelines)
        for rank, stages in zip(pipeline.ranks, pipeline.stage_of_row, strict=True)
    ]


def _rank_courses(simulation: Simulation) -> list[list[tuple[float, int]]] | None:
    """Return for each row the bytes of its rank over time; None where they are unknown."""
    rows = []
    for pipeline in simulation.pipelines:
        if (folded := pipeline.rank_memory) is not None:
            rows += folded
            continue
        if pipeline.memory is None:
            return None
        for stages in pipeline.stage_of_row:
            rows.append(_added([pipeline.memory[stage] for stage in stages]))
    return rows


def _added(courses: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, int]]:
    """Return the sum of several curves of bytes over time."""
    if len(courses) == 1:
        return list(courses[0])
    changes = sorted(
        ((seconds, number, size) for number, course in enumerate(courses) for seconds, size in course),
        key=lambda change: change[0],
    )
    now = [0] * len(courses)
    total = []
    for seconds, number, size in changes:
        now[number] = size
        total.append((seconds, sum(now)))
    return total


def _key(figure: Figure, title: str, rows: Sequence[Sequence[TimedAction]]) -> None:
    kinds = [kind for kind in _COLOURS if any(timed.action.kind == kind for row in rows for timed in row)]
    handles: list[Artist] = []
    for kind in kinds:
        instant = all(
            timed.start_seconds == timed.end_seconds for row in rows for timed in row if timed.action.kind == kind
        )
        box = Patch(facecolor=_COLOURS[kind], label=KINDS[kind])
        handles.append(Line2D([], [], label=KINDS[kind], **_mark(kind)) if kind in _MARKS and instant else box)
    handles.append(Patch(facecolor=PALE, label="idle"))
    head_picture(figure, title, handles=handles, ncols=len(handles))


def _mark(kind: str) -> dict[str, Any]:
    return {"marker": _MARKS[kind], "color": _MARK_COLOUR, "markersize": 5, "markeredgewidth": 0, "linestyle": "none"}


def _label(timed: TimedAction, several: bool) -> str:
    microbatch = "" if timed.action.microbatch is None else str(timed.action.microbatch)
    return f"{timed.action.stage}.{microbatch}" if several else microbatch or "U"


# -- The section on one step


def step_parts(run: RunRecord) -> list[Markup]:
    """Return picture, facts and notes."""
    if run.plan is None:
        return [markup.note(f"No schedule is known: {run.reason('plan')}.")]
    try:
        schedule, name, graph = _schedule(run, run.plan)
        seconds, why_uniform = _stage_seconds(run, run.plan)
        timeline = simulate(schedule, seconds, gradients=_gradients(run, run.plan, graph), graph=graph)
    except CapslogError as error:
        return [markup.note(f"No picture: {str(error).rstrip('.')}.")]
    microbatches = len({action.microbatch for row in schedule for action in row})
    drawn = plot_schedule(timeline, in_seconds=why_uniform is None)

    measured = run.median_step_seconds()
    size = f"{plural(len(run.plan.stages), 'stage')}, {plural(microbatches, 'microbatch', 'es')} per pipeline"
    rows = {
        "Schedule": f"{name}, {size}",
        "Bubble fraction": f"{100 * timeline.bubble_fraction:.1f} %",
    }
    if why_uniform is None:
        rows["Simulated step"] = duration(timeline.step_seconds)
    else:
        rows["Simulated step"] = f"{significant(timeline.step_seconds)} forward passes of one stage"
    if measured is not None:
        rows["Measured step (median)"] = duration(measured)
        if why_uniform is None and timeline.step_seconds > 0:
            rows["Measured / simulated"] = significant(measured / timeline.step_seconds)
    rows["Most microbatches in flight"] = ", ".join(map(str, timeline.max_in_flight)) + " (by stage)"
    numbers = "stage.microbatch" if len(run.plan.stages) > len(timeline.actions) else "microbatches"
    caption = f"Simulated; the numbers are {numbers}, left out where a box is too narrow."
    notes = []
    if why_uniform is not None:
        notes.append(
            f"No seconds of layers are known ({why_uniform}): every forward pass counts 1 and every backward pass 2 "
            "here, on every stage alike."
        )
    else:
        notes.append(
            "The simulation adds up the profile's seconds, which hold for the profile's input size. It knows no "
            "transfers, optimizer or data loading, and no ranks that share a processor."
        )
        notes += _other_conditions(run)
    words = "Boxes of the passes of every microbatch over time, a row per rank"
    parts = [] if drawn is None else [markup.figure(drawn, words, caption)]
    parts.append(markup.facts("step-table", rows))
    return [*parts, *map(markup.note, notes)]


def _schedule(run: RunRecord, plan: Plan) -> tuple[Schedule, str, StageGraph]:
    """Return the actions of a step (in the short form of one pipeline), their schedule's name, and the stages."""
    pipeline = None if run.config is None else run.config.pipeline
    name = plan.schedule or (None if pipeline is None else pipeline.schedule)
    if plan.actions is not None:
        return from_strings(plan.actions), name or "the plan's own actions", plan.stage_graph(_edges(run))
    microbatches = plan.num_microbatches
    if microbatches is None and run.config is not None:
        microbatches = run.config.num_microbatches // run.config.pipeline.replicas
    if name is None or microbatches is None:
        missing = "schedule" if name is None else "num_microbatches"
        raise CapslogError(f"the plan has no {missing}, and {run.reason('config.yaml')}")
    graph = dataclasses.replace(plan, units=dataclasses.replace(plan.units, per_step=microbatches)).stage_graph(
        _edges(run)
    )
    recompute = pipeline is not None and pipeline.recompute
    shape = RunShape(schedule=name, recompute=recompute, k=DEFAULT_K if pipeline is None else pipeline.k)
    shown = f"{name} with recomputation" if any(stage.recomputes(shape) for stage in plan.stages) else name
    return scheduled(name, plan.stages, graph, shape), shown, graph


def _edges(run: RunRecord) -> list[tuple[int, int]] | None:
    """Return the edges between layers, as (writer, reader); None where the run's profile does not have them."""
    return None if run.profile is None else run.profile.known_edges


def _gradients(run: RunRecord, plan: Plan, graph: StageGraph) -> list[Edge] | None:
    """Return the edges over which gradients come back; None: all."""
    if run.profile is None or plan.routes == "relay":
        return None
    return gradient_edges(message_bytes(run.profile, plan.stages, graph, plan.routes), graph)


def _stage_seconds(run: RunRecord, plan: Plan) -> tuple[StageSeconds, str | None]:
    """Return the seconds of each stage and None; or units (forward 1, backward 2) and the reason for the units."""
    forward_units = [1.0] * len(plan.stages)
    bare = [0.0 if stage.end == plan.num_layers else 1.0 for stage in plan.stages]
    copies = dict.fromkeys("OL", [0.0] * len(plan.stages))
    uniform = StageSeconds(forward_units, [2.0] * len(plan.stages), bare_forward=bare, other=copies)
    if run.profile is None:
        return uniform, run.reason("profile.json")
    if run.profile.num_layers != plan.num_layers:
        return uniform, "profile.json describes another number of layers than the plan"
    try:
        seconds = stage_seconds(run.profile, plan.stages)
    except CapslogError as error:
        return uniform, str(error) if run.profile.timed else "profile.json has no forward_seconds or backward_seconds"
    if not any(seconds.forward) and not any(seconds.backward):
        return uniform, "all seconds in profile.json are 0"
    return seconds, None


def _other_conditions(run: RunRecord) -> list[str]:
    """Return a sentence where the profile has other microbatches than the run, which makes the seconds invalid."""
    profiled = run.profile.conditions.get("microbatch_size") if run.profile is not None else None
    ran = run.plan.microbatch_size if run.plan is not None else None
    if isinstance(profiled, int) and ran is not None and profiled != ran:
        return [f"The profile was taken with {profiled} samples in a microbatch, the run has {ran}."]
    return []


# -- The section on the work of each rank: seconds predicted by the plan's profile beside measured seconds.
#
# Work is forwards, recomputations and backwards, without waiting, copies and the optimizer's update.


def busy_parts(run: RunRecord) -> list[Markup]:
    """Return a table of the ranks; nothing where no rank's work was measured under the newest plan."""
    rows = [line.busy_seconds for line in run.steps_of_plan if line.busy_seconds]
    if not rows:
        return []
    alike = [row for row in rows if len(row) == len(rows[-1])]
    measured = [statistics.median(column) for column in zip(*alike, strict=True)]
    planned = _planned(run, len(measured))
    table, stages = [], {} if run.plan is None else _stages(run, len(measured))
    for rank, seconds in enumerate(measured):
        expected = planned.get(rank)
        ratio = significant(seconds / expected) if expected else UNKNOWN
        table.append([str(rank), stages.get(rank, ""), duration(expected), duration(seconds), ratio])
    headings = ["rank", "stages", "planned", "measured (median)", "measured / planned"]
    about = (
        "Seconds that each rank works in a step: forwards, recomputations and backwards, without waiting for others or "
        "for data. A rank whose last number is larger than the others' is slower than its plan; with "
        "elastic.rebalance=true a run gives it fewer layers."
    )
    return [markup.table("busy-table", headings, table), markup.paragraph(about)]


def _stages(run: RunRecord, ranks: int) -> Mapping[int, str]:
    """Return each rank's stages in the plan, by number; equal pipelines of a short plan follow one another."""
    assert run.plan is not None
    width, stages_of_rank = run.plan.num_ranks, dict[int, list[str]]()
    for stage, rank in enumerate(run.plan.placement()):
        for rank_of_copy in range(rank, ranks, width) if run.plan.short else (rank,):
            stages_of_rank.setdefault(rank_of_copy, []).append(str(stage))
    return {rank: ", ".join(stages) for rank, stages in stages_of_rank.items()}


def _planned(run: RunRecord, ranks: int) -> Mapping[int, float]:
    """Return the predicted seconds of each rank's work; empty where the profile cannot predict them."""
    if run.plan is None or run.profile is None or run.config is None or run.plan.num_microbatches is None:
        return {}
    shape = RunShape.of_config(run.config).settled()
    try:
        busy = play(run.profile, run.plan, None, None, shape.recompute, shape, Link()).busy_seconds
    except CapslogError:
        return {}
    width = run.plan.num_ranks
    return {rank: busy[rank % width] for rank in range(ranks) if run.plan.short or rank in busy}


# -- Converts a simulated step to a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
#
# The form is the Chrome trace event format: a process per rank with one thread for its computation, one per rank that
# it sends to and one for copies that run beside the computation, a counter of bytes per stage, and an arrow per message
# from the action that made it to the action that waits for it.


COMPUTE_THREAD = 0
"""Thread of a rank's actions; transfers to rank r are on thread r + 1."""

COPY_THREAD = 1_000_000
"""Thread of a rank's copies to and from the host tier."""

_MICROSECONDS = 1e6
_INSIDE = 1e-3
"""Microseconds by which an arrow begins before its action's end, since it belongs to the slice in which it begins."""


def trace_events(simulation: Simulation) -> dict[str, Any]:
    """Return the JSON value of a trace file; times in microseconds since the step's begin."""
    events: list[dict[str, Any]] = []
    for number, pipeline in enumerate(simulation.pipelines):
        events += _names(pipeline, number if len(simulation.pipelines) > 1 else None)
        events += _slices(pipeline)
        events += _counters(pipeline)
        events += _arrows(pipeline, f"{number}.")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": simulation.schedule,
            "num_microbatches": simulation.num_microbatches,
            "step_seconds": simulation.step_seconds,
            "bubble_fraction": simulation.bubble_fraction,
        },
    }


def _names(pipeline: PipelineStep, number: int | None) -> Iterator[dict[str, Any]]:
    of_pipeline = "" if number is None else f"pipeline {number}, "
    for rank, stages in zip(pipeline.ranks, pipeline.stage_of_row, strict=True):
        stage_text = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        yield _named("process_name", rank, 0, {"name": f"rank {rank} ({of_pipeline}{stage_text})"})
        yield _named("process_sort_index", rank, 0, {"sort_index": rank})
        yield _named("thread_name", rank, COMPUTE_THREAD, {"name": "compute"})
        yield _named("thread_sort_index", rank, COMPUTE_THREAD, {"sort_index": 0})
    for source, destination in sorted({_ends(pipeline, message) for message in pipeline.timeline.messages}):
        yield _named("thread_name", source, destination + 1, {"name": f"to rank {destination}"})
        yield _named("thread_sort_index", source, destination + 1, {"sort_index": destination + 1})
    for rank in sorted({pipeline.ranks[copy.rank] for copy in pipeline.timeline.copies}):
        yield _named("thread_name", rank, COPY_THREAD, {"name": "host tier"})
        yield _named("thread_sort_index", rank, COPY_THREAD, {"sort_index": COPY_THREAD})


def _named(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _ends(pipeline: PipelineStep, message: TimedMessage) -> tuple[int, int]:
    return pipeline.ranks[message.source], pipeline.ranks[message.destination]


def _slices(pipeline: PipelineStep) -> Iterator[dict[str, Any]]:
    for rank, row in zip(pipeline.ranks, pipeline.timeline.actions, strict=True):
        for timed in row:
            action = timed.action
            place = {"name": str(action), "cat": KINDS[action.kind], "pid": rank, "tid": COMPUTE_THREAD}
            yield _slice(timed, place, {"stage": action.stage, "microbatch": action.microbatch})
    for copy in pipeline.timeline.copies:
        action = copy.action
        place = {"name": str(action), "cat": "copy", "pid": pipeline.ranks[copy.rank], "tid": COPY_THREAD}
        yield _slice(copy, place, {"stage": action.stage, "microbatch": action.microbatch})
    for sent in pipeline.timeline.messages:
        message, (source, destination) = sent.message, _ends(pipeline, sent)
        name = f"{message.kind} {message.downstream[1]}"
        place = {"name": name, "cat": "transfer", "pid": source, "tid": destination + 1}
        source_stage, target_stage = message.way
        arguments = {"from_stage": source_stage, "to_stage": target_stage, "microbatch": message.downstream[1]}
        yield _slice(sent, place, arguments)


def _slice(timed: TimedAction | TimedMessage, place: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    begin, length = timed.start_seconds * _MICROSECONDS, (timed.end_seconds - timed.start_seconds) * _MICROSECONDS
    return {"ph": "X", **place, "ts": begin, "dur": length, "args": arguments}


def _counters(pipeline: PipelineStep) -> Iterator[dict[str, Any]]:
    rank_of = {stage: rank for rank, row in zip(pipeline.ranks, pipeline.stage_of_row, strict=True) for stage in row}
    for stage, course in enumerate(pipeline.memory or []):
        for seconds, size in course:
            yield {
                "ph": "C",
                "name": f"memory of stage {stage}",
                "pid": rank_of[stage],
                "ts": seconds * _MICROSECONDS,
                "args": {"bytes": size},
            }


def _arrows(pipeline: PipelineStep, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield a pair of flow events per message whose two actions take time; an action of no duration gets no arrow."""
    timed: dict[Action, tuple[int, TimedAction]] = {
        timed_end.action: (rank, timed_end)
        for rank, row in zip(pipeline.ranks, pipeline.timeline.actions, strict=True)
        for timed_end in row
    }
    for number, sent in enumerate(pipeline.timeline.messages):
        message = sent.message
        kinds = "F" if message.kind == "activation" else "BI"
        ends = [
            next(timed[key] for kind in kinds if (key := Action(stage, kind, call)) in timed)
            for stage, call in (message.end(sends=True), message.end(sends=False))
        ]
        (source, made), (destination, waits) = ends
        lengths = [(timed_end.end_seconds - timed_end.start_seconds) * _MICROSECONDS for timed_end in (made, waits)]
        if min(lengths) <= 0:
            continue
        common = {"name": message.kind, "cat": "message", "id": f"{prefix}{number}"}
        begin = made.end_seconds * _MICROSECONDS - min(_INSIDE, lengths[0] / 2)
        yield {**common, "ph": "s", "pid": source, "tid": COMPUTE_THREAD, "ts": begin}
        end = waits.start_seconds * _MICROSECONDS
        yield {**common, "ph": "f", "bp": "e", "pid": destination, "tid": COMPUTE_THREAD, "ts": end}
