"""Rules for the stages of one plan together; the error for a breach is one sentence.

1. For every block, the stages that serve it hold every layer exactly once, and a rank holds a layer once.
2. Stages are convex in the graph of the layers, and the graph of the stages has no cycle.
3. A grain divides the units of a block, and over an edge between two stages one grain divides the other.
4. Action lists are complete and free of deadlock.
5. Where a plan states that it fits, the bytes that it states for a rank are within the rank's capacity. (The real bytes
   of a rank are computed in `planning/verdict`.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units, with_memory
from varuna_capslog.schedules import DEFAULT_RUN, StageGraph, find_deadlock, from_strings, lower, validate

__all__ = [
    "Path",
    "check_actions",
    "check_capacity",
    "check_cover",
    "check_grains",
    "check_graph",
    "check_ranks",
    "check_routes",
    "check_runnable",
    "check_variants",
    "paths_of",
    "stage_graph",
]

ROUTES = ("relay", "direct")
_MOST_HELD = 100 * fields.MOST_LAYERS
"""Layers of all stages together: a thousand replicas of ten thousand layers."""
Path = tuple[int, ...]
"""Numbers of the stages that serve one block, sorted by their first layer."""


def paths_of(stages: Sequence[PlanStage], blocks: int) -> list[Path]:
    """Return block -> the stages that serve it, ordered by their first layer."""
    ordered = sorted(range(len(stages)), key=lambda number: stages[number].first)
    always = tuple(number for number in ordered if stages[number].blocks is None)
    if len(always) == len(stages):
        return [always] * blocks
    place = {number: position for position, number in enumerate(ordered)}
    serving: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(stages):
        for block in stage.blocks or ():
            serving[block].append(number)
    paths = {block: tuple(sorted([*always, *some], key=place.__getitem__)) for block, some in serving.items()}
    return [paths.get(block, always) for block in range(blocks)]


def check_cover(stages: Sequence[PlanStage], num_layers: int, blocks: int) -> None:
    """Check rule 1."""
    for number, stage in enumerate(stages):
        if stage.end > num_layers:
            raise CapslogError(
                f"stage {number} ({stage.describe()}) holds layer {stage.end - 1}, but the last layer is "
                f"{num_layers - 1}"
            )
        if stage.blocks is not None and stage.blocks[-1] >= blocks:
            raise CapslogError(
                f"stage {number} ({stage.describe()}) serves block {stage.blocks[-1]}, but the last block is "
                f"{blocks - 1}"
            )
    held = sum(end - first for stage in stages for first, end in stage.layers)
    if held > _MOST_HELD:
        raise CapslogError(f"the {len(stages)} stages hold {held} layers together; at most {_MOST_HELD} can be planned")
    served = sum(blocks if stage.blocks is None else len(stage.blocks) for stage in stages)
    if served > fields.MOST_CALLS:
        raise CapslogError(
            f"the {len(stages)} stages serve {served} blocks together; at most {fields.MOST_CALLS} can be scheduled: "
            "take fewer blocks"
        )
    blocks_of_path: dict[Path, int] = {}
    for block, path in enumerate(paths_of(stages, blocks)):
        blocks_of_path.setdefault(path, block)
    for path, block in blocks_of_path.items():
        where = "" if len(blocks_of_path) == 1 else f" for block {block}"
        _check_once(stages, path, num_layers, where)
    on_rank: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(stages):
        for rank in stage.ranks:
            on_rank[rank].append(number)
    for numbers in on_rank.values():
        pieces = sorted((piece, number) for number in numbers for piece in stages[number].layers)
        for (before, prior), (after, later) in pairwise(pieces):
            if after[0] < before[1]:
                raise CapslogError(
                    f"stages {prior} ({stages[prior].describe()}) and {later} ({stages[later].describe()}) hold layer "
                    f"{after[0]} twice on one rank; give the blocks of both to one stage"
                )
    _check_moments(stages)


def _check_moments(stages: Sequence[PlanStage]) -> None:
    """Check that at least one holder of every layer keeps the layer's optimizer moments."""
    if not any(interval.kind == "replica" for stage in stages for interval in stage.moments):
        return
    kept = {layer for stage in stages for layer in frozenset(stage.numbers) - stage.moments_elsewhere}
    for number, stage in enumerate(stages):
        if nowhere := stage.moments_elsewhere - kept:
            raise CapslogError(
                f"stages[{number}].moments leaves those of layer {min(nowhere)} to another replica, but no stage that "
                'holds the layer keeps them; leave "replica" out at one of them'
            )


def _check_once(stages: Sequence[PlanStage], path: Path, num_layers: int, where: str) -> None:
    pieces = sorted((piece, number) for number in path for piece in stages[number].layers)
    reached, last = 0, -1
    for (first, end), number in pieces:
        if first > reached:
            raise CapslogError(f"no stage holds layer {reached}{where}; each layer must be in exactly one stage")
        if first < reached:
            raise CapslogError(
                f"stages {last} ({stages[last].describe()}) and {number} ({stages[number].describe()}) both hold layer "
                f"{first}{where}; each layer must be in exactly one stage"
            )
        reached, last = end, number
    if reached < num_layers:
        raise CapslogError(f"no stage holds layer {reached}{where}; each layer must be in exactly one stage")


def check_graph(stages: Sequence[PlanStage], blocks: int, edges: Iterable[tuple[int, int]]) -> None:
    """Check rule 2. edges: (layer that writes a tensor, layer that reads it), each from a lower to a higher layer."""
    if all(len(stage.layers) == 1 for stage in stages):
        return  # edges lead to higher layers, so no path returns to a stage of one range
    pairs = set(edges)
    after: dict[int, set[int]] = defaultdict(set)
    for writer, reader in pairs:
        after[writer].add(reader)
    for path in dict.fromkeys(paths_of(stages, blocks)):
        stage_of = {layer: number for number in path for layer in stages[number].numbers}
        for number in path:
            layers = stages[number].numbers
            outside = {reader for layer in layers for reader in after[layer] if stage_of[reader] != number}
            reached = set(outside)
            while outside:
                outside = {reader for layer in outside for reader in after[layer]} - reached
                reached |= outside
            back = reached & set(layers)
            if back:
                raise CapslogError(
                    f"stage {number} ({stages[number].describe()}) reaches its layer {min(back)} only through layers "
                    "of other stages; a stage must be convex: give the later layers a stage of "
                    "their own"
                )
        _in_order(stages, path, _links(stages, path, pairs))


def check_grains(stages: Sequence[PlanStage], units: Units, routes: str) -> None:
    """Check rule 3; under direct routes not between stages, whose edges only the chain has (`stage_graph` checks)."""
    if all(stage.grain == 1 for stage in stages):
        return
    for number, stage in enumerate(stages):
        if units.of_block % stage.grain:
            raise CapslogError(
                f"stage {number} ({stage.describe()}) has grain {stage.grain}, which does not divide the "
                f"{units.of_block} units of a block; choose a grain that does"
            )
    if routes == "relay":
        for path in dict.fromkeys(paths_of(stages, units.blocks or 1)):
            _check_neighbours(stages, pairwise(path))


def _check_neighbours(stages: Sequence[PlanStage], edges: Iterable[tuple[int, int]]) -> None:
    for first, second in edges:
        small, large = sorted((stages[first].grain, stages[second].grain))
        if large % small:
            raise CapslogError(
                f"stages {first} ({stages[first].describe()}) and {second} ({stages[second].describe()}) have the "
                f"grains {stages[first].grain} and {stages[second].grain}; of two neighbours one must divide the other"
            )


def stage_graph(
    stages: Sequence[PlanStage],
    units: Units,
    routes: str = "relay",
    edges: Iterable[tuple[int, int]] | None = None,
) -> StageGraph:
    """Return the stages and the path of every unit through them.

    edges: (layer that writes a tensor, layer that reads it), which routes "direct" follow. Raises CapslogError for
    these routes without edges, for splits, where stages wait for each other, and for incompatible grains of neighbours.
    """
    check_runnable(stages)
    check_grains(stages, units, "direct")
    per_block, links = units.of_block, None
    paths = paths_of(stages, units.blocks or 1)
    if routes == "direct":
        if edges is None:
            raise CapslogError(
                "routes is 'direct' in the plan, and it is not known which layers read from which; give a profile with "
                "tensors, as capslog profile writes it"
            )
        ordered = {path: _links(stages, path, edges) for path in dict.fromkeys(paths)}
        links = frozenset(link for links_of_path in ordered.values() for link in links_of_path)
        paths = [_in_order(stages, path, ordered[path]) for path in paths]
    graph = StageGraph.of(
        tuple(stage.rank for stage in stages),
        tuple(path for path in paths for _ in range(per_block)),
        links,
        tuple(stage.grain for stage in stages),
    )
    _check_neighbours(stages, graph.edges)
    return graph


def check_runnable(stages: Sequence[PlanStage]) -> None:
    """Raise CapslogError for a stage on several ranks, which schedules and the engine do not support."""
    for number, stage in enumerate(stages):
        if stage.parallel["kind"] != "none":
            raise CapslogError(
                f"stages[{number}].parallel is {dict(stage.parallel)}; a stage runs on one rank: split its layers "
                "with the config's key splits, whose parts are layers that stages of several ranks may hold"
            )


def _links(stages: Sequence[PlanStage], path: Path, edges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the pairs (writer, reader) of a path's stages: the reader reads a tensor that the writer writes."""
    stage_of = {layer: number for number in path for layer in stages[number].numbers}
    pairs = {(stage_of[writer], stage_of[reader]) for writer, reader in edges}
    return {(first, second) for first, second in pairs if first != second}


def _in_order(stages: Sequence[PlanStage], path: Path, links: set[tuple[int, int]]) -> Path:
    """Return the stages of a path, each after the stages that it reads from, and otherwise by their first layers."""
    waits: dict[int, set[int]] = {number: set() for number in path}
    for source, target in links:
        waits[target].add(source)
    placed: dict[int, None] = {}
    while len(placed) < len(path):
        number = next((number for number in path if number not in placed and waits[number] <= placed.keys()), None)
        if number is None:
            number = next(number for number in path if number not in placed)
            awaited = min(waits[number] - placed.keys())
            raise CapslogError(
                f"stages {number} ({stages[number].describe()}) and {awaited} ({stages[awaited].describe()}) wait for "
                "each other; cut the layers so that the stages can be put in an order"
            )
        placed[number] = None
    return tuple(placed)


def check_variants(variants: Any, num_layers: int) -> None:
    """Check that variants name layers of the chain."""
    if not isinstance(variants, Mapping):
        raise CapslogError("variants must be an object that maps layers to the names of their implementations")
    for layer, name in variants.items():
        if not str(layer).isdigit() or int(layer) >= num_layers:
            raise CapslogError(f"variants names layer {layer!r}; the last layer is {num_layers - 1}")
        fields.text(name, f"variants[{layer!r}]")


def check_routes(stages: Sequence[PlanStage], routes: str) -> None:
    """Check that with routes "relay" every stage is one range of layers."""
    fields.choice(routes, "routes", ROUTES)
    for number, stage in enumerate(stages):
        if routes == "relay" and len(stage.layers) > 1:
            raise CapslogError(
                f"stage {number} ({stage.describe()}) holds several pieces of the chain, which needs routes 'direct'; "
                "routes is 'relay'"
            )


def check_ranks(stages: Sequence[PlanStage], ranks: Sequence[PlanRank]) -> None:
    """Check that `ranks` has the ranks of every stage."""
    for number, stage in enumerate(stages):
        if max(stage.ranks) >= len(ranks):
            raise CapslogError(
                f"stage {number} ({stage.describe()}) runs on rank {max(stage.ranks)}, but ranks has {len(ranks)} "
                "entries; give one per rank"
            )


def check_actions(actions: Sequence[Sequence[str]], graph: StageGraph, stages: Sequence[PlanStage]) -> None:
    """Check rule 4."""
    rows = from_strings(actions)
    recompute = [stage.recomputes(DEFAULT_RUN) for stage in with_memory(stages, DEFAULT_RUN, rows)]
    limits, offload = [stage.in_flight for stage in stages], [stage.offloads for stage in stages]
    validate(rows, graph, recompute, limits, offload)
    if (stuck := find_deadlock(lower(rows, graph=graph))) is not None:
        raise CapslogError(f"actions wait for ever: {stuck}; reorder the lists of these ranks")


def check_capacity(stages: Sequence[PlanStage], ranks: Sequence[PlanRank]) -> None:
    """Check rule 5, with the bytes that the plan states, for a plan that states that it fits."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(stages):
        for rank in stage.ranks:
            numbers[rank].append(number)
    for rank, part in enumerate(ranks):
        size = part.bytes
        if size is None:
            size = sum(stages[number].bytes or 0 for number in numbers[rank])
        if part.capacity_bytes is not None and size > part.capacity_bytes:
            several = f"stage(s) {', '.join(map(str, numbers[rank]))}"
            raise CapslogError(
                f"fits is true, but rank {rank} has {part.capacity_bytes} bytes of capacity and its {several} hold "
                f"{size} together; plan again, or set fits to false"
            )
