"""Runs one trimmed stage on fake tensors: the engine's own program of a step, on tensors without memory.

Stage, executor, gradient book and optimizer are the engine's, so every tensor that they keep or free is followed; only
messages and the device are simulated.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import shortage
from varuna_capslog.engine.communicator import Communicator, Pending
from varuna_capslog.engine.executor import Observer
from varuna_capslog.engine.offload import HostRegion, HostTier, Wait
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.probe import StageMeter, resident_tensors, storage_bytes, storages_of
from varuna_capslog.engine.stage import CallContext, LossFunction, Stage
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture.python_calls import values_last
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.hollow import VALUE_ERRORS, NeedsValues
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiles.record import ActionBytes, Divisible
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.profiling.estimation.divisible import DivisibleMeter
from varuna_capslog.profiling.estimation.headroom import StepTrace
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes, Recipes
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.estimation.rates import Speed
from varuna_capslog.profiling.trim import MEASURED_RANK, TrimmedPipeline, TrimmedRun, with_real_layers
from varuna_capslog.profiling.weighing import ActionResidue, ActionWeights, HalfWeights, Halves, Window

__all__ = [
    "ForwardRun",
    "HollowRun",
    "SilentCommunicator",
    "StepMeter",
    "fake_step",
    "hollow_ready",
    "loss_of_each",
    "run_forward",
    "run_halves",
    "run_hollow",
]


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HollowRun(StepTrace):
    """Allocations of a step of a stage; the peak is as the device's allocator counts.

    static_bytes: parameters, gradients, moments and buffers when all gradients exist.
    saved_bytes: saved by a forward for its backward, the stage's inputs included; and, for one graph, the bytes of
        blocks at the peak beyond the requests, with a caching allocator.
    forward_seconds, backward_seconds: of one microbatch, by `rates`.
    update_seconds: of norm, clipping and optimizer, with as many launches for one layer as for all.
    work: of forward ("F"), backward ("B") and update ("U"), by class. actions: bytes of each action.
    attention: "eager" where the layers make softmax matrices, "fused" where they call a fused attention kernel.
    limits: names of the `quirks.LIMITS` that apply to the run, because of which its bytes are too low.
    divisible: of a stage of one layer; None for several layers.
    """

    static_bytes: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    work: Mapping[str, Work]
    actions: ActionBytes
    attention: frozenset[str]
    limits: frozenset[str]
    divisible: Divisible | None


def run_hollow(
    mode: FakeTensorMode,
    chain: Chain,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes,
) -> HollowRun:
    """Run one step of a trimmed stage that has trained before: with optimizer moments, but without gradients.

    mode: allows inputs that are not fake; best one mode for all runs of a chain.
    chain: from `skeleton`. quirks, speed: of the device that the run is for. recipes: see `Lifetimes`.

    Raises CapslogError where a layer or the loss cannot run on fake tensors.
    """
    count = enough_microbatches(conditions, quirks)
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch(), conditions.recipe.uncompiled():
        pipeline, meter = TrimmedPipeline.of(chain, run, conditions, True, count), _Meter(speed, quirks)
        peak_bytes, events = trimmed_step(pipeline, run, conditions, loss, quirks, recipes, meter)
        if meter.refused:
            raise CapslogError(f"the loss refuses fake values ({meter.refused}); make it finite on any outputs")
        work, actions = meter.work, meter.actions
        assert actions is not None
        # the last stage computes its layers only in the recomputation
        work["F"] = max(work["F"], work.pop("R"), key=speed.seconds)
        saved_bytes = meter.saved_bytes
        if quirks.has("caching allocator"):
            # a caching allocator gives somewhat more than requested, mostly for saved tensors
            peaks = replay(events)
            graphs = 1 if conditions.recompute or not run.has_downstream else 2
            peak_bytes = peaks.allocated_bytes
            saved_bytes += peaks.remainder_bytes // graphs
        return HollowRun(
            peak_bytes,
            tuple(events),
            meter.static_bytes,
            saved_bytes,
            speed.seconds(work["F"]),
            speed.seconds(work["B"]),
            speed.seconds({**work["U"], "launch": 0.0}),
            work,
            actions,
            frozenset(meter.attention),
            frozenset(quirks.limits),
            meter.divisible,
        )


def trimmed_step(
    pipeline: TrimmedPipeline,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    quirks: Quirks,
    recipes: Recipes,
    meter: StepMeter,
) -> tuple[int, list[tuple[int, int]]]:
    """Run `fake_step` for the measured rank of a trimmed pipeline."""
    is_whole = not run.has_upstream and not run.has_downstream
    rank, world_size = (0, 1) if is_whole else (MEASURED_RANK, 2)
    communicator = SilentCommunicator(rank, world_size, quirks.has("host staging"))
    engine = pipeline.engine(loss, communicator, _CPU, hollow_ready(pipeline.table, conditions), meter)
    layers = pipeline.chain.layers[run.has_upstream : len(pipeline.chain) - run.has_downstream]
    names = (
        (f"layer {layers[0].name!r}", "it") if len(layers) == 1 else (f"layers {run.first} to {run.end - 1}", "them")
    )
    return fake_step(engine, quirks, pipeline.minibatch, names, recipes, meter)


def fake_step(
    engine: PipelineEngine,
    quirks: Quirks,
    minibatch: Minibatch,
    names: tuple[str, str],
    recipes: Recipes | None = None,
    meter: StepMeter | None = None,
) -> tuple[int, list[tuple[int, int]]]:
    """Run one step of an engine as if it had trained before, inside a `FakeTensorMode` and the quirks' dispatch.

    Args:
        names: for an error, the layers' names and their pronoun ("it" or "them").
        meter: the engine's observer.

    Returns:
        The peak in whole blocks, and the step's events for `allocator.replay`, those before the step first.

    Raises:
        CapslogError: a layer or the loss cannot run on fake tensors.
    """
    _begin_optimizer(engine, minibatch, quirks)
    held = resident_tensors(engine.layers, engine.optimizer)
    followed = Lifetimes(quirks.temporary, held, recipes, not quirks.has("host staging"), quirks.block_bytes)
    if meter is not None:
        meter.begin(engine, storages_of(held), followed)
    del held
    with followed, values_last(layer.layer.module for layer in engine.layers):
        try:
            train_step(
                engine,
                2,
                minibatch,
                lambda microbatch: {name: spec.empty() for name, spec in minibatch.inputs[microbatch].items()},
                before_commit=None if meter is None else meter.count_static,
            )
        except CapslogError:
            raise
        except VALUE_ERRORS as error:
            raise NeedsValues(names[0], error) from error
        except Exception as error:
            raise shortage(error) or CapslogError(
                f"{names[0]} cannot run on fake tensors ({type(error).__name__}: {error}); let {names[1]} depend on "
                "shapes only, or set profile.source=measured"
            ) from error
        if meter is not None:
            meter.end()
    return followed.peak_bytes, [*quirks.taken_before(), *followed.events]


def enough_microbatches(conditions: RunConditions, quirks: Quirks) -> int:
    """Return the number of microbatches that shows the peak of any longer step.

    The backward of the second microbatch is the first with all gradients in memory. Where inputs or graphs wait on the
    device, a third microbatch must wait then; where messages do too, a fourth, as in a measured run.
    """
    if not quirks.has("host staging"):
        return 4
    return 2 if conditions.recompute and conditions.stage_inputs == "host" else 3


def _begin_optimizer(engine: PipelineEngine, minibatch: Minibatch, quirks: Quirks) -> None:
    """Give the optimizer moments, as if the engine had trained before, and the device's kernels. Parameters that get
    no gradient have no moments.
    """
    trained = engine.trained_layers(minibatch.inputs[0])
    layers = [layer for layer in engine.layers if layer.index in trained]
    parameters = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    for address, value in engine.optimizer.values.items():
        if id(engine.optimizer.parameters[address]) in parameters:
            engine.optimizer.take_moments(address, engine.options.recipe.fresh(value), copy=False)
    if quirks.has("foreach update"):
        engine.optimizer.step_together()


def hollow_ready(table: ShapeTable, conditions: RunConditions) -> Ready:
    """Return the `Ready` of an engine on fake tensors: these shapes, and a host tier without memory."""
    return Ready(table, tier=HollowTier(), device_type=conditions.device)


class HollowTier(HostTier):
    """Host tier that counts bytes and allocates none, since host memory is not device memory."""

    def __init__(self) -> None:
        super().__init__(_CPU)

    def copy_out(self, tensor: Tensor, region: HostRegion, overlap: bool) -> Wait:
        return _no_copy

    def load_back(self, region: HostRegion, overlap: bool) -> tuple[Tensor, Wait]:
        return torch.empty(region.size, dtype=torch.uint8), _no_copy

    def _map(self, size: int) -> None:
        return None


def _no_copy() -> None:
    """Wait for nothing."""


class StepMeter(Observer):
    """Observer of the lifetimes of the step's storages in `fake_step`."""

    _followed: Lifetimes

    def begin(self, engine: PipelineEngine, resident: Collection[int], followed: Lifetimes) -> None:
        """Prepare for the step. resident: storages from before the step, which no forward saves."""
        self._followed = followed

    def working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[None]:
        return self._followed.with_actual_tensors()

    def count_static(self) -> None:
        """Called between the vote and the update, when all gradients exist."""

    def end(self) -> None:
        """Called after the step."""


class _Meter(StepMeter):
    """Counts the first microbatch's saved bytes and work, the update's work, and static bytes before the update."""

    def __init__(self, speed: Speed, quirks: Quirks) -> None:
        self._speed, self._quirks = speed, quirks
        self._engine: PipelineEngine | None = None
        self._resident: Collection[int] = ()
        self._stage = StageMeter(_CPU, list)
        self.static_bytes = 0
        self.work: dict[str, Work] = {kind: {} for kind in "FRBU"}
        self._weights: ActionWeights | None = None
        self.actions: ActionBytes | None = None
        self.attention: set[str] = set()
        self.refused = ""
        self._parts: dict[str, DivisibleMeter] = {}

    @property
    def saved_bytes(self) -> int:
        return self._stage.saved_bytes

    @property
    def divisible(self) -> Divisible | None:
        """Parts of the forward, or of the recomputation if only that computes the layers (last stage)."""
        meter = max(self._parts.values(), key=lambda meter: meter.count, default=None)
        return None if meter is None else meter.divisible()

    def begin(self, engine: PipelineEngine, resident: Collection[int], followed: Lifetimes) -> None:
        super().begin(engine, resident, followed)
        self._engine, self._resident = engine, resident
        self._weights = ActionWeights(engine, self._quirks.block_bytes)
        if len(engine.layers) == 1:
            parameters = list(engine.layers[0].parameters.values())
            self._parts = {kind: DivisibleMeter(parameters, self._seconds_of) for kind in "FR"}

    def _seconds_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        work: Work = {}
        self._speed.count(work, func, args, kwargs, result)
        return self._speed.seconds({**work, "launch": 0.0})

    def count_static(self) -> None:
        assert self._engine is not None
        resident = resident_tensors(self._engine.layers, self._engine.optimizer)
        self.static_bytes = storage_bytes(resident, self._quirks.block_bytes)
        assert self._weights is not None
        self._weights.count_gradients()
        self._followed.observer = functools.partial(self._speed.count, self.work["U"])

    def end(self) -> None:
        self._followed.observer = None
        assert self._weights is not None
        lasting_bytes = sum(self._quirks.lasting) if self._quirks.has("cublas workspace") else None
        update_bytes = self._followed.lately_bytes - self.static_bytes
        self.actions = self._weights.result(update_bytes, self._stage, lasting_bytes)

    def working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[None]:
        reading = self._reading(kind, stage, context) if context.index == 0 else contextlib.nullcontext()
        return self._weighing(kind, stage, context, reading)

    @contextlib.contextmanager
    def _weighing(
        self, kind: str, stage: Stage, context: CallContext, reading: AbstractContextManager[None]
    ) -> Iterator[None]:
        followed, weights = self._followed, self._weights
        assert weights is not None
        before = followed.lately_bytes = followed.live_bytes
        with super().working(kind, stage, context), reading:
            yield
        window = Window(before, followed.lately_bytes, followed.live_bytes)
        statistics = storage_bytes(stage.statistics(context.index), self._quirks.block_bytes)
        weights.add(kind, stage, context, window, statistics)
        followed.lately_bytes = followed.live_bytes

    @contextlib.contextmanager
    def _reading(self, kind: str, stage: Stage, context: CallContext) -> Iterator[None]:
        followed = self._followed

        def observe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            self._speed.count(self.work[kind], func, args, kwargs, result)
            if kind in self._parts:
                self._parts[kind](func, args, kwargs, result)
            name = func.overloadpacket.__name__
            if name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:
                self.attention.add("eager")
            elif name.startswith("_scaled_dot_product"):
                self.attention.add("fused")

        followed.observer = observe
        try:
            with contextlib.nullcontext() if kind == "B" else self._saving(stage, context):
                yield
        finally:
            followed.observer = None

    @contextlib.contextmanager
    def _saving(self, stage: Stage, context: CallContext) -> Iterator[None]:
        microbatch = context.index
        sources = lambda: stage.kept(microbatch), lambda: stage.entries(microbatch), lambda: stage.in_loss
        with self._stage.saving(self._resident, *sources):
            yield
        self.refused = self.refused or stage.refusals.get(microbatch, "")


# -- messages that are not sent


class SilentCommunicator(Communicator):
    """Communicator of one rank without peers: it makes and frees buffers, and sends no messages. `staged`: messages
    wait in host memory, as with CUDA tensors, and reach the device when the rank waits for them.
    """

    def __init__(self, rank: int, world_size: int, staged: bool) -> None:
        super().__init__(rank, world_size, 0, datetime.timedelta(0))
        self._staged = staged

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        kept = torch.empty(0) if self._staged else tensor.detach()
        return Pending(self, None, peer, "", kept, kept.device)

    def receive(self, spec: TensorSpec, peer: int, tag: int, device: torch.device) -> Pending:
        if self._staged:
            return _Staged(self, spec, peer, device)
        return Pending(self, None, peer, "", spec.empty(device), device)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather(self, value: Any) -> list[Any]:
        # called once, for the names of the loss parts, which the last stage's rank sends
        return [["loss"] if value is None else value] * self.world_size


class _Staged(Pending):
    """Receive that lands in host memory first."""

    def __init__(self, communicator: Communicator, spec: TensorSpec, peer: int, device: torch.device) -> None:
        super().__init__(communicator, None, peer, "", torch.empty(0), device)
        self._spec = spec

    def wait(self) -> Tensor:
        return self._spec.empty(self._device)


# -- The two halves of a stage's backward on fake tensors: the bytes of each, and those held between them.
#
# `estimate` calls `run_halves` if the training run splits its backwards. The program is that of `profiling.trim`;
# storages are followed as above.


def run_halves(
    mode: FakeTensorMode,
    chain: Chain,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes,
) -> Halves:
    """Run one step of a trimmed stage that splits its backwards, without recomputation; arguments and errors are those
    of `run_hollow`. The seconds of each half are those of its operators by `rates`.
    """
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch():
        pipeline, meter = TrimmedPipeline.of(chain, run, conditions, True, halves=True), _HalvesMeter(speed)
        trimmed_step(pipeline, run, conditions, loss, quirks, recipes, meter)
        return meter.weights.result(*(speed.seconds(meter.work[half]) for half in "IW"))


class _HalvesMeter(StepMeter):
    """Measures the bytes of both halves of every backward, and the work of the first microbatch's halves."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.work: dict[str, Work] = {"I": {}, "W": {}}
        self.weights = HalfWeights()

    def working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[None]:
        return self._weighing(kind, stage, context)

    @contextlib.contextmanager
    def _weighing(self, kind: str, stage: Stage, context: CallContext) -> Iterator[None]:
        followed = self._followed

        before = followed.lately_bytes = followed.live_bytes
        if kind in self.work and context.index == 0:
            followed.observer = functools.partial(self._speed.count, self.work[kind])
        try:
            with super().working(kind, stage, context):
                yield
        finally:
            followed.observer = None
        window = Window(before, followed.lately_bytes, followed.live_bytes)
        self.weights.add(kind, stage, context, window, ActionResidue.of(kind, stage, context))
        followed.lately_bytes = followed.live_bytes


# -- The loss of a call of several microbatches, as the engine computes it: for each microbatch from its outputs.
#
# An estimate of such calls runs a stage on one microbatch as large as all of them together.


def loss_of_each(loss: LossFunction, single: Mapping[str, TensorSpec], all_: Mapping[str, TensorSpec]) -> LossFunction:
    """Return a loss function that sums the losses of the microbatches; its targets are a list, one entry for each.

    single, all_: the outputs of one microbatch, and of all in one call. Tensors that grow in several dimensions are
        split in all of them: a stage that makes such tensors never takes several microbatches
        (`engine.grains.sample_dimensions`), but a profile has runs of all layers.
    """
    grown = {
        name: [place for place, size in enumerate(spec.shape) if size != single[name].shape[place]]
        for name, spec in all_.items()
    }

    def part_of(name: str, tensor: Tensor, place: int, count: int) -> Tensor:
        for dimension in grown[name] or ([0] if tensor.dim() else []):
            tensor = tensor.tensor_split(count, dimension)[place]
        return tensor

    def together(
        outputs: Mapping[str, Tensor], targets: Sequence[Any], normalisers: Mapping[str, float]
    ) -> dict[str, Tensor]:
        total: Tensor | None = None
        for place, target in enumerate(targets):
            part = {name: part_of(name, tensor, place, len(targets)) for name, tensor in outputs.items()}
            part_loss = loss(part, target, normalisers)["loss"]
            total = part_loss if total is None else total + part_loss
        assert total is not None
        return {"loss": total}

    return together


# -- One forward of a range of layers on fake tensors, without graphs.
#
# `inference` calls `run_forward`, which runs `Chain.run_stage` under `no_grad`, with the layers in eval mode.
# Lifetimes, kernels and the allocator are those of the estimates for training.


@dataclass(frozen=True)
class ForwardRun(StepTrace):
    """Allocations of one forward of some layers; the peak is as the device's allocator counts.

    weight_bytes: parameters and buffers, a part of the peak. seconds: by `rates`.
    attends: True where the layers have attention.
    limits: names of the `quirks.LIMITS` that apply to the run, because of which its bytes are too low.
    """

    weight_bytes: int
    seconds: float
    attends: bool
    limits: frozenset[str]


def run_forward(
    mode: FakeTensorMode,
    chain: Chain,
    layers: tuple[int, int],
    inputs: Mapping[str, TensorSpec],
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes,
) -> ForwardRun:
    """Run one forward of layers [first, end) of one microbatch; other arguments and errors as in `run_hollow`.
    `inputs`: specs of the tensors across the cut before layer `first`.
    """
    first, end = layers
    watch = _Watch(speed)
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch(), torch.no_grad():
        part = with_real_layers(chain, range(first, end))
        modules = [layer.module.eval() for layer in part.layers[first:end]]
        held = [tensor.detach() for module in modules for tensor in (*module.parameters(), *module.buffers())]
        followed = Lifetimes(quirks.temporary, held, recipes, on_host=not quirks.has("host staging"))
        weight_bytes = storage_bytes(held)
        followed.observer = watch
        with followed:
            try:
                part.run_stage(first, end, {name: spec.empty() for name, spec in inputs.items()})
            except CapslogError:
                raise
            except Exception as error:
                raise shortage(error) or CapslogError(
                    f"layers {first} to {end - 1} cannot run on fake tensors ({type(error).__name__}: {error}); let "
                    "them depend on shapes only"
                ) from error
        events = [*quirks.taken_before(), *followed.events]
        peak_bytes = replay(events).allocated_bytes if quirks.has("caching allocator") else followed.peak_bytes
        return ForwardRun(
            peak_bytes, tuple(events), weight_bytes, speed.seconds(watch.work), watch.attends, frozenset(quirks.limits)
        )


class _Watch:
    """Observer of operators: adds up their work, and detects attention."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.work: Work = {}
        self.attends = False

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        self._speed.count(self.work, func, args, kwargs, result)
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") or (
            name in ("_softmax", "_safe_softmax") and isinstance(args[0], Tensor) and args[0].dim() > 2
        ):
            self.attends = True
