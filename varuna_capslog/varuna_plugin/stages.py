"""Reduces a model to one stage: frees other stages' parameters, skips modules before it, activates its two CutPoints.

Replaces `PartitionedModel.initialize` and all that it calls. Rank 0 traces the model and sends the trace to the others,
so nothing is written into the current folder and every rank has the same partition.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiling.trim import dummy_inputs
from varuna_capslog.varuna_plugin.options import current
from varuna_capslog.varuna_plugin.tracing import (
    CutSpec,
    Partition,
    Phantom,
    TieGroup,
    Trace,
    flatten_cut,
    make_phantoms,
    refuse_phantom,
    tie_groups,
    trace_model,
)
from varuna_capslog.varuna_plugin.wire import Bundle, Room

__all__ = ["ANCHOR", "CutShapes", "Draws", "StageRun", "cut_forward", "initialize", "kept_names", "reduce_to_stage"]


# -- A rank's stage while it trains: the position of its forward, and the actions of its two CutPoints.
#
# A CutPoint does nothing, receives the stage's inputs, or sends the stage's outputs and ends its forward. It calls the
# functions that Varuna sets for the original (`recv_fn`, `send_fn` and `set_ret_val_func`), with a `Bundle` in place of
# the tensor.


class StageDone(Exception):
    """Exception that ends a stage's forward at its last cut. Varuna's forward ignores it: the return value is set."""


def cut_forward(self: Any, *inputs: Any) -> Any:
    """Replace `CutPoint.forward`: return the arguments unless the plugin has set a function for this CutPoint."""
    if self.barrier_event is not None:
        self.barrier_event.record()
    if self.boundary_func is not None:
        self.boundary_func()
    if self.cp_func is not None:
        return self.cp_func(*inputs)
    return inputs[0] if len(inputs) == 1 else inputs


class _Receive(torch.autograd.Function):
    """Autograd function that puts received tensors into the graph; its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: EntryCut, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # in a tuple: a tensor argument that is returned becomes a view, which in-place operations may not change
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[tensor for tensor, spec in zip(tensors, entry.spec.tensors, strict=True) if not spec.requires_grad]
        )
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.entry.send_gradients(gradients)
        return None, None, None


class _Send(torch.autograd.Function):
    """Autograd function that ends a stage's graph in a dummy scalar; its backward receives the gradients of the cut."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaving: ExitCut, *tensors: Tensor) -> Tensor:
        ctx.leaving = leaving
        for needs, spec in zip(ctx.needs_input_grad[2:], leaving.spec.tensors, strict=True):
            if needs and not spec.requires_grad:
                raise CapslogError(
                    f"a tensor at CutPoint {leaving.spec.name!r} needs a gradient now, but did not when Varuna was "
                    "built; unfreeze parameters before, or build Varuna again"
                )
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.leaving.receive_gradients()


@functools.cache
def anchor_on(device: torch.device) -> Tensor:
    """Return an argument that puts a function into the graph when no other needs a gradient; it gets no gradient."""
    return torch.empty(0, device=device, requires_grad=True)


_ONE_TENSOR = pytree.tree_flatten((torch.empty(0),))[1]


class EntryCut:
    """The cut before a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        self._differentiable = any(tensor.requires_grad for tensor in spec.tensors)

    def __call__(self, *_: Any) -> Any:
        """Return the received tensors in the structure that the CutPoint returns without a cut."""
        tensors = self.point.recv_fn().tensors
        self.run.active = True
        if self._differentiable and torch.is_grad_enabled():
            tensors = _Receive.apply(anchor_on(self.point.device), self, tensors)
        arguments = self.spec.arguments(tensors)
        return arguments[0] if len(arguments) == 1 else arguments

    def send_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Send gradients to the stage before; one message per microbatch, even where no tensor needs a gradient."""
        wanted = zip(gradients, self.spec.tensors, strict=True)
        self.point.send_fn(self.run.bundle_type(tuple(g for g, spec in wanted if spec.requires_grad)), grads=True)
        self.run.gradients_sent = True


class ExitCut:
    """The cut behind a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        # a single tensor, as in models for unpatched Varuna
        self._one = spec.present == (True,) and spec.structure == _ONE_TENSOR

    def __call__(self, *inputs: Any) -> Any:
        """Send the tensors and end the forward: later code belongs to other stages."""
        plain = self._one and len(inputs) == 1 and isinstance(inputs[0], Tensor)
        tensors = list(inputs) if plain else self._checked(inputs)
        device = self.point.device
        token = (
            _Send.apply(anchor_on(device), self, *tensors)
            if torch.is_grad_enabled()
            else torch.zeros((), device=device)
        )
        self.point.send_fn(self.run.bundle_type(tuple(tensors)))
        self.run.reached_exit = True
        self.point.set_ret_val_func(token)
        raise StageDone

    def _checked(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors among the arguments, which must have the traced structure."""
        refuse_phantom(inputs, f"CutPoint {self.spec.name!r} is given")
        tensors, present, structure = flatten_cut(inputs, self.spec.name)
        if (present, structure) != (self.spec.present, self.spec.structure):
            raise CapslogError(
                f"CutPoint {self.spec.name!r} is given {structure} here, but {self.spec.structure} when the model was "
                "traced; give it the same number of tensors in the same structure every time"
            )
        return tensors

    def receive_gradients(self) -> tuple[Tensor | None, ...]:
        """Return a gradient or None for each tensor of the cut."""
        gradients = iter(self.point.recv_fn(grads=True).tensors)
        self.run.watch_backward("gradients arrived")
        return tuple(next(gradients) if spec.requires_grad else None for spec in self.spec.tensors)


class Draws:
    """Random numbers that depend on the step, the microbatch and the piece, never on cuts, ranks or order.

    Varuna's own random stream belongs to a rank, so other cuts draw other numbers. Here the device's generator is
    seeded whenever a forward enters a piece, as our engine seeds a layer. Used where cuts change during a run.

    points: the model's CutPoints in the order of the forward; sets their `boundary_func`, which Varuna does not use
    here. seed: seed of the run.
    """

    def __init__(self, points: Iterable[Any], device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._step = self._microbatch = 0
        self._numbers: dict[int, int] = {}
        for index, point in enumerate(points):
            point.boundary_func = lambda piece=index + 1: self._enter(piece)

    def begin_step(self, step: int, batches: Mapping[int, dict[str, Any]]) -> None:
        """Begin a step. batches: microbatches by number, the same objects with which the model is called."""
        self._step = step
        self._numbers = {id(batch): index for index, batch in batches.items()}

    def begin_forward(self, inputs: dict[str, Any]) -> None:
        """Begin a forward or recomputation of the microbatch with these inputs."""
        self._microbatch = self._numbers.get(id(inputs), 0)
        self._enter(0)

    def _enter(self, piece: int) -> None:
        seed_layer(self._device, self._seed, self._step, self._microbatch, piece)


class StageRun:
    """A rank's stage, and the position of its forward.

    Attributes:
        ties: all ties of the model; each rank acts on those of its stage.
        norms: the modules of the stage that keep running statistics.
        entry, exit: the stage's CutPoints, None at the pipeline's ends.
        bundle_type: class of the bundles that leave the stage.
        rooms: frame sizes of the messages in each direction, by (task, "in" or "out").
        active, reached_exit: True once the forward has reached the stage's first piece, and the cut behind the stage.
        gradients_sent: True once the backward under way has sent gradients to the stage before.
        draws: seeds random numbers where they must not depend on the cuts; else None.
        watch_backward: called with "begun", "gradients arrived" (from the stage behind) and "ended" in each backward.
    """

    def __init__(self, partition: Partition, stage: int, ties: Sequence[TieGroup]) -> None:
        self.partition, self.stage, self.ties = partition, stage, tuple(ties)
        self.bundle_type = Bundle
        self.rooms = defaultdict[tuple[int, str], Room](Room)
        self.entry: EntryCut | None = None
        self.exit: ExitCut | None = None
        self.active = self.reached_exit = self.gradients_sent = False
        self.draws: Draws | None = None
        self.watch_backward: Callable[[str], None] = lambda moment: None
        self.norms: list[nn.Module] = []

    def begin(self) -> None:
        """Begin a forward."""
        self.active, self.reached_exit = self.stage == 0, False


# -- Model trimming on Varuna (CAPSlog, Sec. III-A): stages that are not to be measured pass on dummy tensors.
#
# A trimmed stage receives and sends tensors of the same shapes as the whole stage, in forward and backward, but holds
# and computes nothing, so a small device suffices for its rank. The values have no meaning; the memory and time of the
# stages of interest do.


def kept_names(partition: Partition, ties: Sequence[TieGroup], stage: int) -> set[str]:
    """Return the parameters that a trimmed stage shares with stages of interest: gradient sums need all holders."""
    return {name for tie in ties for name in tie.names if stage in partition.stages_of[name]}


class CutShapes:
    """Function from inputs to the specs of the tensors at each cut, by a forward on fake tensors, once per input size.

    model: the whole model; it is copied without its parameters' memory, and may be reduced afterwards. names: names of
    the CutPoints, in the order of the forward.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            memo: dict[int, Any] = {id(parameter): copy.deepcopy(parameter) for parameter in model.parameters()}
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        self._model = copy.deepcopy(model, memo)
        self._cut_specs: list[tuple[TensorSpec, ...]] = []
        self._known: dict[str, list[tuple[TensorSpec, ...]]] = {}
        self._count = len(names)
        points = dict(self._model.named_modules())
        for name in names:
            points[name].cp_func = functools.partial(self._report, name)

    def __call__(self, inputs: Mapping[str, Any]) -> list[tuple[TensorSpec, ...]]:
        """Return the specs of each cut's tensors. Raises CapslogError where a shape depends on tensor values."""
        key = repr(pytree.tree_map_only(Tensor, lambda leaf: (tuple(leaf.shape), leaf.dtype), dict(inputs)))
        if key not in self._known:
            self._known[key] = self._run(pytree.tree_map_only(Tensor, self._mode.from_tensor, dict(inputs)))
        return self._known[key]

    def _run(self, fakes: dict[str, Any]) -> list[tuple[TensorSpec, ...]]:
        self._cut_specs = []
        # running statistics are copies, so the fake forward may change them
        try:
            with self._mode, torch.enable_grad():
                self._model(**fakes)
        except StageDone:
            pass
        except Exception as error:
            raise CapslogError(
                f"the shapes at the cuts cannot be found without computing ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}): code before a cut asks tensors for their values; move it behind "
                "the last cut, or run all stages"
            ) from error
        return self._cut_specs

    def _report(self, name: str, *arguments: Any) -> Any:
        tensors, _, _ = flatten_cut(arguments, name)
        self._cut_specs.append(tuple(TensorSpec.of(tensor) for tensor in tensors))
        if len(self._cut_specs) == self._count:
            raise StageDone  # later code crosses no cut
        return arguments[0] if len(arguments) == 1 else arguments


class _Between(torch.autograd.Function):
    """Autograd function that puts dummy tensors into the graph; its backward gives zeros to the received tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: tuple[Tensor, ...], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = [TensorSpec.of(tensor) for tensor in received]
        ctx.wanted = [tensor.requires_grad for tensor in received]
        ctx.device = anchor.device
        ctx.mark_non_differentiable(*[tensor for tensor in made if not tensor.dtype.is_floating_point])
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [spec.zeros(ctx.device) if wanted else None for spec, wanted in zip(ctx.specs, ctx.wanted, strict=True)]
        return None, None, *zeros


def replace_forward(model: nn.Module, run: StageRun, shapes: CutShapes | None, device: torch.device) -> None:
    """Replace a reduced model's forward by that of a trimmed stage. shapes: specs at the cuts; None: as traced."""

    def forward(**inputs: Any) -> Any:
        received: list[Tensor] = []
        if run.entry is not None:
            received = [leaf for leaf in pytree.tree_leaves(run.entry.point(None)) if isinstance(leaf, Tensor)]
        anchor = anchor_on(device)
        if run.exit is None:
            return _Between.apply(anchor, (torch.zeros((), device=device),), *received)[0]
        cut = run.partition.cuts[run.stage + 1] - 1
        leaves = run.exit.spec.tensors if shapes is None else shapes(inputs)[cut]
        specs = {str(index): spec for index, spec in enumerate(leaves)}
        made = tuple(value.to(device) for value in dummy_inputs(specs).values())
        tensors = _Between.apply(anchor, made, *received)
        # tensors that need no gradient in the model must need none here
        wanted = zip(tensors, run.exit.spec.tensors, strict=True)
        leaving = [tensor if spec.requires_grad else tensor.detach() for tensor, spec in wanted]
        return run.exit.point(*run.exit.spec.arguments(leaving))

    model.forward = forward


# -- Reduces a model to one stage


_log = logging.getLogger(__name__)

ANCHOR = "capslog_anchor"
"""Name of the empty parameter of a stage without parameters: optimizers refuse empty lists."""

_TRACED_SAMPLES = 2
"""Samples of the traced batch; one sample would fail in batch normalisation over features."""


def initialize(self: Any, get_batch_fn: Callable[..., Any], from_cache: bool = False) -> None:
    """Replace `PartitionedModel.initialize`; `from_cache` has no meaning here, since nothing is cached in files.

    Raises CapslogError on every rank: the trace failed, the ranks have different models or cut lists, the cuts do not
    fit the model, or a forward changes buffers.
    """
    from varuna.partitioned_model import CutPoint

    options = current()
    trace = options.trace or _shared_trace(self.module, get_batch_fn, CutPoint)
    partition = _agreed_partition(trace, self.module, self.num_stages)
    if trace.moving and self.num_stages > 1:
        raise CapslogError(
            f"a forward changes the buffers {', '.join(trace.moving[:3])}, which are no running statistics; Varuna "
            "runs most forwards twice and would change them twice: keep such state out of the model"
        )
    run = StageRun(partition, self.stage, tie_groups(partition, self.shared_weights or ()))
    _reduce(self.module, run, torch.device(self.device))
    norms = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    run.norms = [module for module in norms if module._buffers.get("running_mean") is not None]
    self.capslog = run
    points = {name: module for name, module in self.module.named_modules() if isinstance(module, CutPoint)}
    self.pre_cp, run.entry = _activate_cut(self, points, partition.entry(self.stage), self.stage, EntryCut)
    self.post_cp, run.exit = _activate_cut(self, points, partition.exit(self.stage), self.stage + 1, ExitCut)
    # attributes that the rest of Varuna reads
    self.num_cutpoints = len(trace.cuts)
    self.cuts_per_stage = len(partition.pieces(self.stage))
    self.ordered_modules = {name: points[name] for name in (cut.name for cut in trace.cuts)}
    self.param_name_to_pstage = self.parameter_names_to_cuts()
    self.shared_weight_stages = None
    _log.info("stage %d of %d holds pieces %s", self.stage, self.num_stages, list(partition.pieces(self.stage)))


def _reduce(model: nn.Module, run: StageRun, device: torch.device) -> None:
    """Reduce the model to the stage's part; a stage that is not of interest passes on dummy tensors instead."""
    options = current()
    interest = options.stages_of_interest
    if interest is not None:
        if max(interest) >= run.partition.num_stages:
            raise CapslogError(
                f"stages_of_interest={list(interest)}, but the stages are 0 to {run.partition.num_stages - 1}"
            )
        # other ties have no stage that computes
        run.ties = tuple(tie for tie in run.ties if set(tie.stages) & set(interest))
    if interest is None or run.stage in interest:
        reduce_to_stage(model, run)
        return
    cuts = run.partition.trace.cuts
    shapes = None if options.trace is not None else CutShapes(model, tuple(cut.name for cut in cuts))
    reduce_to_stage(model, run, kept_names(run.partition, run.ties, run.stage))
    replace_forward(model, run, shapes, device)


def _agreed_partition(trace: Trace, model: nn.Module, num_stages: int) -> Partition:
    """Return the partition, if all ranks have the same; a rank's error is raised on every rank, so that none waits."""
    partition = problem = None
    try:
        partition = Partition(trace, current().cuts_for(trace.num_pieces, num_stages))
        if list(trace.parameters) != [name for name, _ in model.named_parameters()]:
            raise CapslogError("its model has other parameters than rank 0's; build the same model on every rank")
    except CapslogError as error:
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (partition and partition.cuts, problem))
    for rank, (cuts, problem) in enumerate(everyone):
        if problem is not None:
            raise CapslogError(f"rank {rank}: {problem}")
        if cuts != everyone[0][0]:
            raise CapslogError(
                f"rank {rank} is configured with cuts={list(cuts)}, rank 0 with {list(everyone[0][0])}; configure the "
                "same on every rank"
            )
    assert partition is not None
    return partition


def _shared_trace(model: nn.Module, get_batch: Callable[..., Any], cut_type: type[nn.Module]) -> Trace:
    """Trace on rank 0 and send the trace to all; a failure is raised on every rank, so that none waits."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [trace_model(model, get_batch(_TRACED_SAMPLES, device="cpu"), cut_type)]
        except Exception as error:
            cause = str(error) if isinstance(error, CapslogError) else f"{type(error).__name__}: {error}"
            message = [f"the model cannot be traced on get_batch_fn({_TRACED_SAMPLES}, device='cpu'): {cause}"]
            _log.debug("tracing failed", exc_info=True)
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], str):
        raise CapslogError(message[0])
    trace: Trace = message[0]
    return trace


def _activate_cut(
    partitioned: Any, points: dict[str, Any], spec: Any, index: int, kind: type[EntryCut] | type[ExitCut]
) -> tuple[Any, Any]:
    """Return the CutPoint of `spec` with the attributes that Varuna sets, and its function; two None without `spec`."""
    if spec is None:
        return None, None
    point = points[spec.name]
    point.cp_index, point.stage, point.num_stages = index, partitioned.stage, partitioned.num_stages
    point.set_ret_val_func, point.device, point.fp16 = partitioned.set_ret_val, partitioned.device, False
    point.cp_func = kind(point, spec, partitioned.capslog)
    return point, point.cp_func


def reduce_to_stage(model: nn.Module, run: StageRun, kept: set[str] | None = None) -> None:
    """Free every parameter and buffer that the stage does not use, and skip modules before its first cut.

    The names of the remaining tensors do not change, so that checkpoints are the same for any cut list. kept: names to
    keep, in place of those that the stage uses.
    """
    foreign = {
        name
        for name, stages in run.partition.stages_of.items()
        if (run.stage not in stages if kept is None else name not in kept)
    }
    named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in list(store.items()):
                if tensor is not None and named[id(tensor)] in foreign:
                    del store[key]
                    module.__dict__[key] = Phantom(f"{path}.{key}" if path else key, dims=tensor.dim())
                    # other references (an LSTM's list of its weights) must not keep the memory
                    tensor.data = tensor.data.new_empty(0)
    for name, structure in _skipped_modules(run.partition, run.stage).items():
        _guard(model.get_submodule(name), name, structure, run)
    if next(model.parameters(), None) is None:
        model.register_parameter(ANCHOR, nn.Parameter(torch.zeros(0)))


def _skipped_modules(partition: Partition, stage: int) -> dict[str, Any]:
    """Return the outermost modules with a call wholly before the stage's first piece -> structure of their results."""
    first = partition.cuts[stage]
    calls = partition.trace.calls
    skipped: dict[str, Any] = {}
    for call in calls:
        parent = None if call.parent is None else calls[call.parent]
        if call.last < first and (parent is None or parent.last >= first):
            if call.module in skipped and skipped[call.module] != call.structure:
                skipped[call.module] = ("value",)
            skipped.setdefault(call.module, call.structure)
    return skipped


def _guard(module: nn.Module, name: str, structure: Any, run: StageRun) -> None:
    """Make the module return phantoms until the forward has reached the stage's first piece."""
    real = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if run.active:
            return real(*arguments, **keywords)
        return make_phantoms(structure, f"the result of {name!r}")

    module.forward = forward
