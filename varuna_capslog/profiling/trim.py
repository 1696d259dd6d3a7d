"""One stage alone, its neighbours replaced by dummy tensors: CAPSlog's model trimming (Sec. III-A).

Two ranks train a three-stage pipeline by the engine's own code: the measured rank holds the run's one or two layers,
the other rank stands in for the stage before and the stage after, with layers that only pass tensors on. No other layer
gets memory.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.executor import Observer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import EngineOptions, PipelineEngine, Ready
from varuna_capslog.engine.probe import StageMeter, resident_tensors, storages_of
from varuna_capslog.engine.stage import CallContext, LossFunction, Stage
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture.python_calls import WholeModel
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import attribute_tensors, built_hollow
from varuna_capslog.model.layer import put_in_training
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiles.runs import PLAIN, text_of
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.weighing import ActionProbe, ActionResidue, ActionWeights, HalfWeights, Halves
from varuna_capslog.schedules import Schedule, from_strings, insert_recompute, to_strings
from varuna_capslog.variants.registry import drop_unread_work, variant_named

__all__ = [
    "MEASURED_RANK",
    "MICROBATCHES",
    "NEIGHBOUR_RANK",
    "KnownShapes",
    "MeasuredStage",
    "TrimmedPipeline",
    "TrimmedRun",
    "dummy_inputs",
    "dummy_loss",
    "dummy_options",
    "measure_run",
    "observe",
    "program",
    "real_parameter",
    "real_tensors",
    "run_neighbours",
    "skeleton",
    "with_real_layers",
]


# -- Chains without memory: a workload's layers with parameters that have shapes only.
#
# A run gives memory to one or two layers of such a chain; `measure` reads shapes and bytes from it. Nothing here
# changes the workload's own modules.


def skeleton(workload: Workload, evaluates: bool = False) -> Chain:
    """Return the workload's chain in training mode with real buffers and all parameters on the meta device; see
    `built_hollow`. evaluates: its layers also run in eval mode.
    """
    torch.manual_seed(0)
    build = functools.partial(workload.chosen_chain, evaluates)
    chain, modules = built_hollow(build, lambda built: [layer.module for layer in built.layers])
    put_in_training(modules)
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False  # fake tensors are never sparse
    return _with_modules(chain, modules)


def _with_modules(chain: Chain, modules: Sequence[nn.Module]) -> Chain:
    layers = [replace(old, module=new) for old, new in zip(chain.layers, modules, strict=True)]
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def with_real_layers(chain: Chain, indices: Iterable[int]) -> Chain:
    """Return the chain with memory for these layers, also where others share it; other layers have only shapes."""
    wanted = set(indices)
    memo = real_tensors([chain.layers[index] for index in wanted])
    modules = [layer.module for layer in chain.layers]
    held = [[*module.parameters(), *module.buffers()] for module in modules]
    # the other modules are not copied: for every rank of a large model, that would take longer than the rehearsal
    copied = [at for at in range(len(chain)) if at in wanted or any(id(tensor) in memo for tensor in held[at])]
    for tensor in (tensor for at in copied for tensor in held[at]):
        memo.setdefault(id(tensor), tensor)
    for at, module in zip(copied, copy.deepcopy([modules[at] for at in copied], memo), strict=True):
        modules[at] = module
    return _with_modules(chain, modules)


def real_tensors(layers: Sequence[Layer], only: set[int] | None = None) -> dict[int, Any]:
    """Return a memo for `deepcopy` with real parameters and buffers of the layers. only: parameters' ids; None: all."""
    memo: dict[int, Any] = {}
    for layer in layers:
        for parameter in layer.module.parameters():
            if id(parameter) not in memo and (only is None or id(parameter) in only):
                memo[id(parameter)] = real_parameter(parameter)
        # in the memo, since deepcopy cannot copy tensors and generators under an estimate's FakeTensorMode
        whole_models = [layer.module.model] if isinstance(layer.module, WholeModel) else []
        tensors = [*layer.module.buffers(), *attribute_tensors([layer.module, *whole_models])]
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors}
        kept = (value for part in (*layer.module.modules(), *whole_models) for value in vars(part).values())
        memo |= {id(value): value for value in kept if isinstance(value, torch.Generator)}
    return memo


def real_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape in host memory, with values that keep activations finite."""
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    if not (parameter.is_floating_point() or parameter.is_complex()):  # codes of a quantised weight
        values.zero_()
    elif parameter.dim() > 1:
        nn.init.normal_(values, std=(parameter.shape[0] / max(parameter.numel(), 1)) ** 0.5)
    else:
        values.fill_(0.5)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


# -- The programs of both ranks of a trimmed pipeline: the measured rank, and the rank in place of its neighbours.
#
# `measure_run` and `run_neighbours` execute them; an estimate executes the measured rank's on fake tensors.


MEASURED_RANK, NEIGHBOUR_RANK = 1, 0
MICROBATCHES = 4
"""All gradients exist from the second microbatch on; then the last two have as much in flight as in a long step."""
HALVED_MICROBATCHES = 3
"""With split backwards: all gradients exist at the second, whose halves have the forward of the third between them."""


def program(
    count: int, around: tuple[bool, bool], recompute: bool, microbatches: int, halves: bool = False
) -> tuple[Layout, Schedule]:
    """Return stages, their ranks and both ranks' actions: the steady state of Varuna's schedule.

    count: layers of the run. around: True for a stage before it, and for one behind.
    microbatches: at most 4. halves: split the backwards of the run; then there are 3 microbatches.

    A stage with a stage behind it has a second microbatch in flight while it recomputes and differentiates the first.
    The neighbour sends ahead as far as real neighbours, so that as many receives are posted and sends are in flight.
    Where backwards are split, a forward lies between the halves. The activation that it receives confirms the gradient
    that the first half sent, so the second half frees all that the microbatch still holds.
    """
    upstream, downstream = around
    if upstream and downstream:
        layout = Layout.pipelines((0, 1, 1 + count), count + 2, (NEIGHBOUR_RANK, MEASURED_RANK, NEIGHBOUR_RANK))
        rows = [
            "0F0 0F1 2F0 2B0 0F2 2F1 2B1 0B0 0F3 2F2 2B2 0B1 2F3 2B3 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        ]
    elif downstream:
        layout = Layout.pipelines((0, count), count + 1, (MEASURED_RANK, NEIGHBOUR_RANK))
        rows = ["1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"]
    elif upstream:
        layout = Layout.pipelines((0, 1), count + 1, (NEIGHBOUR_RANK, MEASURED_RANK))
        rows = ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    else:
        layout = Layout.pipelines((0,), count)
        rows = ["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"]
    if halves:
        rows = _halved_rows(*around)
    schedule = from_strings([[text for text in row.split() if int(text[-1]) < microbatches] for row in rows])
    return layout, insert_recompute(schedule) if recompute else schedule


def _halved_rows(upstream: bool, downstream: bool) -> list[str]:
    stage, neighbour = int(upstream), ""
    for number in range(HALVED_MICROBATCHES):
        neighbour += f"0F{number} " * upstream
        neighbour += f"{stage + 1}F{number} {stage + 1}B{number} " * downstream
        neighbour += f"0B{number} " * upstream
    measured = " ".join(f"{stage}{text}" for text in ("F0", "I0", "F1", "W0", "I1", "F2", "W1", "I2", "W2"))
    return [neighbour, measured] if neighbour else [measured]


# -- one trimmed run


_TIMED_STEPS = 1
_TIMED = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True)
class TrimmedRun:
    """Layers [first, end) of a chain of `num_layers`, and the facts about other layers that a run needs.

    specs: of the tensors across the cuts first .. end.
    targets, normalisers: for the loss, which is computed where the run holds the last layer.
    variants: the variant of each of its layers (`profiles/runs`); (): all as configured.
    parts: parts of its layers that their backward recomputes.
    """

    first: int
    end: int
    num_layers: int
    specs: tuple[Mapping[str, TensorSpec], ...]
    targets: Any = None
    normalisers: Mapping[str, float] | None = None
    variants: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, int, str | None]:
        """First layer, end, and the `variant` of the run's row."""
        return self.first, self.end, text_of(self.variants)

    @property
    def has_upstream(self) -> bool:
        """True where a stage comes before."""
        return self.first > 0

    @property
    def has_downstream(self) -> bool:
        """True where a stage comes after; else the run computes the loss."""
        return self.end < self.num_layers


# -- the trimmed pipeline


class _PassThrough(nn.Module):
    """Dummy stage, which passes its tensors on. It holds parameters that the run shares with layers elsewhere."""

    def __init__(self, shared: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.shared = nn.ParameterList(shared)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class _ZeroGradients(torch.autograd.Function):
    """Loss of 0 with gradients of zeros, without arithmetic."""

    @staticmethod
    def forward(context: Any, *tensors: Tensor) -> Tensor:
        context.save_for_backward(*tensors)
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in context.saved_tensors)


def dummy_loss(outputs: Mapping[str, Tensor], _: Any, __: Mapping[str, float]) -> dict[str, Tensor]:
    wanted = [tensor for tensor in outputs.values() if tensor.requires_grad]
    return {"loss": _ZeroGradients.apply(*wanted) if wanted else torch.zeros(())}


class KnownShapes(ShapeTable):
    """Shapes that are already known, such as those of a trimmed pipeline, from the whole chain."""

    def __init__(self, specs: Sequence[Mapping[str, TensorSpec]]) -> None:
        self._specs = [dict(cut) for cut in specs]

    def boundaries(self, inputs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
        return self._specs


def trimmed_chain(chain: Chain, run: TrimmedRun, real: bool) -> Chain:
    """Return the run's layers between dummies; `chain`, from `skeleton`, is not changed. `real`: the run's parameters
    get memory (on the measured rank); else only parameters of the dummies.
    """
    layers = chain.layers[run.first : run.end]
    inside = set(range(run.first, run.end))
    foreign = [use for use in chain.shared if inside & set(use.layers) and set(use.layers) - inside]
    abroad = {id(_parameter_of(chain, use.uses[0])) for use in foreign}
    memo = real_tensors(layers, None if real else abroad)
    held = [memo[id(_parameter_of(chain, use.uses[0]))] for use in foreign]
    modules = copy.deepcopy([layer.module for layer in layers], memo)
    if run.variants:
        for module, name in zip(modules, run.variants, strict=True):
            if name != PLAIN:
                variant_named(name).rewrite(module)
        modules_of_chain = [*(old.module for old in chain.layers[: run.first]), *modules]
        modules_of_chain += [old.module for old in chain.layers[run.end :]]
        drop_unread_work(modules_of_chain, [old.writes for old in chain.layers], chain.readers)
    built = [replace(old, module=new) for old, new in zip(layers, modules, strict=True)]
    enters, leaves = chain.crossing(run.first), chain.crossing(run.end)
    if run.has_upstream:
        built.insert(0, Layer("dummy.before", _PassThrough([] if run.has_downstream else held), enters, enters))
    if run.has_downstream:
        built.append(Layer("dummy.after", _PassThrough(held), leaves, leaves))
    return Chain(built, enters, leaves, chain.name)


def _parameter_of(chain: Chain, use: tuple[int, str]) -> nn.Parameter:
    index, name = use
    return chain.layers[index].module.get_parameter(name)


def dummy_options(conditions: RunConditions, schedule: Schedule, microbatches: int = MICROBATCHES) -> EngineOptions:
    """Return options to run dummy microbatches (at most 4) in a schedule's order, also with values not finite."""
    return EngineOptions(
        num_microbatches=microbatches,
        # no more than two gradient blocks of a stage are in memory at once
        num_blocks=1 if conditions.blocks == 1 else microbatches,
        stage_inputs=conditions.stage_inputs,
        precision=conditions.precision,
        weights=conditions.weights,
        clip_norm=1.0,
        recipe=conditions.recipe,
        actions=tuple(tuple(row) for row in to_strings(schedule)),
        refuses=False,
    )


@dataclass(frozen=True)
class TrimmedPipeline:
    """Trimmed run in the engine's form: the layers between dummies, and dummy microbatches (at most 4)."""

    chain: Chain
    layout: Layout
    options: EngineOptions
    table: ShapeTable
    minibatch: Minibatch

    @classmethod
    def of(
        cls,
        chain: Chain,
        run: TrimmedRun,
        conditions: RunConditions,
        real: bool,
        microbatches: int = MICROBATCHES,
        halves: bool = False,
    ) -> TrimmedPipeline:
        """Make the pipeline of a run.

        chain, real: see `trimmed_chain`. microbatches: of a step.
        halves: split the backwards; the step then has `HALVED_MICROBATCHES`, and recomputes nothing.
        """
        microbatches = HALVED_MICROBATCHES if halves else microbatches
        around = run.has_upstream, run.has_downstream
        layout, schedule = program(
            run.end - run.first, around, conditions.recompute and not halves, microbatches, halves
        )
        if run.parts:
            first = int(run.has_upstream)
            inside = MemoryInterval(first, first + run.end - run.first, "recompute", run.parts)
            stages = [replace(stage, memory=(inside,) if stage.first == first else ()) for stage in layout.stages]
            layout = replace(layout, stages=tuple(stages))
        before = run.specs[: 1 if run.has_upstream else 0]
        specs = [*before, *run.specs, *run.specs[len(run.specs) - run.has_downstream :]]
        inputs, targets = [dict(run.specs[0])] * microbatches, [run.targets] * microbatches
        return cls(
            trimmed_chain(chain, run, real),
            layout,
            dummy_options(conditions, schedule, microbatches),
            KnownShapes(specs),
            Minibatch(inputs, targets, dict(run.normalisers or {})),
        )

    def engine(
        self,
        loss: LossFunction,
        communicator: Communicator,
        device: torch.device,
        ready: Ready | None = None,
        observer: Observer | None = None,
    ) -> PipelineEngine:
        """Return the engine of one rank."""
        ready = ready or Ready(self.table)
        return PipelineEngine(self.chain, loss, self.layout, self.options, communicator, device, ready, observer)


# -- steps


def run_neighbours(chain: Chain, run: TrimmedRun, conditions: RunConditions, communicator: Communicator) -> None:
    """Stand in for the neighbours of `measure_run`: send and receive their stages' messages from host memory."""
    if not run.has_upstream and not run.has_downstream:
        return
    values = dummy_inputs(run.specs[0])
    for halves in (False, True)[: 1 + conditions.halves]:
        pipeline = TrimmedPipeline.of(chain, run, conditions, real=False, halves=halves)
        engine = pipeline.engine(dummy_loss, communicator, torch.device("cpu"))
        for step in range(1, 3 + _TIMED_STEPS):
            train_step(engine, step, pipeline.minibatch, lambda microbatch: values)


def measure_run(
    chain: Chain,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    communicator: Communicator,
    device: torch.device,
) -> Observation:
    """Train one trimmed stage: a step that creates the optimizer state, a step under the probe, and timed steps.

    Args:
        chain: from `skeleton`.
        communicator: of this rank (1) and the rank that stands in for the neighbours (0).

    Returns:
        Peak bytes of a whole step, update included; static bytes (parameters, gradients, moments, buffers); saved bytes
            (all that a graph keeps alive between forward and backward, the stage's inputs included); medians of
            seconds. With `conditions.halves`, further steps with split backwards measure the halves.

    Raises:
        CapslogError: the loss refuses the dummy values, so that its backward would not be measured.
    """
    if not run.has_upstream and not run.has_downstream:
        communicator = Communicator(0, 1, communicator.generation, datetime.timedelta(0))
    loss = loss if not run.has_downstream else dummy_loss

    def ready(halves: bool) -> tuple[PipelineEngine, MeasuredStage, Minibatch, TrimmedRun]:
        pipeline, observer = TrimmedPipeline.of(chain, run, conditions, True, halves=halves), MeasuredStage()
        return pipeline.engine(loss, communicator, device, observer=observer), observer, pipeline.minibatch, run

    row = observe(*ready(halves=False), conditions)
    return _observe_halves(*ready(halves=True)).added_to(row) if conditions.halves else row


def observe(
    engine: PipelineEngine,
    measured: MeasuredStage,
    minibatch: Minibatch,
    run: TrimmedRun,
    conditions: RunConditions,
) -> Observation:
    """Train the one stage of this rank as in `measure_run`, and return its row; other ranks train as many steps.

    measured: the engine's observer. run: the layers of the stage.
    """
    meter = StageMeter(engine.device, lambda: resident_tensors(engine.layers, engine.optimizer))

    def load(microbatch: int) -> dict[str, Tensor]:
        return dummy_inputs(run.specs[0])

    with measured.watching(meter, resident_tensors(engine.layers, engine.optimizer)):
        train_step(engine, 1, minibatch, load)
    if measured.refused:
        raise CapslogError(f"the loss refuses dummy values ({measured.refused}); make it finite on any outputs")
    weights = ActionWeights(engine)
    probe = ActionProbe(engine.device, resident_tensors(engine.layers, engine.optimizer))

    def count() -> None:
        meter.count_static()
        weights.count_gradients()

    with measured.weighed_by(probe) as weighed, probe:
        train_step(engine, 2, minibatch, load, before_commit=count)
    for (kind, stage, context, residue), window in zip(weighed, probe.windows, strict=True):
        weights.add(kind, stage, context, window, residue.statistics)
    with measured.watching(meter):
        for step in range(3, 3 + _TIMED_STEPS):
            train_step(engine, step, minibatch, load)
    seconds = (statistics.median(meter.seconds["forward"]), statistics.median(meter.seconds["backward"]))
    bytes_ = (probe.peak_bytes, meter.static_bytes, meter.saved_bytes)
    update_bytes = probe.end_bytes - meter.static_bytes - (probe.lasting_bytes or 0)
    actions = weights.result(update_bytes, meter, probe.lasting_bytes)
    row = conditions.row((run.first, run.end), (run.specs[0], run.specs[-1]), bytes_, seconds, actions)
    return replace(row, variant=text_of(run.variants), compile_seconds=engine.compile_seconds or None)


def _observe_halves(engine: PipelineEngine, measured: MeasuredStage, minibatch: Minibatch, run: TrimmedRun) -> Halves:

    def load(microbatch: int) -> dict[str, Tensor]:
        return dummy_inputs(run.specs[0])

    train_step(engine, 1, minibatch, load)
    weights, probe = HalfWeights(), ActionProbe(engine.device, resident_tensors(engine.layers, engine.optimizer))
    with measured.weighed_by(probe) as weighed, probe:
        train_step(engine, 2, minibatch, load)
    for (kind, stage, context, residue), window in zip(weighed, probe.windows, strict=True):
        weights.add(kind, stage, context, window, residue)
    meter = StageMeter(engine.device, list)
    with measured.watching(meter):
        for step in range(3, 3 + _TIMED_STEPS):
            train_step(engine, step, minibatch, load)
    return weights.result(*(statistics.median(meter.seconds[name]) for name in ("input", "weight")))


def dummy_inputs(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return values for the tensors that cross a cut."""
    return {name: _dummy(spec) for name, spec in specs.items()}


def _dummy(spec: TensorSpec) -> Tensor:
    """Return values that most layers accept: floats in [0, 1), integers of 1 (valid ids, sizes above 0), False."""
    tensor = spec.empty()
    if spec.dtype.is_floating_point:
        return tensor.uniform_()
    return tensor.fill_(spec.dtype != torch.bool)


_WeighedAction = tuple[str, Stage, CallContext, ActionResidue]


class MeasuredStage(Observer):
    """Observer that opens a stage meter, or a probe, around the actions of an engine with one stage. `refused`: the
    loss's message about values that it refused.
    """

    def __init__(self) -> None:
        self.refused = ""
        self._meter: StageMeter | None = None
        self._own: list[Tensor] | None = None
        self._probe: ActionProbe | None = None
        self._weighed: list[_WeighedAction] = []

    @contextlib.contextmanager
    def weighed_by(self, probe: ActionProbe) -> Iterator[list[_WeighedAction]]:
        """Let the probe record every action of the block; yield the list of these actions, in the order of its windows,
        with the bytes that remain after each (`weighing.ActionResidue`).
        """
        self._probe, self._weighed = probe, []
        try:
            yield self._weighed
        finally:
            self._probe = None

    @contextlib.contextmanager
    def watching(self, meter: StageMeter, resident: list[Tensor] | None = None) -> Iterator[None]:
        """Let the meter time every forward and backward of the block. With the `resident` tensors, it instead counts
        the bytes that forwards save.
        """
        self._meter, self._own = meter, resident
        try:
            yield
        finally:
            self._meter = self._own = None

    def working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[None]:
        if self._probe is not None:
            return self._weighing(self._probe, kind, stage, context)
        if self._meter is None:
            return contextlib.nullcontext()
        if self._own is not None:
            return contextlib.nullcontext() if kind == "B" else self._saving(self._meter, self._own, stage, context)
        return contextlib.nullcontext() if kind == "R" else self._meter.timing(_TIMED[kind])

    @contextlib.contextmanager
    def _weighing(self, probe: ActionProbe, kind: str, stage: Stage, context: CallContext) -> Iterator[None]:
        with probe.action():
            yield
        self._weighed.append((kind, stage, context, ActionResidue.of(kind, stage, context)))

    @contextlib.contextmanager
    def _saving(self, meter: StageMeter, resident: list[Tensor], stage: Stage, context: CallContext) -> Iterator[None]:
        microbatch = context.index
        sources = lambda: stage.kept(microbatch), lambda: stage.entries(microbatch), lambda: stage.in_loss
        with meter.saving(storages_of(resident), *sources):
            yield
        self.refused = self.refused or stage.refusals.get(context.index, "")
