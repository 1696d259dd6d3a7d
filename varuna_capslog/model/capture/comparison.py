"""One step of a captured model beside the model's own, on its example: outputs, gradients and buffers.

`capture_layers` asks here before a model with weights trains, for whatever it has not noticed otherwise. What is
captured runs other operators than the model only to rounding; a backward that was lost, or Python that was not run,
makes another step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.export import LEFT
from varuna_capslog.model.capture.exporting import bare, state_sentence
from varuna_capslog.model.capture.leaves import named_leaves
from varuna_capslog.model.capture.runtime import runs_its_children
from varuna_capslog.model.capture.step_memory import (
    KeptTensor,
    MemoryGuard,
    NoRoom,
    StepMemory,
    lacks_memory,
    with_room,
)
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.capture.trial import same_bits, untouched
from varuna_capslog.model.python_state import PythonState, StateChange
from varuna_capslog.model.random_states import RandomStates, seed_generators
from varuna_capslog.model.training_modes import in_training, put_in_training

__all__ = ["compare_steps"]

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3, torch.complex64: 1e-3}
"""By which part of its largest value a tensor may differ; those of fewer bits: _COARSE."""
_COARSE = 0.05
_LEAST = 1e-3
"""A gradient far below the model's largest one is compared by this part of the latter (rule 1 of the engine)."""


@dataclass
class _OneStep:
    """What a step made, by name."""

    outputs: dict[str, KeptTensor]
    gradients: dict[str, KeptTensor | None]
    buffers: dict[str, KeptTensor]


class _Names(NamedTuple):
    """Names of what enters and leaves captured layers; ours: whether the one output of the model has a name of ours."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    ours: bool

    def chosen(self, result: Any) -> dict[str, Tensor]:
        """Those tensors that leave the layers, of all that the model returns."""
        leaves = {name: leaf for name, leaf in named_leaves(result, self.inputs) if isinstance(leaf, Tensor)}
        if self.ours:
            return dict(zip(self.outputs, leaves.values(), strict=True))
        return {name: leaves[name] for name in self.outputs}


class _SameDraws(MemoryGuard):
    """While it is open, random operators of torch give the same numbers, in whatever order and layout they draw them:
    dropout keeps everything.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return super().__torch_dispatch__(func, types, args, kwargs)
        names = [one.name for one in func._schema.arguments]
        if "dropout_p" in names:  # of fused attention
            at = names.index("dropout_p")
            args, kwargs = (
                (*args[:at], 0.0, *args[at + 1 :])[: len(args)],
                {**kwargs} | dict.fromkeys({"dropout_p"} & {*kwargs}, 0.0),
            )
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        return pytree.tree_map_only(
            Tensor, functools.partial(_fill, func), super().__torch_dispatch__(func, types, args, kwargs)
        )


def _fill(func: Any, drawn: Tensor) -> Tensor:
    name = func.overloadpacket.__name__
    if name == "randperm":
        return drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
    kept = 1.0 if name.startswith("bernoulli") else 0.5
    return drawn.fill_(kept if drawn.is_floating_point() or name.startswith("bernoulli") else 0)


def compare_steps(
    model: nn.Module, captured: CapturedLayers, example: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> str | None:
    """How a step of the captured layers differs from one of the model; None where it does not.

    Where the model's own step fails there is nothing to compare: it will fail where it trains, with its own error.
    Where two steps do not fit into memory, their large tensors become files; where that does not help either, the log
    says that nothing was compared.

    Args:
        example: positional and keyword arguments.

    Raises:
        CapslogError: a model whose code has changed something in the first step, by which its next one is another.
    """
    try:
        return with_room(model, functools.partial(_compare, model, captured, example))
    except NoRoom as error:
        _log.warning(
            "the captured %s was not compared with a step of the module itself: %s. A backward of the model's own that "
            "the capture has lost would not be noticed; capture it once where more is free",
            type(model).__name__,
            error,
        )
        return None


def _compare(
    model: nn.Module,
    captured: CapturedLayers,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    memory: StepMemory,
) -> str | None:
    layers, inputs, outputs = captured
    outputs = tuple(name for name in outputs if not name.startswith(LEFT))
    names = _Names(inputs, outputs, runs_its_children(model))
    arguments = bare(example[0]), {name: bare(value) for name, value in example[1].items()}

    needed = [set(outputs)]  # by the later layers and at the end
    for layer in reversed(layers[1:]):
        needed.append((needed[-1] - {*layer.writes}) | {*layer.reads})

    def run() -> Mapping[str, Tensor]:
        leaves = pytree.tree_leaves(_fresh(arguments))
        values = dict(zip(inputs, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True))
        del leaves
        for layer, later in zip(layers, reversed(needed), strict=True):
            written = layer(values)
            values = {name: tensor for name, tensor in (values | written).items() if name in later}
        return {name: values[name] for name in outputs}

    try:
        expected, changes = _plain_step(model, arguments, names, memory)
    except Exception as error:
        if lacks_memory(error) or "saved tensor hooks" in str(error):
            raise
        return None
    _refuse_changes(model, arguments, names, expected, changes, memory)
    modules = [layer.module for layer in layers]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        with in_training(model):
            put_in_training(modules)
            found = _step(model, run, memory)[0]
    except Exception as error:
        if lacks_memory(error):
            raise
        return _failure(error)
    finally:
        for part, mode in modes:
            part.training = mode
    return _difference(expected, found)


def _failure(error: Exception) -> str:
    return f"it fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _fresh(arguments: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.clone, arguments)


def _refuse_changes(
    model: nn.Module,
    arguments: Any,
    names: _Names,
    expected: _OneStep,
    changes: Sequence[StateChange],
    memory: StepMemory,
) -> None:
    """Refuses a model whose step is another one by what its code has changed in an earlier one."""
    for change in changes:
        if change.kind == "iterator":
            raise CapslogError(state_sentence(model, [change]))
    changes = [one for one in changes if one.put is not None]
    counters = [one for one in changes if one.counts]
    states = [[(one, one.after) for one in changes]] if changes else []
    states += [[(one, type(one.after)(value)) for one in counters] for value in (7919, 10**9) if counters]
    for state in states:
        what = _difference(expected, _plain_step(model, arguments, names, memory, state)[0], exact=True)
        if what is None:
            continue
        if _difference(expected, _plain_step(model, arguments, names, memory)[0], exact=True) is not None:
            raise CapslogError(
                f"two steps of the {type(model).__name__} from the same state and the same random numbers differ "
                f"({what}); a pipeline computes parts of a step again, so let it depend on its inputs and on random "
                "numbers of torch, random and numpy alone"
            )
        raise CapslogError(state_sentence(model, [one for one, _ in state]))


def _plain_step(
    model: nn.Module,
    arguments: Any,
    names: _Names,
    memory: StepMemory,
    state: Sequence[tuple[StateChange, Any]] = (),
) -> tuple[_OneStep, list[StateChange]]:
    def run() -> Mapping[str, Tensor]:
        args, kwargs = _fresh(arguments)
        result = model(*args, **kwargs)
        return names.chosen(result)

    with in_training(model):
        return _step(model, run, memory, state)


def _step(
    model: nn.Module,
    run: Callable[[], Mapping[str, Tensor]],
    memory: StepMemory,
    state: Sequence[tuple[StateChange, Any]] = (),
) -> tuple[_OneStep, list[StateChange]]:
    """A forward and a backward; and what the model's code has changed, which is put back.

    Code that refuses any but a whole backward, as torch's old checkpointing does, gets one, unless hooks wait for it
    that may change weights.

    state: what was changed before.
    """
    try:
        return _one_step(model, run, memory, state, whole=False)
    except RuntimeError as error:
        if lacks_memory(error) or any(getattr(one, "_post_accumulate_grad_hooks", None) for one in model.parameters()):
            raise
    return _one_step(model, run, memory, state, whole=True)


def _one_step(
    model: nn.Module,
    run: Callable[[], Mapping[str, Tensor]],
    memory: StepMemory,
    state: Sequence[tuple[StateChange, Any]],
    whole: bool,
) -> tuple[_OneStep, list[StateChange]]:
    """As above. whole: make a whole backward, not one for the parameters alone."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with (
        _left_alone(model) as kept,
        untouched(model, memory) as values,
        _gradients_kept(parameters),
        memory.saving(),
        _SameDraws(memory),
        torch.enable_grad(),
    ):
        for change, value in state:
            assert change.put is not None
            change.put(value)
        before = PythonState(dict(model.named_modules()), files=True) if state else kept
        for parameter in parameters.values():
            parameter.grad = None
        outputs = run()
        ends = [(name, tensor) for name, tensor in outputs.items() if tensor.requires_grad]
        gradients: dict[str, KeptTensor | None] = {}
        if ends and parameters:
            tensors = [tensor for _, tensor in ends]
            directions = [_direction(tensor) for tensor in tensors]
            gradients = memory.gradients(tensors, directions, parameters, whole)
        changes = [*before.changes(), *_changed_parameters(model, values)]
        buffers = {name: memory.keep(one.detach(), changes=True) for name, one in model.named_buffers()}
        made = {name: memory.keep(tensor.detach()) for name, tensor in outputs.items()}
    return _OneStep(made, gradients, buffers), changes


def _changed_parameters(model: nn.Module, values: Mapping[str, KeptTensor]) -> Iterator[StateChange]:
    """The parameters that the model's own forward has written into.

    values: at its beginning, by name.
    """
    for name, kept in values.items():
        parameter, before = model.get_parameter(name), kept()
        if not same_bits(parameter, before):
            module, _, own = name.rpartition(".")
            after = parameter.detach().clone()
            yield StateChange(module, own, "parameter", before, after, functools.partial(_write, parameter))


def _write(parameter: Tensor, value: Any) -> None:
    parameter.data.copy_(value)


@contextmanager
def _gradients_kept(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Afterwards the parameters have the gradients that they have now."""
    before = {name: one.grad for name, one in parameters.items()}
    try:
        yield
    finally:
        for name, one in parameters.items():
            one.grad = before[name]


def _direction(tensor: Tensor) -> Tensor:
    """Random numbers as the gradient of an output: they tell apart what a sum would not."""
    generator = torch.Generator().manual_seed(tensor.numel())
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return values.to(device=tensor.device, dtype=tensor.dtype)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[PythonState]:
    """While it is open, generators beside torch's begin from one seed; then these and attributes are put back."""
    state = PythonState(dict(model.named_modules()), files=True)
    draws = RandomStates(state.generators)
    seed_generators(state.generators, 0)
    try:
        yield state
    finally:
        state.put_back()
        draws.put_back()


def _difference(expected: _OneStep, found: _OneStep, exact: bool = False) -> str | None:
    """The first difference, in words."""
    largest = max((_largest(one()) for one in expected.gradients.values() if one is not None), default=0.0)
    pairs: list[tuple[str, KeptTensor | None, KeptTensor | None, float]] = []
    for name, tensor in expected.outputs.items():
        # of whole numbers, such as a largest entry's place, rounding may choose others
        if exact or tensor().is_floating_point() or tensor().is_complex():
            pairs.append((f"the output {name!r}", tensor, found.outputs[name], 0.0))
    for name, gradient in expected.gradients.items():
        pairs.append((f"the gradient of {name!r}", gradient, found.gradients.get(name), _LEAST * largest))
    for name, tensor in expected.buffers.items():
        pairs.append((f"the buffer {name!r}", tensor, found.buffers.get(name), 0.0))
    for what, one, other, least in pairs:
        how = _tensors_differ(one and one(), other and other(), least, exact)
        if how is not None:
            return f"{what} {how}"
    return None


def _tensors_differ(one: Tensor | None, other: Tensor | None, least: float, exact: bool) -> str | None:
    """How the second tensor differs from the first, in words; a missing one is zeros.

    least: what counts as the first one's largest value where that is smaller.
    """
    known = one if one is not None else other
    if known is None:
        return None
    wanted, given = (known.new_zeros(()).expand(known.shape) if each is None else each for each in (one, other))
    if wanted.shape != given.shape:
        return f"has the shape {list(given.shape)} instead of {list(wanted.shape)}"
    if all(torch.equal(*pieces) for pieces in _pieces(wanted, given)):
        return None
    gap, size, same_rest = 0.0, least, True
    for first, second in _pieces(wanted, given):
        finite = torch.isfinite(first) & torch.isfinite(second)
        gap, size = max(gap, _size((first - second)[finite])), max(size, _size(first[finite]))
        same_rest &= torch.equal(torch.isnan(first), torch.isnan(second))
    allowed = 0.0 if exact else _TOLERANCE.get(known.dtype, _COARSE)
    if not same_rest or gap > allowed * size:
        return f"differs by {gap / max(size, 1e-300):.1e} of its largest value"
    return None


_PIECE = 1 << 18
"""Numbers that are compared at once, as float64: a copy of all of a large weight may not fit into memory."""


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(map(_numbers, one.detach().reshape(-1).split(_PIECE)) for one in tensors), strict=True)


def _numbers(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.double()


def _largest(value: Tensor) -> float:
    return max((_size(piece) for piece in value.detach().reshape(-1).split(_PIECE)), default=0.0)


def _size(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0
