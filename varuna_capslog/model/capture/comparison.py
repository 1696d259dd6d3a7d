"""Compares one step of a captured model with the model's own on its example: outputs, gradients and buffers.

It notices differences that other checks missed, before a model with weights trains. The captured layers may run other
operators than the model, equal up to rounding; a lost backward, or skipped Python code, makes a different step.
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
from varuna_capslog.model.capture.export import LEFT, named_leaves
from varuna_capslog.model.capture.exporting import bare, state_sentence
from varuna_capslog.model.capture.runtime import runs_its_children
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.capture.trial import (
    KeptTensor,
    MemoryGuard,
    NoRoom,
    StepMemory,
    lacks_memory,
    same_bits,
    untouched,
    with_room,
)
from varuna_capslog.model.layer import in_training, put_in_training
from varuna_capslog.model.python_state import PythonState, RandomStates, StateChange, seed_generators

__all__ = ["compare_steps"]

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3, torch.complex64: 1e-3}
"""Fraction of its largest value by which a tensor may differ; for dtypes of fewer bits: _COARSE."""
_COARSE = 0.05
_LEAST = 1e-3
"""Fraction of the model's largest gradient: smaller gradients are compared on this scale."""


@dataclass
class _OneStep:
    outputs: dict[str, KeptTensor]
    gradients: dict[str, KeptTensor | None]
    buffers: dict[str, KeptTensor]


class _Names(NamedTuple):
    """Names of the tensors that enter and leave captured layers. ours: True where the capture named the only output."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    ours: bool

    def chosen(self, result: Any) -> dict[str, Tensor]:
        """Select the tensors that leave the layers from all that the model returns."""
        leaves = {name: leaf for name, leaf in named_leaves(result, self.inputs) if isinstance(leaf, Tensor)}
        if self.ours:
            return dict(zip(self.outputs, leaves.values(), strict=True))
        return {name: leaves[name] for name in self.outputs}


class _SameDraws(MemoryGuard):
    """Mode in which torch's random operators give the same numbers in any order and layout: dropout drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return super().__torch_dispatch__(func, types, args, kwargs)
        names = [argument.name for argument in func._schema.arguments]
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
    """Return how a step of the captured layers differs from a step of the model, or None. example: positional and
    keyword arguments.

    Where the model's own step fails, nothing is compared: training will fail with the model's own error. Where two
    steps do not fit into memory, their large tensors become files; where that does not help either, the log says that
    nothing was compared.

    Raises CapslogError where the model's code changed something in the first step that makes its next step different.
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

    needed = [set(outputs)]  # tensors that later layers read, or that leave the chain
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
            captured_step = _step(model, run, memory)[0]
    except Exception as error:
        if lacks_memory(error):
            raise
        return _failure(error)
    finally:
        for part, mode in modes:
            part.training = mode
    return _difference(expected, captured_step)


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
    """Refuse a model whose step depends on what its code changed in an earlier step."""
    for change in changes:
        if change.kind == "iterator":
            raise CapslogError(state_sentence(model, [change]))
    changes = [change for change in changes if change.put is not None]
    counters = [change for change in changes if change.counts]
    states = [[(change, change.after) for change in changes]] if changes else []
    states += [[(counter, type(counter.after)(value)) for counter in counters] for value in (7919, 10**9) if counters]
    for state in states:
        details = _difference(expected, _plain_step(model, arguments, names, memory, state)[0], exact=True)
        if details is None:
            continue
        if _difference(expected, _plain_step(model, arguments, names, memory)[0], exact=True) is not None:
            raise CapslogError(
                f"two steps of the {type(model).__name__} from the same state and the same random numbers differ "
                f"({details}); a pipeline computes parts of a step again, so let it depend on its inputs and on random "
                "numbers of torch, random and numpy alone"
            )
        raise CapslogError(state_sentence(model, [change for change, _ in state]))
    if made := [change for change in changes if isinstance(change.after, Tensor)]:
        # a value computed from a batch, such as an initial scale, changes nothing for that batch
        others = _another_batch(arguments)
        try:
            fresh, later = (_plain_step(model, others, names, memory, state)[0] for state in ([], states[0]))
        except Exception as error:
            if lacks_memory(error):
                raise
            return
        if _difference(fresh, later, exact=True) is not None:
            raise CapslogError(state_sentence(model, made))


def _another_batch(arguments: Any) -> Any:
    """Return inputs of the same shapes with other values: every sample is the first one, and floats are halved."""

    def other(tensor: Tensor) -> Tensor:
        tensor = tensor[:1].expand_as(tensor).clone() if tensor.dim() else tensor
        return tensor / 2 if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, other, arguments)


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
    """Run a forward and a backward; return also the changes by the model's code, which are undone.

    Code that accepts only a whole backward, such as torch's old checkpointing, gets a whole backward, unless parameters
    have post-accumulate hooks, which may change weights. state: changes of an earlier step, made before this step.
    """
    try:
        return _one_step(model, run, memory, state, whole=False)
    except RuntimeError as error:
        if lacks_memory(error) or any(
            getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()
        ):
            raise
    return _one_step(model, run, memory, state, whole=True)


def _one_step(
    model: nn.Module,
    run: Callable[[], Mapping[str, Tensor]],
    memory: StepMemory,
    state: Sequence[tuple[StateChange, Any]],
    whole: bool,
) -> tuple[_OneStep, list[StateChange]]:
    """Run `_step` once. whole: compute the whole backward, not only the one for the parameters."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
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
        buffers = {name: memory.keep(buffer.detach(), changes=True) for name, buffer in model.named_buffers()}
        made = {name: memory.keep(tensor.detach()) for name, tensor in outputs.items()}
    return _OneStep(made, gradients, buffers), changes


def _changed_parameters(model: nn.Module, values: Mapping[str, KeptTensor]) -> Iterator[StateChange]:
    """Yield the parameters that the model's own forward has written into. values: their values before it, by name."""
    for name, kept in values.items():
        parameter, before = model.get_parameter(name), kept()
        if not same_bits(parameter, before):
            module, _, attribute = name.rpartition(".")
            after = parameter.detach().clone()
            yield StateChange(module, attribute, "parameter", before, after, functools.partial(_write, parameter))


def _write(parameter: Tensor, value: Any) -> None:
    parameter.data.copy_(value)


@contextmanager
def _gradients_kept(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Restore the parameters' present gradients at the end."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _direction(tensor: Tensor) -> Tensor:
    """Return random numbers as the gradient of an output: they show differences that a sum would hide."""
    generator = torch.Generator().manual_seed(tensor.numel())
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return values.to(device=tensor.device, dtype=tensor.dtype)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[PythonState]:
    """Seed the generators other than torch's; at the end, restore them and the model's attributes."""
    state = PythonState(dict(model.named_modules()), files=True)
    draws = RandomStates(state.generators)
    seed_generators(state.generators, 0)
    try:
        yield state
    finally:
        state.put_back()
        draws.put_back()


def _difference(expected: _OneStep, actual: _OneStep, exact: bool = False) -> str | None:
    largest = max(
        (_largest(gradient()) for gradient in expected.gradients.values() if gradient is not None), default=0.0
    )
    pairs: list[tuple[str, KeptTensor | None, KeptTensor | None, float]] = []
    for name, tensor in expected.outputs.items():
        # whole numbers, such as the index of a largest entry, may differ by rounding
        if exact or tensor().is_floating_point() or tensor().is_complex():
            pairs.append((f"the output {name!r}", tensor, actual.outputs[name], 0.0))
    for name, gradient in expected.gradients.items():
        pairs.append((f"the gradient of {name!r}", gradient, actual.gradients.get(name), _LEAST * largest))
    for name, tensor in expected.buffers.items():
        pairs.append((f"the buffer {name!r}", tensor, actual.buffers.get(name), 0.0))
    for label, wanted, got, least in pairs:
        difference = _tensors_differ(wanted and wanted(), got and got(), least, exact)
        if difference is not None:
            return f"{label} {difference}"
    return None


def _tensors_differ(expected: Tensor | None, actual: Tensor | None, least: float, exact: bool) -> str | None:
    """Describe how tensors differ; a missing tensor counts as zeros. least: smallest scale of the differences."""
    present = expected if expected is not None else actual
    if present is None:
        return None
    wanted, got = (
        present.new_zeros(()).expand(present.shape) if tensor is None else tensor for tensor in (expected, actual)
    )
    if wanted.shape != got.shape:
        return f"has the shape {list(got.shape)} instead of {list(wanted.shape)}"
    if all(torch.equal(*pieces) for pieces in _pieces(wanted, got)):
        return None
    gap, size, same_rest = 0.0, least, True
    for first, second in _pieces(wanted, got):
        finite = torch.isfinite(first) & torch.isfinite(second)
        gap, size = max(gap, _size((first - second)[finite])), max(size, _size(first[finite]))
        same_rest &= torch.equal(torch.isnan(first), torch.isnan(second))
    allowed = 0.0 if exact else _TOLERANCE.get(present.dtype, _COARSE)
    if not same_rest or gap > allowed * size:
        return f"differs by {gap / max(size, 1e-300):.1e} of its largest value"
    return None


_PIECE = 1 << 18
"""Numbers that are compared at once, as float64: a copy of all of a large weight may not fit into memory."""


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(map(_numbers, tensor.detach().reshape(-1).split(_PIECE)) for tensor in tensors), strict=True)


def _numbers(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.double()


def _largest(value: Tensor) -> float:
    return max((_size(piece) for piece in value.detach().reshape(-1).split(_PIECE)), default=0.0)


def _size(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0
