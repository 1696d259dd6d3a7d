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
    "with_step_seconds",
]

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.course import Course, StageMemory, memory_courses, peak_of, stage_memory
from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.ranks import fold_plan
from varuna_capslog.plans.parts import PlanStage, Units, scheduled, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    DEFAULT_RUN,
    Action,
    RunShape,
    StageGraph,
    StageSeconds,
    TimedAction,
    Timeline,
    from_strings,
    simulate,
)


@dataclass(frozen=True)
class PipelineStep:
    """The course of one step on one pipeline.

    ranks: the rank of the run behind each row of the timeline.
    timeline: as `schedules.simulate` gives it, and the updates (U) that follow the exchange of gradients.
    memory: per stage, (seconds, bytes from then on); None where the profile does not know enough.
    rank_bytes: per row, the most bytes of its rank (`memory/fold`); None where the profile has not the runs for it.
    """

    ranks: list[int]
    timeline: Timeline
    memory: list[Course] | None
    rank_bytes: list[int] | None = None

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
                    "rank_peak_bytes": one.rank_bytes,
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
    run: RunShape = DEFAULT_RUN,
    link: Link | None = None,
    speeds: Sequence[float] | None = None,
) -> Simulation:
    """Plays one step of `plan` with the profile's seconds and bytes.

    Args:
        schedule, num_microbatches (of one pipeline): override the plan's; without either `varuna` and
            `DEFAULT_MICROBATCHES_PER_STAGE` per stage, which the notes say.
        recompute: for stages whose memory the plan leaves open; default: as the profile's conditions say, else True.
        run: its stage_inputs and k are read.
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
    if profile.tensors:  # without them the profile does not know which layers read which
        plan.check_graph(profile.edges)
    link = link or Link()
    notes = _conditions(profile, plan)
    name = schedule or plan.schedule or "varuna"
    if (said := plan.recomputes) is not None:
        recompute = said
    elif recompute is None:
        recompute = RunShape.of_conditions(profile.conditions).recompute
    run = dataclasses.replace(run.unsized(), schedule=name, recompute=recompute)
    ranges = plan.ranges()
    own = plan.actions if schedule is None and num_microbatches is None else None
    given = None if own is None else from_strings(own)
    filled = with_memory(plan.stages, run, given)

    steps = []
    for part in _parts(plan, num_microbatches, given is not None, notes):
        chosen = [filled[number] for number in part.stages]
        if given is None:
            actions = scheduled(name, chosen, part.graph, run)
        else:
            actions = [[action for action in row if action.kind != "U"] for row in given]
        seconds = stage_seconds(profile, chosen, run)
        crossing = _crossing_bytes(profile, [ranges[number] for number in part.stages], link, notes)
        timeline = simulate(
            actions,
            dataclasses.replace(
                seconds,
                transfer=[link.seconds(size) for size in crossing],
                handover=[link.handover_seconds(size) for size in crossing],
            ),
            speeds,
            graph=part.graph,
        )
        steps.append((part, actions, timeline, seconds, chosen))

    exchange = _exchange_seconds(profile, ranges, link, notes)
    together = max(timeline.step_seconds for _, _, timeline, _, _ in steps) + exchange
    update = None
    if all("U" in seconds.other for _, _, _, seconds, _ in steps):
        update = max(_slowest_rank(timeline, seconds.other["U"]) for _, _, timeline, seconds, _ in steps)
    else:
        notes.append(f"the profile's conditions have no {UPDATE_RATE}: the optimizer's time is not counted")
    step_seconds = together + (update or 0.0)
    pipelines: list[PipelineStep] = []
    total = sum(len(part.graph.routes) for part, *_ in steps)
    of_rank = _rank_bytes(profile, plan, run, given is None, total)
    for part, actions, timeline, seconds, chosen in steps:
        whole = _with_updates(timeline, seconds.other.get("U", ()), together, step_seconds)
        count = max(len(row) for row in part.graph.microbatches)
        parts = _course_parts(profile, chosen, dataclasses.replace(run, num_microbatches=count), notes)
        memory = None if parts is None else memory_courses(whole.actions, actions, parts)
        found = None if of_rank is None else [of_rank[rank] for rank in part.ranks]
        pipelines.append(PipelineStep(part.ranks, whole, memory, found))
    width = sum(len(one.ranks) for one in pipelines)
    busy = sum(sum(one.timeline.busy_seconds) for one in pipelines)
    size = plan.microbatch_size or profile.conditions.get("microbatch_size")
    return Simulation(
        pipelines=pipelines,
        step_seconds=step_seconds,
        bubble_fraction=1.0 - busy / (width * step_seconds) if step_seconds > 0 else 0.0,
        exchange_seconds=exchange,
        update_seconds=update,
        samples=None if size is None else total * size,
        schedule=name,
        recompute=any(stage.recomputes(run) for stage in filled),
        num_microbatches=total,
        link=link,
        notes=list(dict.fromkeys(notes)),
    )


def with_step_seconds(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> Plan:
    """The plan with the seconds of its simulated step; as it is where its microbatches or the profile's seconds are not
    known. A plan of the short form counts one pipeline, without the exchange between replicas.
    """
    if plan.num_microbatches is None or any(
        None in (one.forward_seconds, one.backward_seconds) for one in profile.layers
    ):
        return plan
    step = simulate_plan(profile, plan, recompute=run.recompute, run=run, link=link)
    return dataclasses.replace(plan, step_seconds=step.step_seconds)


def stage_seconds(profile: Profile, stages: Sequence[PlanStage], run: RunShape = DEFAULT_RUN) -> StageSeconds:
    """What stages of one range of layers take, as sums over their layers; U where the profile knows it.

    A forward that keeps no graph takes as long as one that does, except at the end of the chain: nothing reads what the
    last layers make before the recomputation makes it again, so the engine leaves them out. The copies of O and L run
    beside the computation and take no time here.

    Raises CapslogError naming the layer whose seconds the profile does not have.
    """
    forward, backward = profile.column("forward_seconds"), profile.column("backward_seconds")
    whole = [sum(forward[stage.first : stage.end]) for stage in stages]
    back = [sum(backward[stage.first : stage.end]) for stage in stages]
    rate = profile.conditions.get(UPDATE_RATE)
    weights = [layer.parameter_bytes for layer in profile.layers]
    other = {}
    if isinstance(rate, (int, float)) and None not in weights:
        other["U"] = [float(rate) * sum(part or 0 for part in weights[stage.first : stage.end]) for stage in stages]
    if any(stage.offloads for stage in stages):
        other |= dict.fromkeys("OL", [0.0] * len(stages))
    inputs = [sum(layer.input_part for layer in profile.layers[stage.first : stage.end]) for stage in stages]
    other |= {"I": inputs, "W": [took - half for took, half in zip(back, inputs, strict=True)]}
    again = [_again(stage, run) for stage in stages]
    seconds = [[sum(forward[first:end]) for first, end in intervals] for intervals in again]
    at_the_end = [bool(intervals) and intervals[-1][1] == profile.num_layers for intervals in again]
    return StageSeconds(
        whole,
        back,
        recompute=[row[-1] if row else 0.0 for row in seconds],
        bare_forward=[
            took - row[-1] if left_out else took for took, row, left_out in zip(whole, seconds, at_the_end, strict=True)
        ],
        backward_again=[took + sum(row[:-1]) for took, row in zip(back, seconds, strict=True)],
        other=other,
    )


def _again(stage: PlanStage, run: RunShape) -> list[tuple[int, int]]:
    """The layers (first, end) of each part of a stage that runs again before its backward."""
    if stage.memory is None:
        return [(stage.first, stage.end)] if run.recomputes else []
    return [(one.first, one.end) for one in stage.memory if one.recomputes]


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


@dataclass(frozen=True)
class _PlanPart:
    """Stages that share no rank and no microbatch with the plan's other stages.

    stages: their numbers in the plan; ranks: theirs, rising; graph: both counted from 0, in this order.
    """

    stages: list[int]
    ranks: list[int]
    graph: StageGraph


def _parts(plan: Plan, given: int | None, whole: bool, notes: list[str]) -> list[_PlanPart]:
    """The pipelines of a plan, each for itself.

    given: microbatches of each pipeline, whatever the plan says.
    whole: the plan's action lists are played, which are counted over all stages and ranks.
    """
    paths, placement = _microbatch_paths(plan, given, notes), plan.placement()
    if whole:
        return [
            _PlanPart(list(range(len(placement))), list(range(max(placement) + 1)), StageGraph(tuple(placement), paths))
        ]
    groups: list[set[tuple[int, ...]]] = []
    for path in dict.fromkeys(paths):
        used = {placement[stage] for stage in path}
        touching = [group for group in groups if used & {placement[stage] for one in group for stage in one}]
        groups = [group for group in groups if group not in touching] + [{path}.union(*touching)]
    parts = []
    for group in sorted(groups, key=lambda group: paths.index(min(group, key=paths.index))):
        stages = sorted({stage for path in group for stage in path}, key=lambda stage: plan.stages[stage].layers[0])
        ranks = sorted({placement[stage] for stage in stages})
        routes = tuple(tuple(stages.index(stage) for stage in path) for path in paths if path in group)
        parts.append(_PlanPart(stages, ranks, StageGraph(tuple(ranks.index(placement[one]) for one in stages), routes)))
    return parts


def _microbatch_paths(plan: Plan, given: int | None, notes: list[str]) -> tuple[tuple[int, ...], ...]:
    """The stages of every microbatch of the step, in the microbatches' order."""
    if given is not None and given < 1:
        raise CapslogError(f"{given} microbatches; a step has at least one")
    if given is None and plan.num_microbatches is not None:
        return plan.stage_graph().routes
    paths = plan.paths()
    if given is None:
        given = DEFAULT_MICROBATCHES_PER_STAGE * max(map(len, paths))
        notes.append(f"the plan has no num_microbatches: {given} per pipeline are assumed")
    return tuple(paths) * given


def _course_parts(
    profile: Profile, stages: Sequence[PlanStage], run: RunShape, notes: list[str]
) -> list[StageMemory] | None:
    """What `memory.course` needs of stages that are all kept or all recomputed; else None, and a note."""
    whole = all(stage.whole and (stage.memory is None or stage.recomputes(run) == run.recomputes) for stage in stages)
    found: list[StageMemory] | str = "stages are kept, recomputed or offloaded in parts"
    if whole:
        found = stage_memory(profile, [(stage.first, stage.end) for stage in stages], run)
    if isinstance(found, str):
        notes.append(f"memory over time is unknown: {found}")
        return None
    return found


def _rank_bytes(profile: Profile, plan: Plan, run: RunShape, named: bool, count: int) -> list[int] | None:
    """The most bytes of every rank in the step that is played; None where they cannot be folded.

    named: the schedule's name is played, not the plan's own actions.
    count: microbatches of all pipelines.
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
        return [one.peak_bytes for one in fold_plan(profile, played, run)]
    except CapslogError:
        return None


def _crossing_bytes(profile: Profile, stages: Sequence[tuple[int, int]], link: Link, notes: list[str]) -> list[int]:
    """Bytes across the cut before each stage, 0 for the first; a gradient is taken to be as large as its activation."""
    sizes = [profile.layers[first - 1].boundary_bytes if first else 0 for first, _ in stages]
    if None in sizes and link != Link(latency_seconds=link.latency_seconds):
        notes.append("the profile has no boundary_bytes: transfers take the latency only")
    return [size or 0 for size in sizes]


def _exchange_seconds(profile: Profile, stages: Sequence[tuple[int, int]], link: Link, notes: list[str]) -> float:
    """The slowest stage's time to send its gradients to all other stages that hold some of its layers."""
    holders = [sum(1 for first, end in stages if first <= layer < end) for layer in range(profile.num_layers)]
    if max(holders) == 1:
        return 0.0
    if any(layer.parameter_bytes is None for layer in profile.layers):
        notes.append("the profile has no parameter_bytes: the exchange of gradients between pipelines is not counted")
        return 0.0
    found = []
    for first, end in stages:
        others = [count - 1 for count in holders[first:end]]
        weights = [layer.parameter_bytes or 0 for layer in profile.layers[first:end]]
        size = sum(count * weight for count, weight in zip(others, weights, strict=True))
        if max(others):
            found.append(link.seconds(size) + (max(others) - 1) * link.latency_seconds)
    return max(found)


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
