"""Stages of a step, the rank of each, the blocks that it serves, and the tensors that travel between stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.plans.parts import PlanStage, Units, with_loss
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.plans.rules import Path, check_cover, check_runnable, paths_of, stage_graph
from varuna_capslog.schedules import Edge, StageGraph
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["GradientKey", "Gradients", "Layout", "Ports", "Reach", "Routes", "layout_of", "ports_of", "value_of"]


# -- the stages of a step


@dataclass(frozen=True)
class Layout:
    """Stages of a step, numbered by their place, each some layers on one rank.

    num_blocks: accumulation blocks of a step. replicas: equal pipelines in `stages`, one after the other.
    direct: tensors go straight from the stage that writes them to those that read them; else through all stages
        between, each of which is one range of layers.

    Raises CapslogError unless every block finds every layer once, and no rank holds a layer twice.
    """

    stages: tuple[PlanStage, ...]
    num_blocks: int = 1
    replicas: int = 1
    direct: bool = False

    def __post_init__(self) -> None:
        check_cover(self.stages, self.num_layers, self.num_blocks)

    @classmethod
    def pipelines(
        cls,
        cuts: Sequence[int],
        num_layers: int,
        placement: Sequence[int] | None = None,
        replicas: int = 1,
        num_blocks: int | None = None,
    ) -> Layout:
        """Equal pipelines; see `plans.plan.stages_of_pipelines`. `num_blocks` defaults to one per replica."""
        num_blocks = num_blocks or replicas
        if num_blocks % replicas:
            raise CapslogError(
                f"{replicas} replicas cannot share {num_blocks} accumulation blocks evenly; choose a number of blocks "
                "that the replicas divide"
            )
        return cls(stages_of_pipelines(num_layers, cuts, replicas, num_blocks, placement), num_blocks, replicas)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers of the chain."""
        return max(stage.end for stage in self.stages)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks that have stages; more may be connected, which are idle."""
        return max(stage.rank for stage in self.stages) + 1

    @cached_property
    def paths(self) -> list[Path]:
        """Stages that serve each block, by their first layer."""
        return paths_of(self.stages, self.num_blocks)

    @cached_property
    def ways(self) -> list[Path]:
        """Different ways through the stages, in the order of the first block that takes each."""
        return list(dict.fromkeys(self.paths))

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of each stage of the first way."""
        return tuple(self.stages[stage].first for stage in self.paths[0])

    @property
    def layers_of_ways(self) -> list[list[Any]]:
        """First layer of each stage, by way; of a stage of several pieces of the chain all pieces."""
        rows = [[self.stages[number] for number in way] for way in self.ways]
        return [
            [stage.first if len(stage.layers) == 1 else [list(piece) for piece in stage.layers] for stage in row]
            for row in rows
        ]

    @property
    def devices(self) -> int:
        """Number of ranks of one of the equal pipelines."""
        return self.world_size // self.replicas

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def first_replica(self) -> tuple[int, ...]:
        """Rank of each stage of the first of the equal pipelines; of all stages where there is one."""
        return self.ranks[: len(self.ranks) // self.replicas]

    def graph(self, num_microbatches: int, edges: Iterable[tuple[int, int]] | None = None) -> StageGraph:
        """Stages and way of every microbatch of a step. Direct routes follow `edges`, those of `Chain.edges`."""
        units = Units(num_microbatches, None, self.num_blocks)
        return stage_graph(self.stages, units, "direct" if self.direct else "relay", edges)

    def microbatches_of(self, rank: int, layer: int, num_microbatches: int) -> list[int]:
        """Microbatches of a step for which a rank runs a layer, rising."""
        of_block = num_microbatches // self.num_blocks
        return [
            microbatch
            for block in self.blocks_of(rank, layer)
            for microbatch in range(block * of_block, (block + 1) * of_block)
        ]

    def stages_of(self, rank: int) -> list[int]:
        """Stages that a rank runs; none for an idle one."""
        return [number for number, stage in enumerate(self.stages) if stage.rank == rank]

    def layers_of(self, rank: int) -> list[int]:
        """Layers that a rank holds, rising."""
        stages = (self.stages[number] for number in self.stages_of(rank))
        return sorted(layer for stage in stages for layer in stage.numbers)

    def moments_away(self, rank: int) -> frozenset[int]:
        """Layers whose optimizer moments wait in the rank's host tier."""
        return frozenset().union(*(self.stages[number].moments_away for number in self.stages_of(rank)))

    def moments_elsewhere(self, rank: int) -> frozenset[int]:
        """Layers of a rank whose optimizer moments another rank keeps, which sends the updated values."""
        return frozenset().union(*(self.stages[number].moments_elsewhere for number in self.stages_of(rank)))

    def blocks_of(self, rank: int, layer: int) -> Sequence[int]:
        """Blocks for which a rank holds a layer, rising."""
        return [block for block, owner in enumerate(self._ranks_of_layer[layer]) if owner == rank]

    def owner(self, layer: int, block: int) -> int:
        """Rank that runs a layer for a block."""
        return self._ranks_of_layer[layer][block]

    def pairs(self, edges: Iterable[tuple[int, int]], shared: Iterable[Sequence[int]]) -> set[tuple[int, int]]:
        """Ordered pairs of ranks between which tensors travel: over edges, `shared` parameters, and replicas."""
        groups = [{self.ranks[source], self.ranks[target]} for source, target in edges]
        groups += [set(self.holders(layer)) for layer in range(self.num_layers)]
        for layers in shared:
            groups += [{rank, peer} for rank, row in self.uses_from(layers).items() for peer in row.values()]
        return {(a, b) for group in groups for a in group for b in group if a != b}

    def holders(self, layer: int) -> list[int]:
        """Ranks that hold a layer, in the order of their first block."""
        return list(dict.fromkeys(self._ranks_of_layer[layer]))

    def reporter(self, layer: int) -> int:
        """Holder that reports and stores a layer: the first one that keeps its moments."""
        return next(rank for rank in self._ranks_of_layer[layer] if layer not in self.moments_elsewhere(rank))

    def uses_from(self, layers: Sequence[int]) -> dict[int, dict[int, int]]:
        """For each rank that holds one of these layers, the source rank of each of them that it lacks: the rank that
        runs the layer for the first block that the asking rank serves.
        """
        sources: dict[int, dict[int, int]] = {}
        for rank in dict.fromkeys(rank for layer in layers for rank in self.holders(layer)):
            block = min(self.blocks_of(rank, layer)[0] for layer in self.layers_of(rank))
            sources[rank] = {
                layer: self.owner(layer, block) for layer in layers if rank not in self._ranks_of_layer[layer]
            }
        return sources

    def describe(self, rank: int) -> str:
        """Name of a rank in errors: rank, stages and, where there are several pipelines, the number of its replica."""
        stages, pipeline = self.stages_of(rank), ""
        if not stages:
            return f"rank {rank} (idle)"
        through = [number for number, way in enumerate(self.ways) if set(way) & set(stages)]
        if len(self.ways) > 1 and len(through) == 1:
            stages, pipeline = [self.ways[through[0]].index(stage) for stage in stages], f", replica {through[0]}"
        label = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        return f"rank {rank} ({label}{pipeline})"

    @cached_property
    def _ranks_of_layer(self) -> list[list[int]]:
        """layer -> block -> rank."""
        ranks: list[list[int]] = [[] for _ in range(self.num_layers)]
        for path in self.paths:
            for number in path:
                stage = self.stages[number]
                for layer in stage.numbers:
                    ranks[layer].append(stage.rank)
        return ranks


def layout_of(plan: Plan, config: Config) -> Layout:
    """Engine's layout of a plan; a plan of the short form is one pipeline, repeated for the config's replicas. Raises
    CapslogError, with the field's name, where the engine cannot run the plan, or would run it otherwise.
    """
    pipeline, train = config.pipeline, config.train
    if plan.parallel is not None:
        raise CapslogError(
            f"parallel is {plan.parallel.describe()} in the plan, which divides stages in another system; our engine "
            "runs a stage on one device: export the plan, or plan again without parallel"
        )
    if plan.variants and config.variants != (named := {f"#{layer}": name for layer, name in plan.variants.items()}):
        raise CapslogError(
            f"variants is {dict(plan.variants)} in the plan, but the config has variants={config.variants}; set "
            f"variants={named}, or plan again with this config"
        )
    if plan.actions is None and plan.schedule not in (None, pipeline.schedule) and pipeline.schedule != AUTO_SCHEDULE:
        raise CapslogError(
            f"schedule is {plan.schedule!r} in the plan, but pipeline.schedule is {pipeline.schedule!r}; "
            "make the two agree, or plan again with this config"
        )
    for name, ours in (("samples", train.microbatch_size), ("per_step", config.num_microbatches)):
        planned = getattr(plan.units, name)
        if planned not in (None, ours) and not (plan.short and name == "per_step"):
            raise CapslogError(
                f"units.{name} is {planned} in the plan, but the config makes it {ours}; sizes are constants of a run, "
                "so make the two agree"
            )
    if plan.units.blocks not in (None, config.num_blocks):
        raise CapslogError(
            f"units.blocks is {plan.units.blocks} in the plan, but the run has {config.num_blocks} accumulation blocks"
            f"; set train.accumulation_blocks={plan.units.blocks}"
        )
    if plan.short:
        cuts, placement = plan.cut_list, plan.placement()
        return Layout.pipelines(cuts, plan.num_layers, placement, pipeline.replicas, config.num_blocks)
    check_runnable(plan.stages)
    # Predictions are no part of a layout.
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    return Layout(stages, config.num_blocks, direct=plan.routes == "direct")


# -- Values and gradients that each stage takes and sends, and those that travel over each edge between two stages.
#
# With routes "relay" everything that a later layer reads goes through all stages between. With "direct" a value goes
# from the stage that writes it to each stage that reads it, once, and one gradient per reading layer comes back, so
# that the stage that wrote the value adds them from the last reader to the first, as everywhere (engine rule 8).


GradientKey: TypeAlias = "tuple[Value, int | None]"
"""A value, and the layer whose gradient it is; None: the sum over all layers behind a cut."""


def value_of(key: Value | GradientKey) -> Value:
    """Value of a message's entry: the key itself, or the value of a gradient's key."""
    return key if isinstance(key, Value) else key[0]


@dataclass(frozen=True)
class Ports:
    """Values and gradients that enter and leave a stage.

    enters: values that a forward takes. inputs: those of them that are inputs of the chain and come from the data.
    leaves: values that it sends. wanted: gradients that a backward sends back, as far as their values carry one.
    passing: values enter and leave that no layer of the stage reads or writes.
    """

    enters: tuple[Value, ...]
    inputs: tuple[Value, ...]
    leaves: tuple[Value, ...]
    wanted: tuple[GradientKey, ...]
    passing: bool = True

    @property
    def apart(self) -> frozenset[Value]:
        """Values whose gradients travel separately for each reading layer."""
        return frozenset(value for value, reader in self.wanted if reader is not None)


def ports_of(chain: Chain, layers: Sequence[int], direct: bool = False) -> Ports:
    """Ports of a stage of these layers, which are rising, and consecutive unless `direct`."""
    inside = with_loss(layers, len(chain))
    if not direct:
        enters = chain.values_at(layers[0])
        inputs = enters if layers[0] == 0 else ()
        leaves = () if len(chain) in inside else chain.values_at(layers[-1] + 1)
        return Ports(enters, inputs, leaves, tuple((value, None) for value in enters))
    enters = tuple(
        value
        for value, readers in sorted(chain.readers.items())
        if value.writer not in inside and inside & set(readers)
    )
    leaves = tuple(
        value for value, readers in sorted(chain.readers.items()) if value.writer in inside and set(readers) - inside
    )
    wanted = tuple((value, reader) for value in enters for reader in chain.readers[value] if reader in inside)
    return Ports(enters, tuple(value for value in enters if value.writer < 0), leaves, wanted, passing=False)


class Reach:
    """Values over which gradients come back: the loss can be reached from them through layers that carry one.

    specs: of all values; they say which carry a gradient.
    """

    def __init__(self, chain: Chain, specs: Mapping[Value, TensorSpec]) -> None:
        self._chain, self._specs = chain, specs

    @cached_property
    def _reached(self) -> tuple[dict[Value, int], frozenset[tuple[Value, int]]]:
        """Value -> the last layer with a gradient for it; `pairs`. Sought when asked for, as it may trace the chain."""
        chain, last = self._chain, dict[Value, int]()
        pairs: set[tuple[Value, int]] = set()
        for reader in reversed(range(len(chain) + 1)):
            if reader == len(chain) or any(value in last for value in chain.written(reader)):
                for value in chain.reads[reader]:
                    if self._specs[value].requires_grad:
                        pairs.add((value, reader))
                        last.setdefault(value, reader)
        return last, frozenset(pairs)

    @property
    def pairs(self) -> frozenset[tuple[Value, int]]:
        """(value, layer with a gradient for it), L for the loss."""
        return self._reached[1]

    def has(self, key: GradientKey, cut: int) -> bool:
        """True where this gradient comes from the layers behind a cut."""
        if not self._specs[key[0]].requires_grad:
            return False
        last, pairs = self._reached
        return key in pairs if key[1] is not None else last.get(key[0], -1) >= cut


class Routes:
    """Values and gradients that travel: per edge, in sending order. most: largest number of entries of a message."""

    def __init__(self, chain: Chain, layout: Layout, edges: Sequence[Edge]) -> None:
        self.ports = [ports_of(chain, stage.numbers, layout.direct) for stage in layout.stages]
        self.activations: dict[Edge, tuple[Value, ...]] = {}
        self.gradients: dict[Edge, tuple[GradientKey, ...]] = {}
        for source, target in edges:
            made, taken = set(self.ports[source].leaves), self.ports[target]
            self.activations[source, target] = tuple(value for value in taken.enters if value in made)
            self.gradients[source, target] = tuple(key for key in taken.wanted if key[0] in made)
        self._cuts = [stage.first for stage in layout.stages]
        self.most = max(map(len, (*self.activations.values(), *self.gradients.values())), default=0)

    def carried(self, edge: Edge, reach: Reach) -> list[GradientKey]:
        """Gradients that travel over an edge, in sending order."""
        return [key for key in self.gradients[edge] if reach.has(key, self._cuts[edge[1]])]


class Gradients:
    """Gradients of values in one call of a stage, while its layers are differentiated from the last to the first.

    arrived: from the stages behind; taken out, so that no tensor lives longer than it must.
    handed_back: for the stages before, where they travel separately (`Ports.apart`).
    """

    def __init__(self, arrived: dict[GradientKey, Tensor], apart: frozenset[Value] = frozenset()) -> None:
        self._sums: dict[Value, Tensor] = {}
        self._waiting: dict[Value, list[tuple[int, Tensor]]] = {}
        self._apart = apart
        self.handed_back: dict[GradientKey, Tensor] = {}
        for value, reader in sorted(arrived, key=lambda key: -1 if key[1] is None else key[1]):
            gradient = arrived.pop((value, reader))
            if reader is None:
                self._sums[value] = gradient
            else:
                self._waiting.setdefault(value, []).append((reader, gradient))

    def add(self, value: Value, reader: int, gradient: Tensor) -> None:
        """Add the gradient that a layer of this stage, or the loss, has for what it reads."""
        if value in self._apart:
            self.handed_back[value, reader] = gradient
            return
        self._add_later_ones(value, reader)
        self._sum(value, gradient)

    def take(self, value: Value) -> Tensor | None:
        """Take the sum over all readers of a value, for the layer that wrote it."""
        self._add_later_ones(value, value.writer)
        return self._sums.pop(value, None)

    def _add_later_ones(self, value: Value, reader: int) -> None:
        waiting = self._waiting.get(value, [])
        while waiting and waiting[-1][0] > reader:
            self._sum(value, waiting.pop()[1])

    def _sum(self, value: Value, gradient: Tensor) -> None:
        total = self._sums.get(value)
        self._sums[value] = gradient if total is None else total + gradient

    def of(self, key: GradientKey) -> Tensor | None:
        """Gradient that goes to the stage before under this key; None where nothing depends on the value."""
        return self._sums.get(key[0]) if key[1] is None else self.handed_back.get(key)
