"""One step of a plan before it runs: how long it takes, where ranks idle, and what each stage holds at every moment.

`capslog simulate`, `capslog compare` and the replay of preemption traces call `simulate_plan`. It turns a profile's
layers into stages, plays their schedule (`schedules.simulate`), and adds what follows the last backward. It measures
nothing and never imports torch; how far it is from real runs is in benchmarks/simulator.
"""

from __future__ import annotations

__all__ = [
    "UPDATE_RATE",
    "PipelineStep",
    "Simulation",
    "simulate_plan",
    "stage_seconds",
]

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.course import Course, memory_courses, peak_of, stage_memory
from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    Action,
    RunShape,
    Schedule,
    StageSeconds,
    TimedAction,
    Timeline,
    from_strings,
    make_schedule,
    simulate,
    validate,
)

UPDATE_RATE = "update_seconds_per_parameter_byte"
"""Where a profile's conditions say what norm, clipping and optimizer cost: seconds per byte of parameters."""


@dataclass(frozen=True)
class PipelineStep:
    """The course of one step on one pipeline.

    ranks: the rank of the run behind each row of the timeline.
    timeline: as `schedules.simulate` gives it, and the updates (U) that follow the exchange of gradients.
    memory: per stage, (seconds, bytes from then on); None where the profile does not know enough.
    """

    ranks: list[int]
    timeline: Timeline
    memory: list[Course] | None

    @property
    def stage_of_row(self) -> list[list[int]]:
        """The stages of each row of the timeline."""
        return [sorted({one.action.stage for one in row}) for row in self.timeline.actions]

    @property
    def peaks(self) -> list[int] | None:
        """Per stage, the most bytes at a time."""
        return None if self.memory is None else [peak_of(course) for course in self.memory]


@dataclass(frozen=True)
class Simulation:
    """One step of a whole plan.

    pipelines: each for itself; all end together.
    step_seconds: from the first forward to the last rank's update.
    bubble_fraction: share of all ranks' time in which they neither compute nor update, 0 .. 1.
    exchange_seconds: for the gradients between pipelines; 0 where there is one.
    update_seconds: the slowest rank's update; None where the profile does not know.
    samples: of one step; None where the microbatch size is not known.
    schedule, recompute, num_microbatches: what was played, microbatches over all pipelines.
    notes: sentences on what could not be counted.
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
        """None where the microbatch size is not known or the step takes no time."""
        return self.samples / self.step_seconds if self.samples and self.step_seconds > 0 else None

    @property
    def peak_bytes(self) -> int | None:
        """The most that one stage holds at a time."""
        peaks = [peak for one in self.pipelines for peak in one.peaks or []]
        return max(peaks) if peaks else None

    def to_json(self) -> dict[str, Any]:
        """For programs; courses of memory as [seconds, bytes]."""
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
                    "ranks": one.ranks,
                    "stages_of_rank": one.stage_of_row,
                    "busy_seconds": one.timeline.busy_seconds,
                    "max_in_flight": one.timeline.max_in_flight,
                    "max_live_graphs": one.timeline.max_live_graphs,
                    "stage_peak_bytes": one.peaks,
                    "memory": None if one.memory is None else [[list(point) for point in row] for row in one.memory],
                }
                for one in self.pipelines
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
    stage_inputs: str = "host",
    link: Link | None = None,
    speeds: Sequence[float] | None = None,
) -> Simulation:
    """Plays one step of `plan` with the profile's seconds and bytes.

    Args:
        schedule, num_microbatches (of one pipeline): override the plan's; without either `varuna` and
            `DEFAULT_MICROBATCHES_PER_STAGE` per stage, which the notes say.
        recompute: default: as the profile's conditions say, else True.
        stage_inputs: where inputs kept for recomputation wait, "host" or "device".
        link: between any two ranks; default: transfers take no time.
        speeds: as in `schedules.simulate`, for one pipeline's ranks.

    Raises CapslogError where profile and plan do not belong together, the profile has no seconds, or the schedule is
    impossible.
    """
    if profile.num_layers != plan.num_layers:
        raise CapslogError(
            f"the profile has {profile.num_layers} layers, the plan {plan.num_layers}; give the profile that the plan "
            "was made for"
        )
    link = link or Link()
    notes = _conditions(profile, plan)
    name = schedule or plan.schedule or "varuna"
    if recompute is None:
        recompute = RunShape.of_conditions(profile.conditions).recompute
    run = RunShape(None, name, recompute, stage_inputs)
    recompute = run.recomputes
    counts = _microbatches(plan, num_microbatches, notes)

    steps = []
    for pipeline, count in enumerate(counts):
        stages = plan.stages(pipeline)
        ranks = plan.placement(pipeline)
        rows = sorted(set(ranks))
        local = [rows.index(rank) for rank in ranks]
        actions = _schedule(plan, name, len(stages), count, local, recompute, schedule is None)
        seconds = stage_seconds(profile, stages, recompute)
        crossing = _crossing_bytes(profile, stages, link, notes)
        timeline = simulate(
            actions,
            dataclasses.replace(
                seconds,
                transfer=[link.seconds(size) for size in crossing],
                handover=[link.handover_seconds(size) for size in crossing],
            ),
            speeds,
        )
        steps.append((rows, actions, timeline, seconds, stages))

    exchange = _exchange_seconds(profile, [stages for *_, stages in steps], link, notes)
    together = max(timeline.step_seconds for _, _, timeline, _, _ in steps) + exchange
    update = None
    if all("U" in seconds.other for _, _, _, seconds, _ in steps):
        update = max(_slowest_rank(timeline, seconds.other["U"]) for _, _, timeline, seconds, _ in steps)
    else:
        notes.append(f"the profile's conditions have no {UPDATE_RATE}: the optimizer's time is not counted")
    step_seconds = together + (update or 0.0)
    pipelines: list[PipelineStep] = []
    for rows, actions, timeline, seconds, stages in steps:
        whole = _with_updates(timeline, seconds.other.get("U", ()), together, step_seconds)
        parts = stage_memory(profile, stages, dataclasses.replace(run, num_microbatches=counts[len(pipelines)]))
        if isinstance(parts, str):
            notes.append(f"memory over time is unknown: {parts}")
        memory = None if isinstance(parts, str) else memory_courses(whole.actions, actions, parts)
        pipelines.append(PipelineStep(rows, whole, memory))
    width = sum(len(one.ranks) for one in pipelines)
    busy = sum(sum(one.timeline.busy_seconds) for one in pipelines)
    size = plan.microbatch_size or profile.conditions.get("microbatch_size")
    return Simulation(
        pipelines=pipelines,
        step_seconds=step_seconds,
        bubble_fraction=1.0 - busy / (width * step_seconds) if step_seconds > 0 else 0.0,
        exchange_seconds=exchange,
        update_seconds=update,
        samples=sum(counts) * size if isinstance(size, int) else None,
        schedule=name,
        recompute=recompute,
        num_microbatches=sum(counts),
        link=link,
        notes=list(dict.fromkeys(notes)),
    )


def stage_seconds(profile: Profile, stages: Sequence[tuple[int, int]], recompute: bool = True) -> StageSeconds:
    """What stages of layers (first, end) take, as sums over their layers; U where the profile knows it.

    A forward that keeps no graph takes as long as one that does, except on the last stage: no stage reads what it
    makes there before the recomputation makes it again, so the engine leaves it out.

    Raises CapslogError naming the layer whose seconds the profile does not have.
    """
    forward, backward = profile.column("forward_seconds"), profile.column("backward_seconds")
    whole = [sum(forward[first:end]) for first, end in stages]
    rate = profile.conditions.get(UPDATE_RATE)
    weights = [layer.parameter_bytes for layer in profile.layers]
    other = {}
    if isinstance(rate, (int, float)) and None not in weights:
        other["U"] = [float(rate) * sum(part or 0 for part in weights[first:end]) for first, end in stages]
    bare = list(whole)
    if recompute and stages[-1][1] == profile.num_layers:
        bare[-1] = 0.0
    back = [sum(backward[first:end]) for first, end in stages]
    return StageSeconds(whole, back, bare_forward=bare, other=other)


def _conditions(profile: Profile, plan: Plan) -> list[str]:
    """What makes the profile's numbers those of another run."""
    notes = []
    if plan.profile_digest is not None and plan.profile_digest != profile.digest:
        notes.append("the plan was made for another profile than this one")
    profiled = profile.conditions.get("microbatch_size")
    if None not in (profiled, plan.microbatch_size) and profiled != plan.microbatch_size:
        notes.append(
            f"the profile holds for microbatches of {profiled} samples, the plan has {plan.microbatch_size}: seconds "
            "and bytes are those of the profile"
        )
    return notes


def _microbatches(plan: Plan, given: int | None, notes: list[str]) -> list[int]:
    """Microbatches of each pipeline."""
    if given is not None and given < 1:
        raise CapslogError(f"{given} microbatches; a step has at least one")
    if given is None and plan.microbatches_of_pipeline is not None:
        return [len(group) for group in plan.microbatches_of_pipeline]
    count = given or plan.num_microbatches
    if count is None:
        count = DEFAULT_MICROBATCHES_PER_STAGE * len(plan.cuts)
        notes.append(f"the plan has no num_microbatches: {count} per pipeline are assumed")
    elif given is None and plan.num_pipelines > 1:
        if count % plan.num_pipelines:
            raise CapslogError(
                f"{count} microbatches do not divide among {plan.num_pipelines} pipelines; give "
                "microbatches_of_pipeline in the plan"
            )
        count //= plan.num_pipelines
    return [count] * plan.num_pipelines


def _schedule(
    plan: Plan, name: str, stages: int, microbatches: int, placement: list[int], recompute: bool, own: bool
) -> Schedule:
    """The actions of one pipeline: the plan's own (less U) where it has some and no other schedule was asked for."""
    if plan.actions is None or not own or plan.num_pipelines > 1:
        return make_schedule(name, stages, microbatches, placement, recompute)
    actions = from_strings(plan.actions)
    found = {action.microbatch for row in actions for action in row if action.microbatch is not None}
    validate(actions, stages, len(found), recompute=any(action.kind == "R" for row in actions for action in row))
    return [[action for action in row if action.kind != "U"] for row in actions]


def _crossing_bytes(profile: Profile, stages: Sequence[tuple[int, int]], link: Link, notes: list[str]) -> list[int]:
    """Bytes across the cut before stages 1 .. S-1; a gradient is taken to be as large as its activation."""
    sizes = [profile.layers[first - 1].boundary_bytes for first, _ in stages[1:]]
    if None in sizes and link != Link(latency_seconds=link.latency_seconds):
        notes.append("the profile has no boundary_bytes: transfers take the latency only")
    return [size or 0 for size in sizes]


def _exchange_seconds(
    profile: Profile, pipelines: Sequence[Sequence[tuple[int, int]]], link: Link, notes: list[str]
) -> float:
    """The slowest stage's time to send its gradients to the same layers of every other pipeline."""
    others = len(pipelines) - 1
    if others == 0:
        return 0.0
    if any(layer.parameter_bytes is None for layer in profile.layers):
        notes.append("the profile has no parameter_bytes: the exchange of gradients between pipelines is not counted")
        return 0.0
    stages = [stage for stages in pipelines for stage in stages]
    weights = [sum(layer.parameter_bytes or 0 for layer in profile.layers[first:end]) for first, end in stages]
    return others * link.seconds(max(weights))


def _slowest_rank(timeline: Timeline, update: Sequence[float]) -> float:
    return max(sum(update[stage] for stage in {one.action.stage for one in row}) for row in timeline.actions)


def _with_updates(timeline: Timeline, update: Sequence[float], begin_seconds: float, step_seconds: float) -> Timeline:
    """The timeline with each rank's updates behind it, where there are any: no rank updates before all have voted."""
    rows = [list(row) for row in timeline.actions]
    for rank, row in enumerate(rows if update else []):
        clock = begin_seconds
        for stage in sorted({one.action.stage for one in row}):
            row.append(TimedAction(rank, Action(stage, "U"), clock, clock + update[stage]))
            clock += update[stage]
    return dataclasses.replace(timeline, actions=rows, step_seconds=step_seconds)
