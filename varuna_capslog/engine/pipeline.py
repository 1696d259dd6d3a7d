"""Our engine. `step.train_step` or `training.loop` drives a step: `PipelineEngine.compute`, `vote`, then `apply`.

`compute` calls `executor.Executor.run`, which calls the methods of each `stage.Stage`; then it sums the gradients
(`replicated`). `vote` calls `step.Poll.hold`, `apply` calls `optimizer.StageOptimizer.step`. Commit rule: the model
changes only after every rank knows that the whole step is finite. The engine knows plans, but no planners or files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, PeerLost
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.compiling import LayerCompiler
from varuna_capslog.engine.executor import Contexts, Executor, Observer
from varuna_capslog.engine.functions import LayerFunctions, SharedFunctions
from varuna_capslog.engine.grains import Joining, check_grains, joined_inputs, specs_of_values, stage_dimensions
from varuna_capslog.engine.interface import NO_REPORT, EngineParts, Load, RankReport, Verdict
from varuna_capslog.engine.layers import EngineLayer, StatisticsBook, take_layers
from varuna_capslog.engine.layout import Layout, Reach, Routes
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.pair_groups import opener_of
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.replicated import GradientBook, SharedUpdates, check_shared_updates
from varuna_capslog.engine.stage import CallContext, LateSpecs, LossFunction, Stage
from varuna_capslog.engine.step import Poll, check_minibatch
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.plans.parts import with_memory
from varuna_capslog.schedules import (
    Action,
    Edge,
    Lowered,
    StageGraph,
    find_deadlock,
    from_strings,
    lower,
    schedule_of,
    validate,
)
from varuna_capslog.variants.wrapped import backend_of

__all__ = ["PipelineEngine", "Ready", "build"]


@dataclass(frozen=True)
class Ready:
    """Existing objects of this process, which a new engine uses instead of making its own.

    Attributes:
        table: shapes of this chain. tier: host tier for offloading; None: the engine makes one from its options.
        layers: layers of an earlier engine in this process, by index (see `take_layers`), without their optimizer
            moments, which `layer_state.install` brings.
        part_names: names of the loss parts, only where all ranks know them; the first vote then needs no gather.
        device_type: type of device that a run on fake tensors stands for; None: that of the engine's device.
    """

    table: ShapeTable | None = None
    layers: Mapping[int, EngineLayer] | None = None
    part_names: Sequence[str] | None = None
    tier: HostTier | None = None
    device_type: str | None = None


class PipelineEngine:
    """Our engine on one rank of a training run; see `interface.Engine`.

    Args:
        chain, loss: as for `EngineParts`; the engine takes only the layers of its stages.
        communicator: connects at least `layout.world_size` ranks. Further ranks are idle: they only vote.

    Raises CapslogError for a layout that does not fit chain, options or ranks; `compute`, for an impossible schedule.
    """

    def __init__(
        self,
        chain: Chain,
        loss: LossFunction,
        layout: Layout,
        options: EngineOptions,
        communicator: Communicator,
        device: torch.device,
        ready: Ready | None = None,
        observer: Observer | None = None,
    ) -> None:
        ready = ready or Ready()
        if layout.num_layers != len(chain):
            raise CapslogError(f"the layout has {layout.num_layers} layers, but the chain has {len(chain)}")
        if layout.num_blocks != options.num_blocks and any(stage.blocks is not None for stage in layout.stages):
            raise CapslogError(
                f"the layout shares out {layout.num_blocks} accumulation blocks, but the step has {options.num_blocks}"
            )
        if communicator.world_size < layout.world_size:
            raise CapslogError(
                f"the layout needs {layout.world_size} ranks ({layout.devices} devices x {layout.replicas} replicas), "
                f"but {communicator.world_size} are connected"
            )
        check_grains(chain, layout)
        check_shared_updates(chain, layout)
        actions = None if options.actions is None else from_strings(options.actions)
        stages = with_memory(layout.stages, options, actions, ready.device_type or device.type)
        layout = dataclasses.replace(layout, stages=tuple(stages))
        self.chain, self.layout, self.options = chain, layout, options
        self.communicator, self.device = communicator, device
        self.rank = communicator.rank
        communicator.describe_ranks({rank: layout.describe(rank) for rank in range(communicator.world_size)})
        types = options.precision, options.weights
        self.table = ready.table or ShapeTable(chain, device.type, *types)
        self.layers = take_layers(chain, layout.layers_of(self.rank), device, types[0], ready.layers, types[1])
        by_index = {layer.index: layer for layer in self.layers}
        tier = ready.tier or HostTier(device, options.tier)
        self._graph = layout.graph(options.num_microbatches, chain.edges)
        self._routes = Routes(chain, layout, self._graph.edges)
        self.stages: dict[int, Stage] = {}
        for number in layout.stages_of(self.rank):
            place = layout.stages[number]
            layers = [by_index[index] for index in place.numbers]
            end = loss if place.end == len(chain) else None
            ports = self._routes.ports[number]
            self.stages[number] = Stage(number, chain, layers, end, place.memory or (), tier, ports)
        loading = [number for number, stage in self.stages.items() if stage.ports.inputs]
        self.loaded_microbatches = sorted(index for stage in loading for index in self._graph.microbatches[stage])
        self._reported = [layer.index for layer in self.layers if layout.reporter(layer.index) == self.rank]
        self._gradients = GradientBook(chain, self.layers, communicator, layout)
        self._statistics = StatisticsBook(self.layers, communicator, layout, options.num_microbatches)
        opener = opener_of(options.transport)
        if opener is not None:
            communicator.open_pair_groups(self.pairs(), opener, device)
        updates = SharedUpdates(self.layers, communicator, layout)
        away, scale = layout.moments_away(self.rank), options.loss_scale
        self.optimizer = StageOptimizer(self.layers, options.recipe, away, tier, updates, scale)
        self._observer = observer
        # a run on fake tensors uses the layers uncompiled
        self._compiler = None if ready.device_type else self._made_compiler()
        # nothing of functions has run on an accelerator yet
        has_functions = device.type == "cpu" and not ready.device_type and not self._splits
        shared = SharedFunctions()
        for layer in self.layers:
            functions = layer.functions or LayerFunctions(layer.layer.module, shared)
            layer.functions = functions if has_functions else None
        self._executor: Executor | None = None
        self._evaluators: dict[tuple[int, ...], Executor] = {}
        self._specs: dict[object, tuple[LateSpecs, Reach]] = {}
        self._poll = Poll(chain, communicator, options, ready.part_names)

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling layers has taken so far on this rank."""
        return 0.0 if self._compiler is None else self._compiler.seconds

    @property
    def idle(self) -> bool:
        """True for a rank that has no stages."""
        return not self.stages

    @property
    def judged_microbatches(self) -> Sequence[int]:
        """See `Engine.judged_microbatches`."""
        ends = [number for number, stage in self.stages.items() if stage.ends_in_loss]
        return sorted(index for stage in ends for index in self._graph.microbatches[stage])

    def pairs(self) -> set[tuple[int, int]]:
        """Ordered pairs of ranks between which tensors travel; see `Layout.pairs`."""
        return self.layout.pairs(self._graph.edges, [shared.layers for shared in self.chain.shared])

    @property
    def _splits(self) -> bool:
        """True where a backward is split into the gradients of inputs and those of parameters."""
        actions = (action for row in self.options.actions or () for action in row)
        return self.options.splits_backwards or any("I" in action for action in actions)

    def _made_compiler(self) -> LayerCompiler | None:
        """Compiler of this rank's layers; None where nothing is compiled."""
        backend = self.options.compile
        if backend is None and not any(backend_of(layer.module) for layer in self.chain.layers):
            return None
        splits = self._splits
        parts = any(interval.parts for stage in self.layout.stages for interval in stage.memory or ())
        if splits or parts or any(stage.offloads for stage in self.layout.stages):
            conflict = "splits its backwards" if splits else "offloads what layers save"
            conflict = "recomputes parts of layers" if parts else conflict
            setting, advice = "variant 'compiled'", "leave the variant out"
            if backend is not None:
                setting, advice = f"train.compile={backend}", "set train.compile to null"
            raise CapslogError(
                f"{setting} makes one operation of a layer, but this plan {conflict}, which needs the layer's own "
                f"operations; choose another schedule or plan, or {advice}"
            )
        return LayerCompiler(backend, self.chain, self.layers, self.communicator, says=self._observer is None)

    # -- microbatches ------------------------------------------------------------------------------------------------

    def _contexts(self, minibatch: Minibatch, step: int) -> Contexts:
        """Function from the microbatches of a call to their context, which is made once per call."""
        loss_scale = self.optimizer.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.scale

        @functools.cache
        def context(microbatches: tuple[int, ...]) -> CallContext:
            inputs = joined_inputs([minibatch.inputs[microbatch] for microbatch in microbatches], microbatches)
            targets = [minibatch.targets[microbatch] for microbatch in microbatches]
            specs, reach = self._specs_of(inputs)
            return CallContext(
                microbatches, specs, reach, targets, minibatch.normalisers, (self.options.seed, step), scale
            )

        return context

    def _specs_of(self, inputs: Mapping[str, TensorSpec]) -> tuple[LateSpecs, Reach]:
        """Specs of all values for these inputs, and the values for which a backward computes gradients."""
        key = tuple(sorted(inputs.items()))
        cached = self._specs.get(key)
        if cached is None:
            # the lambda must not hold the engine: that cycle would keep its threads until garbage collection
            chain, table = self.chain, self.table
            specs = LateSpecs(inputs, lambda: specs_of_values(chain, table.boundaries(inputs)))
            if self._graph.edges:
                specs.settle()  # all ranks refuse inputs that do not fit, before any message
            cached = self._specs[key] = specs, Reach(self.chain, specs)
        return cached

    def trained_layers(self, inputs: Mapping[str, TensorSpec]) -> set[int]:
        """Return the layers of the chain whose parameters get a gradient, those of shared parameters included."""
        _, reach = self._specs_of(inputs)
        trained = {value.writer for value, _ in reach.pairs}
        shared = (use.layers for use in self.chain.shared)
        return trained.union(*(layers for layers in shared if not trained.isdisjoint(layers)))

    def _executor_of(self, lowered: Lowered, joining: Joining | None = None) -> Executor:
        return Executor(self.communicator, lowered, self.stages, self._routes, self._observer, joining)

    def _joining(self, contexts: Contexts) -> Joining | None:
        """Object that joins and splits tensors between calls of different sizes; None if all take one microbatch."""
        large = [number for number, grain in enumerate(self._graph.grains) if grain > 1]
        if not large:
            return None
        microbatches = self._graph.calls[max(large, key=self._graph.grains.__getitem__)][0]
        specs = contexts(microbatches[:1]).specs, contexts(microbatches).specs
        samples = stage_dimensions(self.chain, self.layout, specs, len(microbatches))
        for stage in self.stages.values():
            stage.samples = samples
        return Joining(samples)

    # -- a step ------------------------------------------------------------------------------------------------------

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """See `Engine.compute`. Sums are over blocks, replicas and uses of shared parameters. Drops a failed step."""
        check_minibatch(minibatch, self.options)
        contexts = self._contexts(minibatch, step)
        if self._compiler is not None:
            specs = lambda number: [contexts(call).specs for call in self._graph.calls[number]]  # noqa: E731
            self._compiler.prepare(
                minibatch, lambda: [(stage.layers, specs(number)) for number, stage in self.stages.items()]
            )
        if self.idle:
            return
        for calls, grain in zip(self._graph.calls, self._graph.grains, strict=True):
            for call in calls if grain > 1 else ():
                contexts(call)  # all ranks refuse microbatches of unequal sizes, before any message
        if self._executor is None:
            # the first minibatch shows which edges carry gradients
            options, reach = self.options, contexts((0,)).reach
            carrying = (edge for edge in self._graph.edges if self._routes.carried(edge, reach))
            self._executor = self._executor_of(
                _lowered(
                    options.schedule if options.actions is None else options.actions,
                    options.k,
                    self._graph,
                    tuple(stage.in_flight for stage in self.layout.stages),
                    tuple(stage.recomputes(options) for stage in self.layout.stages),
                    tuple(stage.offloads for stage in self.layout.stages),
                    frozenset(carrying),
                ),
                self._joining(contexts),
            )
        per_block = self.options.num_microbatches // self.options.num_blocks

        def after_backward(stage: Stage, microbatch: int) -> None:
            if (microbatch + 1) % per_block == 0:
                self._gradients.close_block(microbatch // per_block, stage.layers)

        try:
            self._executor.run(contexts, load, after_backward)
            self._gradients.finish()
            self._statistics.collect()
        except BaseException as error:
            self.forget()
            self._explain(error, "computing a step")
            raise

    def vote(
        self,
        step: int,
        minibatch: Minibatch,
        stop: bool = False,
        ballot: bytes = b"",
        data: RankReport = NO_REPORT,
    ) -> Verdict:
        """See `Engine.vote`. A step with a `refusal` must not be applied: `forget` drops it."""
        norms = self._gradients.squared_norms(self._reported) if self._reported else {}
        loss_scale = self.optimizer.loss_scale if self.layout.reporter(0) == self.rank else None
        if self._executor is not None:
            data = dataclasses.replace(data, busy_seconds=self._executor.stopwatch.take())
        try:
            last = [stage for stage in self.stages.values() if stage.ends_in_loss]
            return self._poll.hold(step, minibatch, last, norms, stop, ballot, data, loss_scale)
        except BaseException:
            self.forget()
            raise

    def update_of(self, index: int) -> dict[str, Tensor]:
        """Tensors from which a rank with a copy of a layer repeats the layer's update; for use after `compute`.

        Returns the engine's own tensors, which `apply` changes, by key:
            "gradients/<name>": gradient of the whole minibatch, times the loss scale; of a shared parameter, the sum
                over all uses.
            "statistics/<microbatch>/<k>/<module>": [2, features] of the k-th module call; <module> is a number.
        """
        layer = next(layer for layer in self.layers if layer.index == index)
        update: dict[str, Tensor] = {}
        for name, parameter in layer.parameters.items():
            # the gradient of a shared parameter is on its first leaf on this rank, which the optimizer steps
            gradient = self.optimizer.parameters.get(layer.address(name), parameter).grad
            if gradient is not None:
                update[f"gradients/{name}"] = gradient
        for microbatch, calls in self._statistics.of(index).items():
            update |= {f"statistics/{microbatch}/{k}/{batch.module}": batch.values for k, batch in enumerate(calls)}
        return update

    def apply(self, verdict: Verdict) -> float:
        """See `Engine.apply`. A skipped step changes only running statistics and the loss scale."""
        rate = self.optimizer.step(verdict.step, verdict.scale)
        self._statistics.commit()
        return rate

    @property
    def part_names(self) -> list[str] | None:
        """Names of the loss and its parts; None before the first vote."""
        return self._poll.part_names

    @property
    def doing(self) -> str:
        """See `Engine.doing`."""
        return self._executor.doing if self._executor else "starting"

    def _explain(self, error: BaseException, doing: str) -> None:
        """Raise PeerLost after an abort, which leaves received tensors worthless; else a clearer error, if any."""
        if isinstance(error, Exception) and not isinstance(error, PeerLost):
            self.communicator.check_open(doing)
            if not isinstance(error, (CapslogError, MemoryError, torch.OutOfMemoryError)):
                for specs, _ in self._specs.values():
                    specs.settle()  # raises one sentence where a layer does not accept the sizes of its inputs

    def forget(self) -> None:
        """Drop all traces of an interrupted step."""
        if self.communicator.aborted:
            accelerator.synchronize(self.device)  # pending operations still write into tensors of this step
        if self._executor is not None:
            self._executor.stopwatch.reset()
        for stage in self.stages.values():
            stage.forget()
        self._gradients.forget()
        self._statistics.forget()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        minibatches: Sequence[Minibatch],
        load: Callable[[int, int], dict[str, Tensor]],
        take: Callable[[int, int, dict[str, Tensor]], None],
    ) -> None:
        """See `Engine.evaluate`."""
        counts = tuple(len(minibatch.inputs) for minibatch in minibatches)
        # microbatches of the ways alternate, so that a rank on several ways serves them equally
        turns = sorted((microbatch, way) for way, count in enumerate(counts) for microbatch in range(count))
        executor = self._evaluators.get(counts)
        if executor is None:
            ordered = {frozenset(route): route for route in self._graph.routes}
            ways = [ordered[frozenset(way)] for way in self.layout.ways]
            graph = StageGraph(self.layout.ranks, tuple(ways[way] for _, way in turns), self._graph.pairs)
            rows: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
            calls = [0] * len(graph.ranks)
            for number in (number for route in graph.routes for number in route):
                rows[graph.ranks[number]].append(Action(number, "F", calls[number]))
                calls[number] += 1
            lowered = lower(rows, (), graph)
            executor = self._evaluators[counts] = self._executor_of(lowered)
        contexts = [self._contexts(minibatch, 0) for minibatch in minibatches]

        def context(microbatches: tuple[int, ...]) -> CallContext:
            microbatch, way = turns[microbatches[0]]
            return dataclasses.replace(contexts[way]((microbatch,)), microbatches=microbatches)

        def loaded(index: int) -> dict[str, Tensor]:
            microbatch, way = turns[index]
            return load(way, microbatch)

        def taken(context: CallContext, outputs: dict[str, Tensor]) -> None:
            microbatch, way = turns[context.index]
            take(way, microbatch, outputs)

        for layer in self.layers:
            layer.layer.module.eval()
        try:
            executor.run(context, loaded, evaluate=taken)
        except Exception as error:
            self._explain(error, "evaluating")
            raise
        finally:
            for layer in self.layers:
                layer.train()


def build(parts: EngineParts) -> PipelineEngine:
    """Build the engine of `engine: capslog`, and free the parameters of the layers that it does not run."""
    engine = PipelineEngine(parts.chain, parts.loss, parts.layout, parts.options, parts.communicator, parts.device)
    parts.chain.release(parameter for layer in engine.layers for parameter in layer.parameters.values())
    return engine


@functools.lru_cache(maxsize=16)  # frequent membership changes bring back earlier layouts
def _lowered(
    schedule: str | tuple[tuple[str, ...], ...],
    k: int,
    graph: StageGraph,
    in_flight: tuple[int | None, ...],
    recompute: tuple[bool, ...],
    offload: tuple[bool, ...],
    carrying: frozenset[Edge],
) -> Lowered:
    """Program of every rank, validated and without deadlock.

    schedule: name, or the actions of every rank. k: microbatches of a group of schedule "kfkb".
    in_flight: limit of each stage. recompute, offload: per stage, True if the schedule has actions that recompute or
        offload a part of it. carrying: edges over which gradients travel.
    """
    if isinstance(schedule, str):
        rows = schedule_of(schedule, graph, recompute, in_flight, offload, k)
    else:
        rows = from_strings(schedule)
    validate(rows, graph, recompute, offload=offload)
    lowered = lower(rows, carrying, graph)
    stuck = find_deadlock(lowered)
    if stuck is not None:
        raise CapslogError(f"the schedule would wait for ever: {stuck}")
    return lowered
