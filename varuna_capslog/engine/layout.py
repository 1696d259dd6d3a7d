"""Stages of a step, with rank and accumulation blocks of each, and the tensors that travel between stages."""

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
    """Stages of a step. A stage is some layers on one rank; its index in `stages` is its number.

    num_blocks: accumulation blocks of a step. replicas: number of equal pipelines in `stages`, one after another.
    direct: True: a tensor is sent from the stage that writes it to each stage that reads it. False: it passes through
        all stages between these, and each stage is one range of layers.

    Raises CapslogError unless each layer is exactly once in the stages of each block, and at most once on a rank.
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
        """Layout of equal pipelines; see `plans.plan.stages_of_pipelines`. By default, one block per replica."""
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
        """Number of ranks that have stages; further connected ranks are idle."""
        return max(stage.rank for stage in self.stages) + 1

    @cached_property
    def paths(self) -> list[Path]:
        """Stages of each block, in the order of their first layers."""
        return paths_of(self.stages, self.num_blocks)

    @cached_property
    def ways(self) -> list[Path]:
        """Distinct entries of `paths`, in the order of their first blocks."""
        return list(dict.fromkeys(self.paths))

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layers of the first way's stages."""
        return tuple(self.stages[stage].first for stage in self.paths[0])

    @property
    def layers_of_ways(self) -> list[list[Any]]:
        """First layers of the stages of each way; for a stage of several ranges of layers, all its ranges."""
        rows = [[self.stages[number] for number in way] for way in self.ways]
        return [
            [stage.first if len(stage.layers) == 1 else [list(piece) for piece in stage.layers] for stage in row]
            for row in rows
        ]

    @property
    def devices(self) -> int:
        """Number of ranks of one replica."""
        return self.world_size // self.replicas

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def first_replica(self) -> tuple[int, ...]:
        """Ranks of the stages of the first replica."""
        return self.ranks[: len(self.ranks) // self.replicas]

    def graph(self, num_microbatches: int, edges: Iterable[tuple[int, int]] | None = None) -> StageGraph:
        """Stages and route of every microbatch of a step. edges: `Chain.edges`, needed for direct routes."""
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
        """Numbers of the stages that a rank runs."""
        return [number for number, stage in enumerate(self.stages) if stage.rank == rank]

    def layers_of(self, rank: int) -> list[int]:
        """Layers that a rank holds, rising."""
        stages = (self.stages[number] for number in self.stages_of(rank))
        return sorted(layer for stage in stages for layer in stage.numbers)

    def moments_away(self, rank: int) -> frozenset[int]:
        """Layers of a rank whose optimizer moments are offloaded to its host tier."""
        return frozenset().union(*(self.stages[number].moments_away for number in self.stages_of(rank)))

    def moments_elsewhere(self, rank: int) -> frozenset[int]:
        """Layers of a rank whose optimizer moments another rank keeps; that rank sends the updated values."""
        return frozenset().union(*(self.stages[number].moments_elsewhere for number in self.stages_of(rank)))

    def blocks_of(self, rank: int, layer: int) -> Sequence[int]:
        """Blocks for which a rank runs a layer, rising."""
        return [block for block, owner in enumerate(self._ranks_of_layer[layer]) if owner == rank]

    def owner(self, layer: int, block: int) -> int:
        """Rank that runs a layer for a block."""
        return self._ranks_of_layer[layer][block]

    def pairs(self, edges: Iterable[tuple[int, int]], shared: Iterable[Sequence[int]]) -> set[tuple[int, int]]:
        """Ordered pairs of ranks that send tensors: over edges of stages, between replicas, for shared parameters."""
        groups = [{self.ranks[source], self.ranks[target]} for source, target in edges]
        groups += [set(self.holders(layer)) for layer in range(self.num_layers)]
        for layers in shared:
            groups += [{rank, peer} for rank, row in self.uses_from(layers).items() for peer in row.values()]
        return {(a, b) for group in groups for a in group for b in group if a != b}

    def holders(self, layer: int) -> list[int]:
        """Ranks that hold a layer, in the order of their first block."""
        return list(dict.fromkeys(self._ranks_of_layer[layer]))

    def reporter(self, layer: int) -> int:
        """Rank that reports and stores a layer: its first holder that keeps the layer's moments."""
        return next(rank for rank in self._ranks_of_layer[layer] if layer not in self.moments_elsewhere(rank))

    def uses_from(self, layers: Sequence[int]) -> dict[int, dict[int, int]]:
        """Map each rank that holds some of these layers to {layer that it lacks: source rank}. The source runs the
        layer for the first block of the rank that lacks it.
        """
        sources: dict[int, dict[int, int]] = {}
        for rank in dict.fromkeys(rank for layer in layers for rank in self.holders(layer)):
            block = min(self.blocks_of(rank, layer)[0] for layer in self.layers_of(rank))
            sources[rank] = {
                layer: self.owner(layer, block) for layer in layers if rank not in self._ranks_of_layer[layer]
            }
        return sources

    def describe(self, rank: int) -> str:
        """Name of a rank in errors: rank, stages and, where there are several ways, the number of its way."""
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
        """Rank that runs a layer for a block, as [layer][block]."""
        ranks: list[list[int]] = [[] for _ in range(self.num_layers)]
        for path in self.paths:
            for number in path:
                stage = self.stages[number]
                for layer in stage.numbers:
                    ranks[layer].append(stage.rank)
        return ranks


def layout_of(plan: Plan, config: Config) -> Layout:
    """Layout of a plan for our engine; a plan in short form is one pipeline, of which the config sets the replicas.
    Raises CapslogError, with the field's name, where the engine cannot run the plan as it is stated.
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
    # predictions are no part of a layout
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    return Layout(stages, config.num_blocks, direct=plan.routes == "direct")


# -- Values and gradients that each stage takes and sends, and those that travel over each edge between two stages.
#
# With routes "relay", a value passes through all stages between its writer and its last reader. With "direct", the
# writing stage sends the value once to each stage that reads it. One gradient per reading layer comes back, and the
# writing stage adds them from the last reader to the first, the order of all sums of gradients.


GradientKey: TypeAlias = "tuple[Value, int | None]"
"""A value, and the layer that read it and computed this gradient; None: the sum over all layers behind a cut."""


def value_of(key: Value | GradientKey) -> Value:
    """Value that a key of a message's tensor names: the key itself, or the value in the key of a gradient."""
    return key if isinstance(key, Value) else key[0]


@dataclass(frozen=True)
class Ports:
    """Values and gradients that enter and leave a stage.

    enters: values that a forward takes. inputs: those of them that are inputs of the chain, loaded from the data.
    leaves: values that a forward sends. wanted: gradients that a backward sends, of those values that carry one.
    passing: True where values may pass that no layer of the stage reads or writes.
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
    """Ports of a stage. layers: rising; unless `direct`, consecutive."""
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
    """Values for which a backward computes gradients: a path of values with gradients leads from them to the loss.

    specs: of all values; they state which values carry a gradient.
    """

    def __init__(self, chain: Chain, specs: Mapping[Value, TensorSpec]) -> None:
        self._chain, self._specs = chain, specs

    @cached_property
    def _reached(self) -> tuple[dict[Value, int], frozenset[tuple[Value, int]]]:
        """(last layer with a gradient for each value, `pairs`). Computed at first use, since it may trace the chain."""
        pairs = self._chain.gradient_pairs(lambda value: self._specs[value].requires_grad)
        last: dict[Value, int] = {}
        for value, reader in pairs:
            last[value] = max(reader, last.get(value, -1))
        return last, frozenset(pairs)

    @property
    def pairs(self) -> frozenset[tuple[Value, int]]:
        """All (value, layer that has a gradient for it); the loss counts as layer L."""
        return self._reached[1]

    def carries(self, value: Value) -> bool:
        """True where the loss depends on the value."""
        return value in self._reached[0]

    def has(self, key: GradientKey, cut: int) -> bool:
        """True where the layers behind a cut have this gradient."""
        if not self._specs[key[0]].requires_grad:
            return False
        last, pairs = self._reached
        return key in pairs if key[1] is not None else last.get(key[0], -1) >= cut


class Routes:
    """Values and gradients that travel over each edge, in sending order. most: largest tensor count of a message."""

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
    """Sums of gradients by value in one call of a stage, whose layers are differentiated from the last to the first.

    arrived: gradients from later stages; emptied, so that each tensor is freed after its last use.
    handed_back: gradients for earlier stages, of values whose gradients travel separately (`Ports.apart`).
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
        """Add the gradient that layer `reader` of this stage, or the loss, computed for a value that it reads."""
        if value in self._apart:
            self.handed_back[value, reader] = gradient
            return
        self._add_later_ones(value, reader)
        self._sum(value, gradient)

    def take(self, value: Value) -> Tensor | None:
        """Remove and return the sum over all readers of a value, for the layer that wrote it; None without any."""
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
        """Gradient to send to an earlier stage under this key; None where the loss does not depend on the value."""
        return self._sums.get(key[0]) if key[1] is None else self.handed_back.get(key)
