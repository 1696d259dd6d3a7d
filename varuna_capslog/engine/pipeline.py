"""A training step of one rank: run the schedule, add the gradients, vote, apply.

`PipelineEngine` ties stages, executor, gradients and optimizer together under the commit rule: nothing of the model
changes before every rank knows that the whole step is finite, and no message is sent after that. It knows plans, not
planners, and no files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.executor import Executor, Observer
from varuna_capslog.engine.gradients import GradientBook
from varuna_capslog.engine.interface import EngineParts, Load
from varuna_capslog.engine.layers import EngineLayer, take_layers
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.options import EngineOptions, Layout
from varuna_capslog.engine.stage import HostMemory, LossFunction, MicrobatchContext, Stage
from varuna_capslog.engine.step import Poll, Verdict, check_minibatch, microbatches_of
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.schedules import Action, Lowered, find_deadlock, lower, make_schedule, parse_action, validate

__all__ = ["EngineOptions", "Layout", "PipelineEngine", "Ready", "build"]

_STATISTICS_TAG = 3 << 28


@dataclass(frozen=True)
class Ready:
    """What the process that builds an engine has already, so that the engine need not make it.

    Attributes:
        table: the shapes of this chain.
        layers: of an earlier engine of this process, by index; see `take_layers`. Their optimizer's moments do not come
            with them: `layer_state.install` brings them.
        part_names: names of the loss and its parts, where all ranks know them from an earlier engine (its
            `part_names`); they spare the first vote a gather.
        host: where inputs wait for a recomputation; None: pinned memory where the options and the device ask for it.
    """

    table: ShapeTable | None = None
    layers: Mapping[int, EngineLayer] | None = None
    part_names: Sequence[str] | None = None
    host: HostMemory | None = None


class PipelineEngine:
    """One rank of a training run on our executor; see `interface.Engine`.

    Args:
        chain, loss: as for `EngineParts`; the engine takes the layers it needs.
        communicator: connects `layout.world_size` ranks or more. Those beyond it are idle: they have no stages,
            compute nothing, and vote.
        ready: what need not be made anew.
        observer: sees every instruction and the work of the stages; None costs nothing.

    Raises:
        CapslogError: cuts that do not fit the chain, a schedule that cannot run, a module with state of its own.
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
        chain.check_cuts(layout.cuts)
        if communicator.world_size < layout.world_size:
            raise CapslogError(
                f"the layout needs {layout.world_size} ranks ({layout.devices} devices x {layout.replicas} replicas), "
                f"but {communicator.world_size} are connected"
            )
        self.chain, self.layout, self.options = chain, layout, options
        self.communicator, self.device = communicator, device
        self.rank = communicator.rank
        self.replica, self.pipeline_rank = divmod(self.rank, layout.devices)
        communicator.describe_ranks({rank: layout.describe(rank) for rank in range(communicator.world_size)})
        self.table = ready.table or ShapeTable(chain, device.type, options.precision)
        self._cuts = (*layout.cuts, len(chain))
        owned = layout.stages_of(self.rank)
        indices = [index for stage in owned for index in range(self._cuts[stage], self._cuts[stage + 1])]
        self.layers = take_layers(chain, sorted(indices), device, options.precision, ready.layers)
        by_index = {layer.index: layer for layer in self.layers}
        last, host = len(layout.cuts) - 1, ready.host
        if host is None and options.stage_inputs == "host" and device.type == "cuda":
            host = HostMemory()
        self.stages = {
            stage: Stage(
                stage,
                chain,
                [by_index[index] for index in range(self._cuts[stage], self._cuts[stage + 1])],
                loss if stage == last else None,
                host,
            )
            for stage in owned
        }
        self._crossing = [chain.crossing(cut) for cut in layout.cuts]
        base = self.replica * layout.devices
        self._global_rank = range(base, base + layout.devices)
        self._stage_of_layer = [
            stage for stage in range(len(layout.cuts)) for _ in range(self._cuts[stage], self._cuts[stage + 1])
        ]
        self._gradients = GradientBook(
            chain,
            self.layers,
            communicator,
            self._replica_peers(),
            [base + layout.placement[stage] for stage in self._stage_of_layer],
        )
        if options.transport != "gloo":
            communicator.open_pair_groups(self.pairs(), options.transport)
        self.optimizer = StageOptimizer(self.layers, options.rate, options.weight_decay, options.multipliers)
        self._observer = observer
        self._executor: Executor | None = None
        self._evaluators: dict[int, Executor] = {}
        self._poll = Poll(chain, communicator, options, ready.part_names)
        # running statistics of the step under way, by layer and microbatch, those of other replicas included
        self._statistics: dict[int, dict[int, list[Tensor]]] = {}

    @property
    def idle(self) -> bool:
        """True for a rank that has no stages."""
        return self.rank >= self.layout.world_size

    def _replica_peers(self) -> list[int]:
        """The ranks that hold the same layers, by replica."""
        if self.idle:
            return [self.rank]
        return [replica * self.layout.devices + self.pipeline_rank for replica in range(self.layout.replicas)]

    def pairs(self) -> set[tuple[int, int]]:
        """Every ordered pair of ranks between which tensors travel: over cuts, shared parameters and replicas."""
        layout, stage_of = self.layout, self._stage_of_layer
        meetings = [{layout.placement[stage], layout.placement[stage + 1]} for stage in range(len(layout.cuts) - 1)]
        meetings += [{layout.placement[stage_of[layer]] for layer in shared.layers} for shared in self.chain.shared]
        devices, replicas = layout.devices, range(layout.replicas)
        ranks = [{replica * devices + device for device in meeting} for replica in replicas for meeting in meetings]
        ranks += [{replica * devices + device for replica in replicas} for device in range(devices)]
        return {(a, b) for group in ranks for a in group for b in group if a != b}

    # -- microbatches ------------------------------------------------------------------------------------------------

    @property
    def owns_first_stage(self) -> bool:
        """True where the inputs are loaded."""
        return 0 in self.stages

    def _contexts(self, minibatch: Minibatch, indices: Sequence[int], step: int) -> list[MicrobatchContext]:
        return [
            MicrobatchContext(
                index,
                self.table.boundaries(minibatch.inputs[index]),
                minibatch.targets[index],
                minibatch.normalisers,
                (self.options.seed, step),
            )
            for index in indices
        ]

    def _executor_of(self, lowered: Lowered) -> Executor:
        return Executor(
            self.communicator,
            lowered,
            self.pipeline_rank,
            self._global_rank,
            self.stages,
            self._cuts,
            self._crossing,
            self._observer,
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """As `Engine.compute`; the sums are over blocks, replicas and shared uses. What a failure leaves is dropped."""
        check_minibatch(minibatch, self.options)
        if self.idle:
            return
        local = microbatches_of(self)
        contexts = self._contexts(minibatch, local, step)
        if self._executor is None:
            # the first minibatch shows which cuts carry gradients
            options, layout, specs = self.options, self.layout, contexts[0].specs
            self._executor = self._executor_of(
                _lowered(
                    options.schedule if options.actions is None else options.actions,
                    layout.placement,
                    len(local),
                    options.recompute,
                    tuple(any(spec.requires_grad for spec in specs[cut].values()) for cut in layout.cuts[1:]),
                )
            )
        per_block = self.options.num_microbatches // self.options.num_blocks

        def after_backward(stage: Stage, microbatch: int) -> None:
            if (microbatch + 1) % per_block == 0:
                self._gradients.close_block(stage.layers)

        try:
            self._executor.run(contexts, lambda microbatch: load(local[microbatch]), after_backward)
            self._gradients.finish()
            self._statistics = {layer.index: self._take_statistics(layer) for layer in self.layers if layer.statistics}
        except BaseException:
            self.forget()
            raise

    def vote(self, step: int, minibatch: Minibatch, stop: bool = False, ballot: bytes = b"") -> Verdict:
        """As `Engine.vote`. A step with a `refusal` must not be applied: `forget` drops it."""
        last = self.stages.get(len(self.layout.cuts) - 1)
        norms = self._gradients.squared_norms() if self.replica == 0 and self.layers else {}
        try:
            return self._poll.hold(step, minibatch, last, norms, stop, ballot)
        except BaseException:
            self.forget()
            raise

    def update_of(self, index: int) -> dict[str, Tensor]:
        """After `compute`: what `apply` will make of one of this rank's layers, for those who hold a copy of it.

        Returns:
            "gradients/<name>": of the whole minibatch; a shared parameter's is the sum over all its uses.
            "statistics/<microbatch>/<k>": of the k-th module call, [2, features].
            References: they change with `apply`.
        """
        layer = next(layer for layer in self.layers if layer.index == index)
        update: dict[str, Tensor] = {}
        for name, parameter in layer.parameters.items():
            # the gradient of a shared parameter lies in the first of its leaves here, which the optimizer steps
            gradient = self.optimizer.parameters.get(layer.address(name), parameter).grad
            if gradient is not None:
                update[f"gradients/{name}"] = gradient
        for microbatch, calls in self._statistics.get(index, {}).items():
            update |= {f"statistics/{microbatch}/{k}": tensor for k, tensor in enumerate(calls)}
        return update

    def apply(self, verdict: Verdict) -> float:
        """As `Engine.apply`: clipping, optimizer, running statistics."""
        rate = self.optimizer.step(verdict.step, verdict.scale)
        for layer in self.layers:
            if layer.index in self._statistics:
                layer.statistics.commit(self._statistics.pop(layer.index))
        return rate

    @property
    def part_names(self) -> list[str] | None:
        """The loss and its parts by name; None before the first vote."""
        return self._poll.part_names

    @property
    def doing(self) -> str:
        """The action under way, for error messages."""
        return self._executor.doing if self._executor else "starting"

    def forget(self) -> None:
        """Drops all traces of a broken-off step."""
        for stage in self.stages.values():
            stage.forget()
        self._gradients.forget()
        self._statistics.clear()

    def _take_statistics(self, layer: EngineLayer) -> dict[int, list[Tensor]]:
        """A layer's running statistics of all microbatches of the step, those of other replicas included."""
        found = layer.statistics.take()
        if self.layout.replicas == 1:
            return found
        order, peers = sorted(found), self._replica_peers()
        shapes = [tensor.shape for tensor in found[order[0]]]
        flat = torch.cat([tensor.reshape(-1) for microbatch in order for tensor in found[microbatch]])
        wanted = dict.fromkeys(peers, TensorSpec.of(flat))
        for peer, theirs in self.communicator.exchange(flat, wanted, _STATISTICS_TAG + layer.index).items():
            first = peers.index(peer) * len(order)
            pieces = iter(theirs.split([shape.numel() for shape in shapes] * len(order)))
            for position in range(len(order)):
                found[first + position] = [next(pieces).reshape(shape) for shape in shapes]
        return found

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, minibatch: Minibatch, load: Load, take: Callable[[int, dict[str, Tensor]], None]) -> None:
        """As `Engine.evaluate`."""
        count = len(minibatch.inputs)
        executor = self._evaluators.get(count)
        if executor is None:
            rows: list[list[Action]] = [[] for _ in range(self.layout.devices)]
            for microbatch in range(count):
                for index, device in enumerate(self.layout.placement):
                    rows[device].append(Action(index, "F", microbatch))
            lowered = lower(rows, has_gradient=[False] * (len(self.layout.cuts) - 1))
            executor = self._evaluators[count] = self._executor_of(lowered)
        for layer in self.layers:
            layer.layer.module.eval()
        try:
            executor.run(
                self._contexts(minibatch, range(count), 0),
                load,
                evaluate=lambda context, outputs: take(context.index, outputs),
            )
        finally:
            for layer in self.layers:
                layer.layer.module.train()


def build(parts: EngineParts) -> PipelineEngine:
    """The `EngineKind.build` of `engine: capslog`."""
    return PipelineEngine(parts.chain, parts.loss, parts.layout, parts.options, parts.communicator, parts.device)


@functools.lru_cache(maxsize=16)  # a membership that changes often meets the same layouts again
def _lowered(
    schedule: str | tuple[tuple[str, ...], ...],
    placement: tuple[int, ...],
    count: int,
    recompute: bool,
    carries: tuple[bool, ...],
) -> Lowered:
    """The checked program of every rank of a pipeline.

    Args:
        schedule: its name, or the actions of every device.
        count: microbatches.
        carries: per cut, whether gradients cross it.
    """
    if isinstance(schedule, str):
        rows = make_schedule(schedule, len(placement), count, placement, recompute)
    else:
        rows = [[parse_action(text) for text in row] for row in schedule]
    validate(rows, len(placement), count, recompute=any(action.kind == "R" for row in rows for action in row))
    lowered = lower(rows, has_gradient=list(carries))
    stuck = find_deadlock(lowered)
    if stuck is not None:
        raise CapslogError(f"the schedule would wait for ever: {stuck}")
    return lowered
