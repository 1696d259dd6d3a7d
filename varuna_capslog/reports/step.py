"""The section on one step: the schedule's picture, its bubbles, and the simulated step time beside the measured one.

`page` calls it. The times come from the profile; where it has none, every forward pass counts 1 and every backward 2,
and the section says so.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.stage_seconds import gradient_edges, message_bytes, stage_seconds
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.reports import markup
from varuna_capslog.reports.gantt import draw_schedule
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.run import RunRecord
from varuna_capslog.reports.wording import duration, plural, significant
from varuna_capslog.schedules import (
    DEFAULT_K,
    Edge,
    RunShape,
    Schedule,
    StageGraph,
    StageSeconds,
    from_strings,
    simulate,
)

__all__ = ["step_parts"]

_PICTURE = "schedule.png"


def step_parts(run: RunRecord, folder: Path) -> list[Markup]:
    """Return picture, facts and notes; draw `schedule.png` where the plan has a schedule."""
    if run.plan is None:
        return [markup.note(f"No schedule is known: {run.reason('plan')}.")]
    try:
        schedule, name, graph = _schedule(run, run.plan)
        seconds, why_uniform = _stage_seconds(run, run.plan)
        timeline = simulate(schedule, seconds, gradients=_gradients(run, run.plan, graph), graph=graph)
    except CapslogError as error:
        return [markup.note(f"No picture: {str(error).rstrip('.')}.")]
    numbered = draw_schedule(folder / _PICTURE, timeline, in_seconds=why_uniform is None)

    measured = run.median_step_seconds()
    microbatches = len({action.microbatch for row in schedule for action in row})
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
    caption = f"Simulated; the numbers are {numbers}{'' if numbered else ', left out where a box is too narrow'}."
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
    parts = [
        markup.figure(_PICTURE, "Boxes of the passes of every microbatch over time, a row per rank", caption),
        markup.facts("step-table", rows),
    ]
    return [*parts, *map(markup.note, notes)]


def _schedule(run: RunRecord, plan: Plan) -> tuple[Schedule, str, StageGraph]:
    """Return the actions of a step (in the short form those of one pipeline), their schedule's name, and the stages."""
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
    except CapslogError:
        return uniform, "profile.json has no forward_seconds or backward_seconds"
    if not any(seconds.forward) and not any(seconds.backward):
        return uniform, "all seconds in profile.json are 0"
    return seconds, None


def _other_conditions(run: RunRecord) -> list[str]:
    """Return the differences between the profile's microbatches and the run's that make the seconds not apply."""
    profiled = run.profile.conditions.get("microbatch_size") if run.profile is not None else None
    ran = run.plan.microbatch_size if run.plan is not None else None
    if isinstance(profiled, int) and ran is not None and profiled != ran:
        return [f"The profile was taken with {profiled} samples in a microbatch, the run has {ran}."]
    return []
