"""`capslog front`: memory against step time of one pipeline, as table, picture and JSON.

For planners of cuts alone, memory is the peak of the largest stage, and planner `throughput` makes the front. For
planners that recompute or offload layers, memory is a budget: bytes per device, headroom included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_percent, format_seconds
from varuna_capslog.commands import shared
from varuna_capslog.commands.questions import PlannerFlags, costs_of, question_of, read_profiles, settled
from varuna_capslog.commands.shared import print_json, print_table

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planners.throughput import Fastest
    from varuna_capslog.planning.comparison import BudgetPoint
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["front"]


@dataclass(frozen=True)
class FrontFlags(PlannerFlags):
    """The command line of `front`."""

    profile: shared.ProfileFile = None
    output: Annotated[Path | None, shared.output_option("File for the front: a .png draws it, any other is JSON.")] = (
        None
    )


@shared.options_of(FrontFlags)
def front(flags: FrontFlags) -> None:
    """Show the step time for every amount of memory. Exit status 3 when nothing fits."""
    from varuna_capslog.planning.registry import planner_named
    from varuna_capslog.profiles.conditions import why_few
    from varuna_capslog.schedules import RunShape
    from varuna_capslog.start.prepare import plan_run

    flags = settled(flags)
    (known_profile,) = read_profiles([flags.profile] if flags.profile else None, flags) or (None,)
    config = question_of(flags, flags.planner, known_profile)
    planner = config.pipeline.planner
    if planner_named(planner).shape in ("stages", "pipelines"):
        raise CapslogError(f"a front is of one pipeline, planner {planner} makes several; choose another planner")
    if config.pipeline.zero:
        raise CapslogError(
            "a front is of one pipeline, and pipeline.zero=1 shares optimizer states among several; leave it out"
        )
    config, profile, memo = costs_of(flags, config, known_profile, choose=False)
    pipeline, planner = config.pipeline, config.pipeline.planner
    if pipeline.devices > profile.num_layers:
        raise CapslogError(
            f"{pipeline.devices} devices but only {profile.num_layers} layers; capslog plan --planner joint plans for "
            f"more devices{why_few(profile.conditions)}"
        )

    def find(planner: str, capacity: int | list[int] | None, cuts: list[int] | None = None) -> Plan:
        changed = pipeline.model_copy(update={"planner": planner, "capacity": capacity, "cuts": cuts})
        return plan_run(config.model_copy(update={"pipeline": changed}), profile, memo=memo)

    run = RunShape.of_config(config).share(pipeline.replicas).settled()
    value: dict[str, Any] = {
        "model": profile.model,
        "profile_digest": profile.digest,
        "devices": pipeline.devices,
        "schedule": run.schedule,
        "num_microbatches": run.num_microbatches,
    }
    treats = planner_named(planner).shape == "intervals"
    more, table, draw = (_of_budgets if treats else _of_peaks)(config, profile, find)
    value |= more
    title = _title(config, profile, [point.get("schedule", run.schedule) for point in value["front"]])
    if flags.output is not None and flags.output.suffix.lower() == ".png":
        draw(flags.output, title)
    elif flags.output is not None:
        from varuna_capslog.base.files import write_json

        write_json(flags.output, value)
    if flags.as_json:
        print_json(value)
    else:
        table(title)


def _title(config: Config, profile: Profile, schedules: Sequence[str | None]) -> str:
    """Return the title of table and picture: model, devices, planner, microbatches and the plans' schedules."""
    from varuna_capslog.reports.markup import plural
    from varuna_capslog.reports.style import device_kind, schedules_text, title_of
    from varuna_capslog.schedules import RunShape

    pipeline = config.pipeline
    count = RunShape.of_config(config).share(pipeline.replicas).microbatches
    devices = f"{plural(pipeline.devices, 'device')}{device_kind(profile.conditions, pipeline.speeds)}"
    known = (f"planner {pipeline.planner}", schedules_text(schedules), plural(count, "microbatch", "es"))
    where = devices if pipeline.replicas == 1 else f"a pipeline of {devices}"
    return title_of("Memory against step time", profile.model, where, *known)


_Find = Callable[..., "Plan"]
"""Function of planner, capacity and (optional) fixed cuts that returns the plan."""
_Answer = tuple[dict[str, Any], Callable[[str], None], Callable[[Path, str], None]]
"""The front's JSON fields, a function that prints its table, and a function that draws it; both take a title."""


def _of_peaks(config: Config, profile: Profile, find: _Find) -> _Answer:
    """Return the front of cuts alone, whose stages keep or recompute all their layers."""
    from varuna_capslog.memory import MEMORY_MODELS, resolve
    from varuna_capslog.planners.seconds import LayerSeconds
    from varuna_capslog.planners.throughput import pareto_front
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.schedules import RunShape

    pipeline, planner = config.pipeline, config.pipeline.planner
    capacity_limit, run = pipeline.capacity, RunShape.of_config(config).share(pipeline.replicas).settled()
    memory, costs = resolve(pipeline.memory, profile, run)
    if (gap := MEMORY_MODELS[memory].gap(run)) is not None:
        raise CapslogError(f"there is no front without peaks: {gap}")
    problem = Problem.of_config(config, profile)
    seconds = LayerSeconds.of_profile(profile, problem.link)
    front = pareto_front(costs, seconds, run, problem.width, problem.usable)
    if capacity_limit is not None:  # a point fits if the bytes of its ranks fit
        front = [point for point in front if find(planner, capacity_limit, list(point.cuts)).fits is not False]
    if not front:
        raise DoesNotFit("; ".join(find("exact", capacity_limit).notes))

    def draw(path: Path, title: str) -> None:
        from varuna_capslog.reports.curves import FrontPoint, draw_front

        points = [
            FrontPoint(point.peak_bytes, point.step_seconds, point.bound_seconds, point.proven) for point in front
        ]
        usable = None if problem.usable is None else min(problem.usable)
        name = "capacity" if usable is None or usable in (problem.capacities or ()) else "capacity less headroom"
        draw_front(path, title, points, "predicted peak of the largest stage", usable, name)

    value = {"memory_model": memory, "front": [_point(point) for point in front]}
    return value, lambda title: _print_peaks(front, title), draw


def _point(point: Fastest) -> dict[str, Any]:
    return {
        "peak_bytes": point.peak_bytes,
        "step_seconds": point.step_seconds,
        "bound_seconds": point.bound_seconds,
        "proven": point.proven,
        "cuts": list(point.cuts),
    }


def _print_peaks(front: Sequence[Fastest], title: str) -> None:
    from varuna_capslog.base.units import format_bytes

    fastest = front[-1].step_seconds
    rows = [
        [
            format_bytes(point.peak_bytes),
            format_seconds(point.step_seconds),
            _against(point.step_seconds, fastest),
            _proof(point.step_seconds, point.bound_seconds, point.proven),
            " ".join(map(str, point.cuts)),
        ]
        for point in front
    ]
    print_table(title, ("peak", "step", "against fastest", "proven", "cuts"), rows, left=(4,))


def _of_budgets(config: Config, profile: Profile, find: _Find) -> _Answer:
    """Return the front of cuts and memory intervals, for budgets from all layers kept to none kept."""
    from varuna_capslog.memory import NEVER
    from varuna_capslog.memory.costs import Headroom
    from varuna_capslog.planning.comparison import budget_front

    capacity, planner, headroom = config.pipeline.capacity, config.pipeline.planner, Headroom.of(profile)
    if isinstance(capacity, list):
        raise CapslogError(
            "the capacity is one size per device, but the front is of one budget for every device; give one size, or "
            "none"
        )

    def within(limit: int | None) -> Plan:
        plan = find(planner, NEVER - 1 if limit is None else limit)  # None would mean this machine's memory
        if not plan.ranks or plan.ranks[0].bytes is None:
            raise CapslogError("; ".join(plan.notes) or "there is no front without the bytes of ranks")
        return plan

    def needed(plan: Plan) -> int:
        return max(headroom.device(rank.bytes or 0) for rank in plan.ranks)

    front = budget_front(within, needed, capacity)
    if not front:
        raise DoesNotFit("; ".join(within(capacity).notes))

    def draw(path: Path, title: str) -> None:
        from varuna_capslog.reports.curves import FrontPoint, draw_front

        points = [
            FrontPoint(point.budget_bytes, point.step_seconds, point.plan.bound_seconds, bool(point.plan.proven))
            for point in front
        ]
        draw_front(path, title, points, "budget of every device, headroom included", capacity)

    value = {"planner": planner, "front": [_budget_point(point) for point in front]}
    return value, lambda title: _print_budgets(front, title), draw


def _budget_point(point: BudgetPoint) -> dict[str, Any]:
    return {
        "budget_bytes": point.budget_bytes,
        "step_seconds": point.step_seconds,
        "bound_seconds": point.plan.bound_seconds,
        "proven": point.plan.proven,
        "schedule": point.plan.schedule,
        "cuts": None if point.plan.cuts is None else list(point.plan.cuts),
        "memory": [[part.entries for part in stage.memory or ()] for stage in point.plan.stages],
    }


def _print_budgets(front: Sequence[BudgetPoint], title: str) -> None:
    from varuna_capslog.base.units import format_bytes

    fastest, rows = front[-1].step_seconds, []
    for point in front:
        intervals = [part for stage in point.plan.stages for part in stage.memory or ()]
        recomputed = sum(part.end - part.first for part in intervals if part.recomputes)
        offloaded = sum(part.end - part.first for part in intervals if not part.recomputes)
        bound, proven = point.plan.bound_seconds, bool(point.plan.proven)
        rows.append(
            [
                format_bytes(point.budget_bytes),
                format_seconds(point.step_seconds),
                _against(point.step_seconds, fastest),
                "" if bound is None else _proof(point.step_seconds, bound, proven),
                str(recomputed),
                str(offloaded),
                _stages(point.plan),
            ]
        )
    headings = ("budget", "step", "against fastest", "proven", "recomputed", "offloaded", "cuts")
    notes = [f"layers recomputed and offloaded, of {front[0].plan.num_layers}; budgets are bytes per device"]
    print_table(title, headings, rows, left=(6,), notes=notes)


def _stages(plan: Plan) -> str:
    """Return the plan's cuts; for stages with branches or replicas, the layers and the number of ranks of each."""
    from varuna_capslog.plans.parts import ranges_of, spans_of

    if plan.cuts is not None:
        return " ".join(map(str, plan.cuts))
    layers = Counter(spans_of(ranges_of(stage.numbers)) for stage in plan.stages)
    return ", ".join(f"{spans} x {count}" if count > 1 else spans for spans, count in layers.items())


def _against(seconds: float, fastest: float) -> str:
    return f"+{(seconds / fastest - 1) * 100:.1f} %" if fastest else ""


def _proof(seconds: float, bound: float, proven: bool) -> str:
    return "yes" if proven else f"within {format_percent(seconds / bound - 1 if bound > 0 else 0.0)}"
