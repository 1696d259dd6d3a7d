"""`capslog plan --pareto`: the front of memory against step time of one pipeline, as table, picture and JSON.

For cuts alone memory is the peak of the largest stage, and the front is that of planner `throughput`. A planner that
treats layers has a front of budgets: bytes per device, headroom included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands.plan_time import PlanRequest, format_seconds
from varuna_capslog.commands.shared import print_json, print_table

if TYPE_CHECKING:
    from varuna_capslog.planners.throughput import Fastest
    from varuna_capslog.planning.budget_front import BudgetPoint
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["plan_front"]


def plan_front(request: PlanRequest, planner: str, output: Path | None, as_json: bool) -> None:
    """Prints the front of one pipeline; writes it as a picture (.png) or as JSON. Exit status 3 if nothing fits.

    planner: one of `planners.LAYERWISE` for the front of its budgets; any other for that of cuts alone.
    """
    from varuna_capslog.planners import LAYERWISE
    from varuna_capslog.profiles.conditions import why_few

    profile = request.only_profile()
    count = request.microbatches(profile)
    run = replace(request.run, num_microbatches=count)
    if request.devices > profile.num_layers:
        raise CapslogError(
            f"{request.devices} devices but only {profile.num_layers} layers; use --joint for more devices"
            f"{why_few(profile.conditions)}"
        )
    value = {
        "model": profile.model,
        "profile_digest": profile.digest,
        "devices": request.devices,
        "schedule": run.schedule,
        "num_microbatches": count,
    }
    title = f"{profile.model or 'profile'}: {request.devices} stages, {count} microbatches, {run.schedule}"
    front = _of_budgets if planner in LAYERWISE else _of_peaks
    more, table, draw = front(request, profile, run, planner)
    value |= more
    if output is not None and output.suffix.lower() == ".png":
        draw(output, title)
    elif output is not None:
        from varuna_capslog.base.files import write_json

        write_json(output, value)
    if as_json:
        print_json(value)
    else:
        table(title)


_Answer = tuple[dict[str, Any], Callable[[str], None], Callable[[Path, str], None]]
"""What the JSON says of the front; what prints its table; what draws it, with a title."""


def _of_peaks(request: PlanRequest, profile: Profile, run: RunShape, planner: str) -> _Answer:
    """Cuts alone, which stages keep or recompute as a whole."""
    from varuna_capslog.memory import MEMORY_MODELS, resolve
    from varuna_capslog.planners.seconds import LayerSeconds
    from varuna_capslog.planners.throughput import pareto_front
    from varuna_capslog.planning.search import plan
    from varuna_capslog.planning.verdict import usable_bytes

    given = request.capacity
    memory, costs = resolve(request.memory, profile, run)
    if (gap := MEMORY_MODELS[memory].gap(run)) is not None:
        raise CapslogError(f"there is no front without peaks: {gap}")
    capacities = usable_bytes(profile, given, request.devices)
    front = pareto_front(costs, LayerSeconds.of_profile(profile, request.link), run, request.devices, capacities)
    if not front:
        answer = plan(profile, request.devices, "exact", request.memory, given, run)
        raise DoesNotFit("; ".join(answer.notes))

    def draw(path: Path, title: str) -> None:
        from varuna_capslog.reports.forecasts import FrontPoint, draw_front

        points = [FrontPoint(one.peak_bytes, one.step_seconds, one.bound_seconds, one.proven) for one in front]
        capacity = min(given) if isinstance(given, list) else given
        draw_front(path, points, title, "predicted peak of the largest stage", capacity)

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


def _of_budgets(request: PlanRequest, profile: Profile, run: RunShape, planner: str) -> _Answer:
    """Cuts and memory intervals, for budgets from all kept to all treated."""
    from varuna_capslog.memory.headroom import Headroom
    from varuna_capslog.planning.budget_front import budget_front
    from varuna_capslog.planning.playing import with_step_seconds
    from varuna_capslog.planning.search import plan

    capacity = request.capacity
    if isinstance(capacity, list):
        raise CapslogError(
            "--capacity lists several devices, but the front is of one budget for every device; give one size, or none"
        )
    headroom = Headroom.of(profile)

    def find(limit: int | None) -> Plan:
        found = plan(profile, request.devices, planner, request.memory, limit, run, request.link)
        if not found.ranks or found.ranks[0].bytes is None:
            raise CapslogError("; ".join(found.notes) or "there is no front without the bytes of ranks")
        return with_step_seconds(profile, found, run, request.link)

    def needed(found: Plan) -> int:
        return max(headroom.device(one.bytes or 0) for one in found.ranks)

    front = budget_front(find, needed, capacity)
    if not front:
        raise DoesNotFit("; ".join(find(capacity).notes))

    def draw(path: Path, title: str) -> None:
        from varuna_capslog.reports.forecasts import FrontPoint, draw_front

        points = [
            FrontPoint(one.budget_bytes, one.step_seconds, one.plan.bound_seconds, bool(one.plan.proven))
            for one in front
        ]
        draw_front(path, points, title, "budget of every device", capacity)

    value = {"planner": planner, "front": [_budget_point(one) for one in front]}
    return value, lambda title: _print_budgets(front, f"{planner}, {title}"), draw


def _budget_point(one: BudgetPoint) -> dict[str, Any]:
    return {
        "budget_bytes": one.budget_bytes,
        "step_seconds": one.step_seconds,
        "bound_seconds": one.plan.bound_seconds,
        "proven": one.plan.proven,
        "cuts": list(one.plan.cut_list),
        "memory": [[[a.first, a.end, a.kind] for a in stage.memory or ()] for stage in one.plan.stages],
    }


def _print_budgets(front: Sequence[BudgetPoint], title: str) -> None:
    from varuna_capslog.base.units import format_bytes

    fastest, rows = front[-1].step_seconds, []
    for one in front:
        intervals = [part for stage in one.plan.stages for part in stage.memory or ()]
        again = sum(part.end - part.first for part in intervals if part.recomputes)
        away = sum(part.end - part.first for part in intervals if not part.recomputes)
        bound, proven = one.plan.bound_seconds, bool(one.plan.proven)
        rows.append(
            [
                format_bytes(one.budget_bytes),
                format_seconds(one.step_seconds),
                _against(one.step_seconds, fastest),
                "" if bound is None else _proof(one.step_seconds, bound, proven),
                str(again),
                str(away),
                " ".join(map(str, one.plan.cut_list)),
            ]
        )
    headings = ("budget", "step", "against fastest", "proven", "recomputed", "offloaded", "cuts")
    notes = [f"layers recomputed and offloaded, of {front[0].plan.num_layers}; budgets are bytes per device"]
    print_table(title, headings, rows, left=(6,), notes=notes)


def _against(seconds: float, fastest: float) -> str:
    return f"+{(seconds / fastest - 1) * 100:.1f} %" if fastest else ""


def _proof(seconds: float, bound: float, proven: bool) -> str:
    return "yes" if proven else f"within {(seconds / bound - 1 if bound > 0 else 0.0) * 100:.2g} %"
