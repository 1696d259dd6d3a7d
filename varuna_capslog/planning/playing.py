"""Simulates when the actions of one step of a plan run, by the profile's seconds. `simulation` adds the memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import (
    MemoryInterval,
    PlanStage,
    Units,
    recomputed_parts,
    scheduled,
    with_loss,
    with_memory,
)
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import check_actions, check_runnable
from varuna_capslog.profiles.conditions import PART_SECONDS, UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    DEFAULT_RUN,
    Edge,
    RunShape,
    Schedule,
    SimulatedStep,
    StageGraph,
    StageSeconds,
    from_strings,
    simulated,
)

__all__ = [
    "SAME",
    "Played",
    "copy_seconds",
    "even_share_seconds",
    "gradient_edges",
    "message_bytes",
    "moment_bytes",
    "moment_seconds",
    "play",
    "stage_seconds",
    "with_step_seconds",
]


# -- Seconds of a plan's stages, bytes of messages between them, and bytes that go to the host tier.
#
# A stage is any set of layers, in one piece of the chain or in several.


def stage_seconds(profile: Profile, stages: Sequence[PlanStage], run: RunShape = DEFAULT_RUN) -> StageSeconds:
    """Return the seconds of one call of each stage, as sums over its layers; of the update (U) where the profile has
    its rate. Copies (O and L) take no time here. A call of several microbatches takes the seconds of the profile's runs
    of such calls; without such runs, as long as its microbatches one after the other.

    A forward without a graph takes as long as a forward with a graph, except at the end of the chain: nothing reads the
    outputs of the last recomputed layers before the recomputation, so the engine leaves these layers out unless they
    count running statistics. Parts of layers are recomputed inside the backward, or inside its input half. Raises
    CapslogError naming the layer whose seconds the profile lacks.
    """
    calls = [_call_seconds(profile, stage.grain) for stage in stages]
    inside = [stage.grain * sum(_part_seconds(profile, stage)) for stage in stages]
    forwards, back = (
        [sum(call[way][layer] for layer in stage.numbers) for stage, call in zip(stages, calls, strict=True)]
        for way in (0, 1)
    )
    back = [took + more for took, more in zip(back, inside, strict=True)]
    rate = profile.conditions.get(UPDATE_RATE)
    weights = [layer.parameter_bytes for layer in profile.layers]
    extra = {}
    if isinstance(rate, (int, float)) and None not in weights:
        extra["U"] = [float(rate) * sum(weights[layer] or 0 for layer in stage.numbers) for stage in stages]
    if any(stage.offloads for stage in stages):
        extra |= dict.fromkeys("OL", [0.0] * len(stages))
    layers, once = profile.layers, profile.call_seconds[1][1]
    inputs = [
        sum(layers[layer].input_part * (backward[layer] / (once[layer] or 1.0)) for layer in stage.numbers) + more
        for stage, (_, backward), more in zip(stages, calls, inside, strict=True)
    ]
    extra |= {"I": inputs, "W": [took - half for took, half in zip(back, inputs, strict=True)]}
    again = [_again(stage, run) for stage in stages]
    seconds = [
        [sum(forward[first:end]) for first, end in intervals]
        for (forward, _), intervals in zip(calls, again, strict=True)
    ]
    counted = _last_with_statistics(profile)
    at_the_end = [bool(row) and row[-1][1] == profile.num_layers and row[-1][0] > counted for row in again]
    return StageSeconds(
        forwards,
        back,
        recompute=[row[-1] if row else 0.0 for row in seconds],
        bare_forward=[
            took - row[-1] if left_out else took
            for took, row, left_out in zip(forwards, seconds, at_the_end, strict=True)
        ],
        backward_again=[took + sum(row[:-1]) for took, row in zip(back, seconds, strict=True)],
        backward_at_once=[
            took + sum(row[:-1] if intervals and intervals[-1][1] == stage.end else row)
            for took, row, intervals, stage in zip(back, seconds, again, stages, strict=True)
        ],
        other=extra,
    )


def _part_seconds(profile: Profile, stage: PlanStage) -> list[float]:
    """Return the seconds to recompute parts of layers, for each layer of the stage that does so."""
    rows = profile.conditions.get(PART_SECONDS, [])
    known = {(layer, tuple(parts)): seconds for layer, parts, seconds in rows}
    seconds = []
    for key in recomputed_parts(stage):
        if key not in known:
            raise CapslogError(
                f"the profile does not tell how long {' and '.join(key[1])} of layer {key[0]} take to run again; "
                "estimate it for this plan (profile.source=estimated and pipeline.plan)"
            )
        seconds.append(known[key])
    return seconds


def _call_seconds(profile: Profile, grain: int) -> tuple[list[float], list[float]]:
    """Seconds of a forward and of a backward of every layer, in calls of `grain` microbatches."""
    if grain in profile.call_seconds:
        return profile.call_seconds[grain]
    forward, backward = profile.call_seconds[1]
    return [grain * took for took in forward], [grain * took for took in backward]


def _last_with_statistics(profile: Profile) -> int:
    """Last layer that is known to count running statistics in its forward; -1: none."""
    rows = [row for row in profile.observations if row.layers[1] - row.layers[0] == 1]
    return max((row.layers[0] for row in rows if row.action_bytes and row.action_bytes.statistics_bytes), default=-1)


def _again(stage: PlanStage, run: RunShape) -> list[tuple[int, int]]:
    """Ranges (first, end) of a stage's layers that are recomputed before its backward."""
    if stage.memory is None:
        return list(stage.layers) if run.recomputes else []
    return [(interval.first, interval.end) for interval in stage.memory if interval.recomputes]


def message_bytes(
    profile: Profile, stages: Sequence[PlanStage], graph: StageGraph, routes: str
) -> Mapping[Edge, int | None]:
    """Return (sending stage, receiving stage) -> bytes of one message, which carries the microbatches of the smaller
    call; None: not known. A direction in which nothing travels is absent.

    With routes "direct", which need tensors, a value travels once to each stage that reads it, and a gradient comes
    back for each layer that reads it there. With "relay" a message holds what crosses the cut before the later stage,
    and its gradient is taken to be as large.
    """
    if routes == "relay":
        sizes = {edge: profile.layers[stages[edge[1]].first - 1].boundary_bytes for edge in graph.edges}
        rows = {edge: None if size is None else size * _common(stages, edge) for edge, size in sizes.items()}
        return rows | {edge[::-1]: size for edge, size in rows.items()}
    readers = [with_loss(stage.numbers, profile.num_layers) for stage in stages]
    edge_bytes: dict[Edge, int] = {}
    for sender, receiver in graph.edges:
        common = _common(stages, (sender, receiver))
        for tensor in profile.tensors:
            read = len(readers[receiver].intersection(tensor.readers)) if tensor.writer in readers[sender] else 0
            if read:
                edge_bytes[sender, receiver] = edge_bytes.get((sender, receiver), 0) + common * tensor.bytes
            if read and tensor.gradient:
                edge_bytes[receiver, sender] = edge_bytes.get((receiver, sender), 0) + common * read * tensor.bytes
    return edge_bytes


def _common(stages: Sequence[PlanStage], edge: Edge) -> int:
    """Microbatches of a message over the edge."""
    return min(stages[number].grain for number in edge)


def gradient_edges(sizes: Mapping[Edge, int | None], graph: StageGraph) -> list[Edge]:
    """Edges over which gradients come back, by `message_bytes`."""
    return [edge for edge in graph.edges if edge[::-1] in sizes]


def copy_seconds(
    profile: Profile, stages: Sequence[PlanStage], routes: str, bandwidth: float | None
) -> dict[str, list[float]]:
    """Return the seconds of the copies of one call (O and L) of each stage: of the activations that an interval
    "offload" saves, and of the input tensors of an interval "recompute+offload".

    bandwidth: bytes per second; None: copies take no time. Raises CapslogError where the profile lacks these bytes.
    """
    if bandwidth is None:
        return dict.fromkeys("OL", [0.0] * len(stages))
    moved = [[interval for interval in stage.memory or () if interval.offloads] for stage in stages]
    sizes = [sum(_moved_bytes(profile, interval, routes) for interval in row) for row in moved]
    seconds = [stage.grain * size / bandwidth for stage, size in zip(stages, sizes, strict=True)]
    return {"O": seconds, "L": seconds}


def moment_seconds(profile: Profile, stages: Sequence[PlanStage], bandwidth: float | None) -> list[float]:
    """Return the seconds to copy moments to the device and back for each stage's update; else as `copy_seconds`."""
    if bandwidth is None or not any(stage.moments for stage in stages):
        return [0.0] * len(stages)
    sizes, away = moment_bytes(profile), [stage.moments_away for stage in stages]
    for layer in frozenset().union(*away):
        if sizes.get(layer) is None:
            raise CapslogError(
                f"the profile does not say what the optimizer keeps of layer {layer} (moment_bytes), whose moments "
                "wait in the host tier; profile again, or leave out the bandwidth of the copies"
            )
    return [2 * sum(sizes[layer] or 0 for layer in layers) / bandwidth for layers in away]


def moment_bytes(profile: Profile) -> dict[int, int | None]:
    """Return layer -> bytes of its optimizer moments; None where the profile lacks them."""
    rows = (row for row in profile.observations if row.layers[1] - row.layers[0] == 1 and row.action_bytes)
    return {row.layers[0]: row.action_bytes.moment_bytes for row in rows if row.action_bytes}


def _moved_bytes(profile: Profile, interval: MemoryInterval, routes: str) -> int:
    if not interval.recomputes:
        return sum(profile.column("saved_bytes")[interval.first : interval.end])
    if not profile.tensors:
        raise CapslogError(
            f"the profile has no tensors, so that the bytes which the interval {interval.first} to {interval.end - 1} "
            "offloads are not known; profile again, or leave out the bandwidth of the copies"
        )
    inside = with_loss(range(interval.first, interval.end), profile.num_layers)
    return sum(
        tensor.bytes
        for tensor in profile.tensors
        if (-1 if tensor.writer is None else tensor.writer) < interval.first <= tensor.readers[-1]
        and (routes == "relay" or inside.intersection(tensor.readers))
    )


# -- Simulation of one step of a plan.


SAME = 1e-9
"""Steps whose relative difference is larger count as different."""


@dataclass(frozen=True)
class PlanPart:
    """Stages that share no rank and no microbatch with the plan's other stages.

    stages, ranks: numbers in the plan; ranks rise. graph: counts both from 0, in the order of these lists.
    """

    stages: list[int]
    ranks: list[int]
    graph: StageGraph


@dataclass(frozen=True)
class Played:
    """Simulated times of one step of a plan.

    steps: for each part of the plan: the part, its actions, their simulated times, seconds of its stages, the stages.
    exchange, update: seconds. together: seconds until all parts have done their last action and the exchange.
    named: the actions are those of a schedule, not the plan's own.
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
        """Rank -> seconds of its forwards, recomputations and backwards, without copies and updates."""
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
    """Simulate the times of one step; arguments as for `simulate_plan`."""
    if profile.num_layers != plan.num_layers:
        raise CapslogError(
            f"the profile has {profile.num_layers} layers, the plan {plan.num_layers}; give the profile that the plan "
            "was made for"
        )
    if profile.tensors:  # without tensors the profile does not know which layer reads from which
        plan.check_graph(profile.edges)
    notes = _conditions(profile, plan)
    if any(stage.grain not in profile.call_seconds for stage in plan.stages):
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
    """Return the plan with its simulated step; unchanged where the microbatches, the seconds (also of recomputed parts)
    or, for direct routes, the tensors are not known. The short form counts one pipeline, without the exchange between
    replicas.
    """
    parted = any(recomputed_parts(stage) for stage in plan.stages) and PART_SECONDS not in profile.conditions
    unknown = plan.num_microbatches is None or not profile.timed or parted
    if unknown or (plan.routes == "direct" and not profile.tensors):
        return plan
    step = play(profile, plan, None, None, run.recompute, run, link or Link())
    return dataclasses.replace(plan, step_seconds=step.step_seconds)


def even_share_seconds(profile: Profile, microbatches: int, devices: int) -> float:
    """Return the seconds of a step's work, shared evenly among the devices: a lower bound of the step of any plan. Each
    layer takes the grain (microbatches per call) with the fewest seconds per microbatch. Raises CapslogError naming the
    first layer whose seconds the profile lacks.
    """
    calls = profile.call_seconds.items()
    work = sum(
        min((forward[layer] + backward[layer]) / grain for grain, (forward, backward) in calls)
        for layer in range(profile.num_layers)
    )
    return float(work) * microbatches / devices


def _conditions(profile: Profile, plan: Plan) -> list[str]:
    """Notes on differences between the run of the profile and that of the plan."""
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
    """Return the independent parts of a plan, such as its pipelines. microbatches: of each pipeline, overriding the
    plan's. own_lists: the plan is one part, since its action lists count over all stages and ranks.
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
    """Bytes of every message; 0 where the profile lacks them, with a note if the link has a bandwidth."""
    if None in sizes.values() and (link.bandwidth, link.copy_bandwidth) != (None, None):
        notes.append("the profile has no boundary_bytes: transfers take the latency only")
    return {way: size or 0 for way, size in sizes.items()}


def _exchange_seconds(profile: Profile, stages: Sequence[PlanStage], link: Link, notes: list[str]) -> float:
    """Return the slowest stage's seconds to send its gradients to all other holders of its layers, as if each of n
    holders got all gradients once (the engine sends (own blocks + 1) / n of that, `engine/holders`), plus the slowest
    stage's seconds after the update to send values, layer by layer, to replicas that keep no moments of them.
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
