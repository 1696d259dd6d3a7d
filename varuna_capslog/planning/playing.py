"""One step of a plan, played with the profile's seconds: no bytes are looked at, which `simulation` adds.

A search plays many plans and asks for nothing but the step.
"""

from __future__ import annotations

__all__ = ["SAME", "Played", "even_share_seconds", "play", "with_step_seconds"]

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.stage_seconds import (
    copy_seconds,
    gradient_edges,
    message_bytes,
    moment_seconds,
    stage_seconds,
)
from varuna_capslog.plans.parts import PlanStage, Units, scheduled, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import check_actions, check_runnable
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    Edge,
    RunShape,
    Schedule,
    SimulatedStep,
    StageGraph,
    StageSeconds,
    from_strings,
    simulated,
)

SAME = 1e-9
"""Steps whose relative difference is larger count as different."""


@dataclass(frozen=True)
class PlanPart:
    """Stages that share no rank and no microbatch with the plan's other stages.

    stages: their numbers in the plan; ranks: theirs, rising; graph: both counted from 0, in this order.
    """

    stages: list[int]
    ranks: list[int]
    graph: StageGraph


@dataclass(frozen=True)
class Played:
    """Played step of a plan.

    steps: of each part of the plan that has ranks and microbatches of its own: the part, its actions, when they run,
        the seconds that they take, and its stages. together: when all have done their last action and the exchange.
    named: the schedule's name was played, not the plan's own actions.
    """

    steps: list[tuple[PlanPart, Schedule, SimulatedStep, StageSeconds, list[PlanStage]]]
    exchange: float
    update: float | None
    together: float
    run: RunShape
    filled: list[PlanStage]
    named: bool
    notes: list[str]

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step, updates included."""
        return self.together + (self.update or 0.0)

    @property
    def busy_seconds(self) -> dict[int, float]:
        """Rank -> seconds of its forwards, recomputations and backwards; copies and updates are left out."""
        return {
            rank: sum(timed.end_seconds - timed.start_seconds for timed in row if timed.action.kind in "FRBIW")
            for part, _, step, *_ in self.steps
            for rank, row in zip(part.ranks, step.timeline.actions, strict=True)
        }


def play(
    profile: Profile,
    plan: Plan,
    schedule: str | None,
    num_microbatches: int | None,
    recompute: bool | None,
    run: RunShape,
    link: Link,
    speeds: Sequence[float] | None = None,
) -> Played:
    """Play one step. The arguments are those of `simulate_plan`; no bytes are looked at."""
    if profile.num_layers != plan.num_layers:
        raise CapslogError(
            f"the profile has {profile.num_layers} layers, the plan {plan.num_layers}; give the profile that the plan "
            "was made for"
        )
    if profile.tensors:  # without tensors the profile does not know which layer reads from which
        plan.check_graph(profile.edges)
    notes = _conditions(profile, plan)
    if any(stage.grain > 1 for stage in plan.stages):
        notes.append("calls of several microbatches are taken to last as long as these one after the other")
    name = schedule or plan.schedule or "varuna"
    if (recomputes := plan.recomputes) is not None:
        recompute = recomputes
    elif recompute is None:
        recompute = RunShape.of_conditions(profile.conditions).recompute
    run = dataclasses.replace(run.unsized(), schedule=name, recompute=recompute)
    action_texts = plan.actions if schedule is None and num_microbatches is None else None
    own_actions = None if action_texts is None else from_strings(action_texts)
    filled = with_memory(plan.stages, run, own_actions)
    beside = link.copies_beside
    if beside is None:  # on a CPU a copy takes its rank's core
        beside = not str(profile.conditions.get("device", "cpu")).startswith("cpu")

    steps, tells_updates = [], True
    for part in _parts(profile, plan, num_microbatches, own_actions is not None, notes):
        chosen = [filled[number] for number in part.stages]
        if own_actions is None:
            actions = scheduled(name, chosen, part.graph, run)
        else:
            actions = [[action for action in row if action.kind != "U"] for row in own_actions]
        seconds = stage_seconds(profile, chosen, run)
        if (own_speeds := [plan.speed_of(stage.ranks[0]) for stage in chosen]) != [1.0] * len(chosen):
            seconds = seconds.at_speeds(own_speeds)
        tells_updates &= "U" in seconds.other
        if any(waited := moment_seconds(profile, chosen, link.host_bandwidth)):
            updates = seconds.other.get("U", [0.0] * len(chosen))
            updates = [took + more for took, more in zip(updates, waited, strict=True)]
            seconds = dataclasses.replace(seconds, other={**seconds.other, "U": updates})
        copies = copy_seconds(profile, chosen, plan.routes, link.host_bandwidth)
        crossing = _known_bytes(message_bytes(profile, chosen, part.graph, plan.routes), link, notes)
        step = simulated(
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
        steps.append((part, actions, step, seconds, chosen))

    exchange = _exchange_seconds(profile, plan.stages, link, notes)
    together = max(step.step_seconds for _, _, step, _, _ in steps) + exchange
    rows = [(part.graph.ranks, seconds.other["U"]) for part, _, _, seconds, _ in steps if "U" in seconds.other]
    update = max(_slowest_rank(*row) for row in rows) if rows else None
    if not tells_updates:
        notes.append(f"the profile's conditions have no {UPDATE_RATE}: the optimizer's time is not counted")
    return Played(steps, exchange, update, together, run, filled, own_actions is None, notes)


def with_step_seconds(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> Plan:
    """The plan with the seconds of its simulated step; as it is where its microbatches, the profile's seconds or, for
    direct routes, its tensors are not known. A plan of the short form counts one pipeline, without the exchange between
    replicas.
    """
    if plan.num_microbatches is None or not profile.timed or (plan.routes == "direct" and not profile.tensors):
        return plan
    step = play(profile, plan, None, None, run.recompute, run, link or Link())
    return dataclasses.replace(plan, step_seconds=step.step_seconds)


def even_share_seconds(profile: Profile, microbatches: int, devices: int) -> float:
    """The work of a step, shared out evenly: no plan of any stages on so many devices has a shorter step.

    Raises CapslogError naming the first layer whose seconds the profile lacks.
    """
    work = sum(profile.column("forward_seconds")) + sum(profile.column("backward_seconds"))
    return float(work) * microbatches / devices


def _conditions(profile: Profile, plan: Plan) -> list[str]:
    """Notes on conditions under which the profile's numbers are those of another run."""
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


def _parts(profile: Profile, plan: Plan, microbatches: int | None, own_lists: bool, notes: list[str]) -> list[PlanPart]:
    """The pipelines of a plan, each for itself.

    microbatches: of each pipeline, whatever the plan says; None: the plan's.
    own_lists: the plan's action lists are played, which are counted over all stages and ranks.
    """
    graph = _graph(profile, plan, microbatches, notes)
    if own_lists:
        assert plan.actions is not None
        if plan.routes == "direct":  # the plan alone does not tell which stage waits for which
            check_actions(plan.actions, graph, plan.stages)
        return [PlanPart(list(range(len(graph.ranks))), list(range(graph.num_ranks)), graph)]
    groups: list[set[tuple[int, ...]]] = []
    for path in dict.fromkeys(graph.routes):
        used = {graph.ranks[stage] for stage in path}
        touching = [group for group in groups if used & {graph.ranks[stage] for path in group for stage in path}]
        groups = [group for group in groups if group not in touching] + [{path}.union(*touching)]
    parts = []
    for group in sorted(groups, key=lambda group: graph.routes.index(min(group, key=graph.routes.index))):
        stages = sorted({stage for path in group for stage in path}, key=lambda stage: plan.stages[stage].layers[0])
        ranks = sorted({graph.ranks[stage] for stage in stages})
        place = {stage: number for number, stage in enumerate(stages)}
        pairs = None
        if graph.pairs is not None:
            pairs = frozenset(
                (place[stage], place[following])
                for stage, following in graph.pairs
                if stage in place and following in place
            )
        routes = tuple(tuple(place[stage] for stage in path) for path in graph.routes if path in group)
        grains = tuple(graph.grains[stage] for stage in stages)
        subgraph = StageGraph(tuple(ranks.index(graph.ranks[stage]) for stage in stages), routes, pairs, grains)
        parts.append(PlanPart(stages, ranks, subgraph))
    return parts


def _graph(profile: Profile, plan: Plan, microbatches: int | None, notes: list[str]) -> StageGraph:
    """Return all stages, and the route of every microbatch of the step through them."""
    if microbatches is not None and microbatches < 1:
        raise CapslogError(f"{microbatches} microbatches; a step has at least one")
    edges = profile.known_edges
    if microbatches is None and plan.num_microbatches is not None:
        return plan.stage_graph(edges)
    check_runnable(plan.stages)
    paths = plan.paths()
    if microbatches is None:
        microbatches = DEFAULT_MICROBATCHES_PER_STAGE * max(map(len, paths))
        notes.append(f"the plan has no num_microbatches: {microbatches} per pipeline are assumed")
    blocks = sum(map(len, paths.values()))
    stages = tuple(dataclasses.replace(stage, grain=1) for stage in plan.stages)
    one_each = dataclasses.replace(plan, stages=stages, units=Units(blocks, plan.units.samples, blocks), actions=None)
    graph, grains = one_each.stage_graph(edges), tuple(stage.grain for stage in plan.stages)
    return dataclasses.replace(graph, routes=tuple(dict.fromkeys(graph.routes)) * microbatches, grains=grains)


def _known_bytes(sizes: Mapping[Edge, int | None], link: Link, notes: list[str]) -> dict[Edge, int]:
    """Bytes of every message; 0, and a note where it matters, where the profile does not know them."""
    if None in sizes.values() and (link.bandwidth, link.copy_bandwidth) != (None, None):
        notes.append("the profile has no boundary_bytes: transfers take the latency only")
    return {way: size or 0 for way, size in sizes.items()}


def _exchange_seconds(profile: Profile, stages: Sequence[PlanStage], link: Link, notes: list[str]) -> float:
    """The slowest stage's time to send its gradients to all other stages that hold some of its layers, as if each of n
    got all of them once (the engine sends (own blocks + 1) / n of that, `engine/holders`); and after the update,
    layer by layer, for values that go to replicas which keep no moments of them.
    """
    holders = Counter(layer for stage in stages for layer in stage.numbers)
    if max(holders.values()) == 1:
        return 0.0
    if any(layer.parameter_bytes is None for layer in profile.layers):
        notes.append("the profile has no parameter_bytes: the exchange of gradients between pipelines is not counted")
        return 0.0
    seconds = []
    for stage in stages:
        others = {layer: holders[layer] - 1 for layer in stage.numbers}
        size = sum(count * (profile.layers[layer].parameter_bytes or 0) for layer, count in others.items())
        if most := max(others.values()):
            seconds.append(link.seconds(size) + (most - 1) * link.latency_seconds)
    taken = Counter(layer for stage in stages for layer in stage.moments_elsewhere)
    sizes = {layer: count * (profile.layers[layer].parameter_bytes or 0) for layer, count in taken.items()}
    values = (sum(link.seconds(sizes[layer]) for layer in stage.numbers if layer in sizes) for stage in stages)
    return max(seconds) + max(values)


def _slowest_rank(ranks: Sequence[int], update: Sequence[float]) -> float:
    """Seconds of the slowest rank's updates. ranks, update: of each stage."""
    return max(
        sum(took for stage_rank, took in zip(ranks, update, strict=True) if stage_rank == rank) for rank in set(ranks)
    )
