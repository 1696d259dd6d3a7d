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
    "with_step_seconds",
]

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.course import Course, StageMemory, fold_course, memory_courses, peak_of, stage_memory
from varuna_capslog.memory.fold import RankFold
from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.ranks import fold_plan
from varuna_capslog.planning.stage_seconds import copy_seconds, gradient_edges, message_bytes, stage_seconds
from varuna_capslog.plans.parts import PlanStage, Units, scheduled, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import check_actions, check_runnable
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    DEFAULT_RUN,
    Action,
    Edge,
    RunShape,
    StageGraph,
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
    stages: the stage of the plan behind each of the timeline's.
    memory: per stage, (seconds, bytes from then on); None where the profile does not know enough.
    folds: per row, the bytes of its rank (`memory/fold`); None where the profile has not the runs for it.
    """

    ranks: list[int]
    timeline: Timeline
    stages: list[int]
    memory: list[Course] | None
    folds: list[RankFold] | None = None

    @property
    def stage_of_row(self) -> list[list[int]]:
        """The stages of each row of the timeline."""
        return [sorted({one.action.stage for one in row}) for row in self.timeline.actions]

    @property
    def peaks(self) -> list[int] | None:
        """Per stage, the most bytes at a time."""
        return None if self.memory is None else [peak_of(course) for course in self.memory]

    @property
    def rank_bytes(self) -> list[int] | None:
        """Per row, the most bytes of its rank; None where they cannot be folded."""
        return None if self.folds is None else [one.peak_bytes for one in self.folds]

    @property
    def rank_memory(self) -> list[Course] | None:
        """Per row, the course of its rank's bytes; None where they cannot be folded."""
        rows = self.timeline.actions
        return None if self.folds is None else [fold_course(*pair) for pair in zip(rows, self.folds, strict=True)]


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
                    "memory": _as_lists(one.memory),
                    "rank_memory": _as_lists(one.rank_memory),
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
        link: between any two ranks, and to the host tiers; default: transfers and copies take no time.
        speeds: as in `schedules.simulate`, for one pipeline's ranks.

    Raises CapslogError where profile and plan do not belong together, the profile has no seconds, or no tensors for a
    plan with routes "direct", or the schedule is impossible.
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
    if any(stage.grain > 1 for stage in plan.stages):
        notes.append("calls of several microbatches are taken to last as long as these one after the other")
    name = schedule or plan.schedule or "varuna"
    if (said := plan.recomputes) is not None:
        recompute = said
    elif recompute is None:
        recompute = RunShape.of_conditions(profile.conditions).recompute
    run = dataclasses.replace(run.unsized(), schedule=name, recompute=recompute)
    own = plan.actions if schedule is None and num_microbatches is None else None
    given = None if own is None else from_strings(own)
    filled = with_memory(plan.stages, run, given)
    beside = link.copies_beside
    if beside is None:  # on a CPU a copy takes its rank's core
        beside = not str(profile.conditions.get("device", "cpu")).startswith("cpu")

    steps = []
    for part in _parts(profile, plan, num_microbatches, given is not None, notes):
        chosen = [filled[number] for number in part.stages]
        if given is None:
            actions = scheduled(name, chosen, part.graph, run)
        else:
            actions = [[action for action in row if action.kind != "U"] for row in given]
        seconds = stage_seconds(profile, chosen, run)
        copies = copy_seconds(profile, chosen, plan.routes, link.host_bandwidth)
        crossing = _known_bytes(message_bytes(profile, chosen, part.graph, plan.routes), link, notes)
        timeline = simulate(
            actions,
            dataclasses.replace(
                seconds,
                transfer={way: link.seconds(size) for way, size in crossing.items()},
                handover={way: link.handover_seconds(size) for way, size in crossing.items()},
                other={**seconds.other, **copies},
            ),
            speeds,
            gradient_edges(crossing, part.graph),
            part.graph,
            link.shared,
            beside,
        )
        steps.append((part, actions, timeline, seconds, chosen))

    exchange = _exchange_seconds(profile, plan.stages, link, notes)
    together = max(timeline.step_seconds for _, _, timeline, _, _ in steps) + exchange
    update = None
    if all("U" in seconds.other for _, _, _, seconds, _ in steps):
        update = max(_slowest_rank(timeline, seconds.other["U"]) for _, _, timeline, seconds, _ in steps)
    else:
        notes.append(f"the profile's conditions have no {UPDATE_RATE}: the optimizer's time is not counted")
    step_seconds = together + (update or 0.0)
    pipelines: list[PipelineStep] = []
    total = sum(len(part.graph.routes) for part, *_ in steps)
    of_rank = _rank_folds(profile, plan, run, given is None, total, notes)
    for part, actions, timeline, seconds, chosen in steps:
        whole = _with_updates(timeline, seconds.other.get("U", ()), together, step_seconds)
        count = max(len(row) for row in part.graph.microbatches)
        parts = None
        if plan.routes == "relay":
            unknown = notes if of_rank is None else []  # the courses of ranks say more
            parts = _course_parts(profile, chosen, dataclasses.replace(run, num_microbatches=count), unknown)
        memory = None if parts is None else memory_courses(whole.actions, actions, parts)
        found = None if of_rank is None else [of_rank[rank] for rank in part.ranks]
        pipelines.append(PipelineStep(part.ranks, whole, part.stages, memory, found))
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
    """The plan with the seconds of its simulated step; as it is where its microbatches, the profile's seconds or, for
    direct routes, its tensors are not known. A plan of the short form counts one pipeline, without the exchange between
    replicas.
    """
    timed = all(None not in (one.forward_seconds, one.backward_seconds) for one in profile.layers)
    if plan.num_microbatches is None or not timed or (plan.routes == "direct" and not profile.tensors):
        return plan
    step = simulate_plan(profile, plan, recompute=run.recompute, run=run, link=link)
    return dataclasses.replace(plan, step_seconds=step.step_seconds)


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


def _parts(profile: Profile, plan: Plan, given: int | None, whole: bool, notes: list[str]) -> list[_PlanPart]:
    """The pipelines of a plan, each for itself.

    given: microbatches of each pipeline, whatever the plan says.
    whole: the plan's action lists are played, which are counted over all stages and ranks.
    """
    graph = _graph(profile, plan, given, notes)
    if whole:
        assert plan.actions is not None
        if plan.routes == "direct":  # the plan alone did not know which stages wait for which
            check_actions(plan.actions, graph, plan.stages)
        return [_PlanPart(list(range(len(graph.ranks))), list(range(graph.num_ranks)), graph)]
    groups: list[set[tuple[int, ...]]] = []
    for path in dict.fromkeys(graph.routes):
        used = {graph.ranks[stage] for stage in path}
        touching = [group for group in groups if used & {graph.ranks[stage] for one in group for stage in one}]
        groups = [group for group in groups if group not in touching] + [{path}.union(*touching)]
    parts = []
    for group in sorted(groups, key=lambda group: graph.routes.index(min(group, key=graph.routes.index))):
        stages = sorted({stage for path in group for stage in path}, key=lambda stage: plan.stages[stage].layers[0])
        ranks = sorted({graph.ranks[stage] for stage in stages})
        place = {stage: number for number, stage in enumerate(stages)}
        pairs = None
        if graph.pairs is not None:
            pairs = frozenset(
                (place[one], place[other]) for one, other in graph.pairs if one in place and other in place
            )
        routes = tuple(tuple(place[stage] for stage in path) for path in graph.routes if path in group)
        grains = tuple(graph.grains[one] for one in stages)
        own = StageGraph(tuple(ranks.index(graph.ranks[one]) for one in stages), routes, pairs, grains)
        parts.append(_PlanPart(stages, ranks, own))
    return parts


def _graph(profile: Profile, plan: Plan, given: int | None, notes: list[str]) -> StageGraph:
    """All stages, and the way of every microbatch of the step through them."""
    if given is not None and given < 1:
        raise CapslogError(f"{given} microbatches; a step has at least one")
    edges = profile.known_edges
    if given is None and plan.num_microbatches is not None:
        return plan.stage_graph(edges)
    check_runnable(plan.stages)
    paths = plan.paths()
    if given is None:
        given = DEFAULT_MICROBATCHES_PER_STAGE * max(map(len, paths))
        notes.append(f"the plan has no num_microbatches: {given} per pipeline are assumed")
    blocks = sum(map(len, paths.values()))
    stages = tuple(dataclasses.replace(stage, grain=1) for stage in plan.stages)
    one_each = dataclasses.replace(plan, stages=stages, units=Units(blocks, plan.units.samples, blocks), actions=None)
    graph, grains = one_each.stage_graph(edges), tuple(stage.grain for stage in plan.stages)
    return dataclasses.replace(graph, routes=tuple(dict.fromkeys(graph.routes)) * given, grains=grains)


def _course_parts(
    profile: Profile, stages: Sequence[PlanStage], run: RunShape, notes: list[str]
) -> list[StageMemory] | None:
    """What `memory.course` needs of stages that are all kept or all recomputed; else None, and a note."""
    whole = all(
        stage.whole
        and len(stage.layers) == stage.grain == 1
        and (stage.memory is None or stage.recomputes(run) == run.recomputes)
        for stage in stages
    )
    found: list[StageMemory] | str = "stages are kept, recomputed or offloaded in parts"
    if whole:
        found = stage_memory(profile, [(stage.first, stage.end) for stage in stages], run)
    if isinstance(found, str):
        notes.append(f"memory over time is unknown: {found}")
        return None
    return found


def _as_lists(courses: list[Course] | None) -> list[list[list[float]]] | None:
    return None if courses is None else [[list(point) for point in row] for row in courses]


def _rank_folds(
    profile: Profile, plan: Plan, run: RunShape, named: bool, count: int, notes: list[str]
) -> list[RankFold] | None:
    """The bytes of every rank in the step that is played; None where they cannot be folded.

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
        return fold_plan(profile, played, run)
    except CapslogError as error:
        if plan.routes == "direct":  # else the stages' own bytes are shown
            notes.append(f"the ranks' bytes are unknown: {error}")
        return None


def _known_bytes(sizes: Mapping[Edge, int | None], link: Link, notes: list[str]) -> dict[Edge, int]:
    """Bytes of every message; 0, and a note where it matters, where the profile does not know them."""
    if None in sizes.values() and (link.bandwidth, link.copy_bandwidth) != (None, None):
        notes.append("the profile has no boundary_bytes: transfers take the latency only")
    return {way: size or 0 for way, size in sizes.items()}


def _exchange_seconds(profile: Profile, stages: Sequence[PlanStage], link: Link, notes: list[str]) -> float:
    """The slowest stage's time to send its gradients to all other stages that hold some of its layers."""
    holders = Counter(layer for stage in stages for layer in stage.numbers)
    if max(holders.values()) == 1:
        return 0.0
    if any(layer.parameter_bytes is None for layer in profile.layers):
        notes.append("the profile has no parameter_bytes: the exchange of gradients between pipelines is not counted")
        return 0.0
    found = []
    for stage in stages:
        others = {layer: holders[layer] - 1 for layer in stage.numbers}
        size = sum(count * (profile.layers[layer].parameter_bytes or 0) for layer, count in others.items())
        if most := max(others.values()):
            found.append(link.seconds(size) + (most - 1) * link.latency_seconds)
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
