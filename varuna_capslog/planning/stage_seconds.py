"""Seconds of the stages of a plan by a profile, bytes of messages between them, and bytes that go to the host tier.

`simulation` plays a step with them; the search, the limits of `1f1b-star` and the report ask for the seconds alone. A
stage is any set of layers, in one piece of the chain or in several.
"""

from __future__ import annotations

__all__ = ["copy_seconds", "gradient_edges", "message_bytes", "moment_bytes", "moment_seconds", "stage_seconds"]

from collections.abc import Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, with_loss
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, Edge, RunShape, StageGraph, StageSeconds


def stage_seconds(profile: Profile, stages: Sequence[PlanStage], run: RunShape = DEFAULT_RUN) -> StageSeconds:
    """Return the seconds of one call of each stage, as sums over its layers; U where the profile knows it. Copies
    (O, L) take no time here. A call of several microbatches takes as long as these one after the other.

    A forward that keeps no graph takes as long as one that does, except at the end of the chain: nothing reads what the
    last layers make before the recomputation makes it again, so the engine leaves them out where they count no running
    statistics.

    Raises CapslogError naming the layer whose seconds the profile does not have.
    """
    forward, backward = profile.column("forward_seconds"), profile.column("backward_seconds")
    forwards = [stage.grain * sum(forward[layer] for layer in stage.numbers) for stage in stages]
    back = [stage.grain * sum(backward[layer] for layer in stage.numbers) for stage in stages]
    rate = profile.conditions.get(UPDATE_RATE)
    weights = [layer.parameter_bytes for layer in profile.layers]
    extra = {}
    if isinstance(rate, (int, float)) and None not in weights:
        extra["U"] = [float(rate) * sum(weights[layer] or 0 for layer in stage.numbers) for stage in stages]
    if any(stage.offloads for stage in stages):
        extra |= dict.fromkeys("OL", [0.0] * len(stages))
    inputs = [stage.grain * sum(profile.layers[layer].input_part for layer in stage.numbers) for stage in stages]
    extra |= {"I": inputs, "W": [took - half for took, half in zip(back, inputs, strict=True)]}
    again = [_again(stage, run) for stage in stages]
    seconds = [
        [stage.grain * sum(forward[first:end]) for first, end in intervals]
        for stage, intervals in zip(stages, again, strict=True)
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


def _last_with_statistics(profile: Profile) -> int:
    """The last layer that is known to count running statistics in its forward; -1: none is."""
    rows = [row for row in profile.observations if row.layers[1] - row.layers[0] == 1]
    return max((row.layers[0] for row in rows if row.action_bytes and row.action_bytes.statistics_bytes), default=-1)


def _again(stage: PlanStage, run: RunShape) -> list[tuple[int, int]]:
    """The layers (first, end) of each part of a stage that runs again before its backward."""
    if stage.memory is None:
        return list(stage.layers) if run.recomputes else []
    return [(interval.first, interval.end) for interval in stage.memory if interval.recomputes]


def message_bytes(
    profile: Profile, stages: Sequence[PlanStage], graph: StageGraph, routes: str
) -> Mapping[Edge, int | None]:
    """(stage that sends, stage that receives) -> bytes of one message, which carries the microbatches of the smaller
    call; a direction in which nothing travels is absent.

    With routes "direct" a value travels once to each stage that reads it, and a gradient comes back for each layer that
    reads it there; the profile must have tensors. With "relay" a message holds what crosses the cut before the later
    stage, and its gradient is taken to be as large. None: the profile does not know.
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
    """The edges over which gradients come back, by `message_bytes`."""
    return [edge for edge in graph.edges if edge[::-1] in sizes]


def copy_seconds(
    profile: Profile, stages: Sequence[PlanStage], routes: str, bandwidth: float | None
) -> dict[str, list[float]]:
    """Return the seconds of O and L of each stage, for the bytes that it offloads of one call.

    An interval "offload" moves what its layers save, one of "recompute+offload" the tensors that it begins with.

    bandwidth: bytes per second; None: copies take no time.

    Raises CapslogError where the profile does not know these bytes.
    """
    if bandwidth is None:
        return dict.fromkeys("OL", [0.0] * len(stages))
    moved = [[interval for interval in stage.memory or () if interval.offloads] for stage in stages]
    sizes = [sum(_moved_bytes(profile, interval, routes) for interval in row) for row in moved]
    seconds = [stage.grain * size / bandwidth for stage, size in zip(stages, sizes, strict=True)]
    return {"O": seconds, "L": seconds}


def moment_seconds(profile: Profile, stages: Sequence[PlanStage], bandwidth: float | None) -> list[float]:
    """The seconds of the copies of moments, to the device and back to the host tier, that an update of each stage
    needs; bandwidth: as of `copy_seconds`.

    Raises CapslogError where the profile does not know these bytes.
    """
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
    """Layer -> bytes of its optimizer moments, as far as the profile tells."""
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
