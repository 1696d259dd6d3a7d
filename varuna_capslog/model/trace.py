"""Finds the tensors that cross every cut for a given input size, by one run on fake tensors: no memory, no messages.

The run uses a copy of the chain whose parameters have shapes only, never real parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.defaults import BF16_WEIGHTS
from varuna_capslog.model.capture.kernels import as_shapes
from varuna_capslog.model.capture.python_calls import PythonCall, Whole, WholeModel
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import VALUE_ERRORS, ReadNumbers, kept_tensors, replace_parameters, unlogged
from varuna_capslog.model.layer import low_parameters, put_in_training
from varuna_capslog.model.python_state import PythonState, RandomStates
from varuna_capslog.model.signature import layer_signature

__all__ = ["ShapeTable", "autocast_context", "call_on", "fake_operands"]

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast_context(device_type: str, precision: str) -> AbstractContextManager[Any]:
    """Return the context that a layer runs under: autocast for "bfloat16" and "float16"; else an empty context, since
    the dtypes of the weights decide.
    """
    if precision in ("float32", BF16_WEIGHTS):
        return nullcontext()
    if precision in _AUTOCAST:
        return torch.autocast(device_type, _AUTOCAST[precision])
    raise CapslogError(f"precision={precision!r} is unknown; choose float32, bfloat16, float16 or {BF16_WEIGHTS}")


class ShapeTable:
    """Specs of the tensors at every cut, cached per input size.

    Equal layers with equal inputs are traced once, so that a new image size costs tens of milliseconds.

    Args:
        chain: real or on the meta device; it is not changed and not kept.
        device_type: of the run, such as "cuda"; without such a device the trace runs on fake CPU tensors.
        precision: as in `autocast_context` (autocast changes the dtypes of sent tensors).
        weights: as in `low_parameters`; an embedding with 16-bit weights writes 16 bits.
    """

    def __init__(
        self, chain: Chain, device_type: str = "cpu", precision: str = "float32", weights: str = "float32"
    ) -> None:
        self._device = device_type if device_type == accelerator.auto_type() else "cpu"
        self._precision = precision
        self._signatures = [layer_signature(layer) for layer in chain.layers]
        # equal layers share one copy, which has meta tensors as parameters and buffers
        originals = {signature: layer.module for signature, layer in zip(self._signatures, chain.layers, strict=True)}
        memo: dict[int, Any] = kept_tensors(originals.values())
        for module in originals.values():
            for parameter in module.parameters():
                hollow = parameter.detach().to("meta")
                memo[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
            memo |= {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
        modules = copy.deepcopy([*originals.values()], memo)
        copies = dict(zip(originals, modules, strict=True))
        pairs = zip(chain.layers, self._signatures, strict=True)
        self._layers = [replace(layer, module=copies[signature]) for layer, signature in pairs]
        structure = [replace(layer, module=nn.Identity()) for layer in chain.layers]
        self._structure = Chain(structure, chain.inputs, chain.outputs)
        low = {parameter: dtype for module in modules for parameter, dtype in low_parameters(module, weights).items()}
        if low:
            new = {
                parameter: nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                for parameter, dtype in low.items()
            }
            replace_parameters(modules, new)
        put_in_training(modules, [layer.module for layer in chain.layers])
        for part in (part for module in modules for part in module.modules()):
            if isinstance(part, (Whole, WholeModel)):
                part.from_memory = True
        self._generators: dict[object, Mapping[str, Any]] = {}
        """Signature -> the generators, other than torch's, that a layer's Python code draws from."""
        self._traced: dict[object, tuple[TensorSpec, ...]] = {}
        self._cache: dict[object, list[dict[str, TensorSpec]]] = {}

    def boundaries(self, inputs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
        """Return the specs at cut 0..L (inputs of layer 0, ..., tensors that the loss reads), by tensor name.

        Raises CapslogError where a layer fails on these inputs (its name, the shapes and torch's reason).
        """
        key = tuple(sorted(inputs.items()))
        table = self._cache.get(key)
        if table is None:
            table = self._cache[key] = self._trace(inputs)
        return table

    def _trace(self, inputs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
        values, crossing = dict(inputs), self._structure.crossing
        table = [{name: values[name] for name in crossing(0)}]
        for index, layer in enumerate(self._layers):
            read = tuple(values[name] for name in layer.reads)
            key = (self._signatures[index], read)
            written = self._traced.get(key)
            if written is None:
                written = self._traced[key] = self._run(layer, read, self._signatures[index])
            values.update(zip(layer.writes, written, strict=True))
            table.append({name: values[name] for name in crossing(index + 1)})
        return self._of_the_loss(table)

    def _of_the_loss(self, table: Sequence[Mapping[str, TensorSpec]]) -> list[dict[str, TensorSpec]]:
        """Return the specs with `requires_grad` only for values for which a backward from the loss has a gradient: a
        tower's last layers may be computed for nothing.
        """
        values = [self._structure.values_at(cut) for cut in range(len(table))]
        specs = {value: cut[value.name] for cut, row in zip(table, values, strict=True) for value in row}
        pairs = self._structure.gradient_pairs(lambda value: specs[value].requires_grad)
        reached = {value for value, _ in pairs}
        of_loss = {
            value: spec if value in reached or not spec.requires_grad else replace(spec, requires_grad=False)
            for value, spec in specs.items()
        }
        return [{value.name: of_loss[value] for value in row} for row in values]

    def _run(self, layer: Layer, read: tuple[TensorSpec, ...], signature: object) -> tuple[TensorSpec, ...]:
        generators = self._generators.get(signature)
        is_known = generators is not None
        if generators is None:
            generators = PythonState(dict(layer.module.named_modules()), files=True).generators
        draws = RandomStates(generators)
        try:
            written = self._traced_on_fakes(layer, read)
            if not is_known:
                generators = self._generators[signature] = generators if draws.drawn() else {}
        finally:
            draws.put_back()
        if not generators:
            return written
        # with other random numbers, other tensors may carry a gradient
        carries = any(spec.requires_grad for spec in read) or any(
            parameter.requires_grad for parameter in layer.module.parameters()
        )
        return tuple(replace(spec, requires_grad=carries and spec.dtype.is_floating_point) for spec in written)

    def _traced_on_fakes(self, layer: Layer, read: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            state, arguments = fake_operands(layer, read, self._device)
            try:
                python = any(isinstance(part, PythonCall) for part in layer.module.modules())
                numbers = ReadNumbers() if python else nullcontext()
                with unlogged(), _Operators(), numbers, as_shapes(), autocast_context(self._device, self._precision):
                    result = call_on(layer, state, arguments)
            except CapslogError:
                raise
            except Exception as error:
                if isinstance(error, VALUE_ERRORS):
                    raise CapslogError(
                        f"layer {layer.name!r} cannot be planned: what it makes, or how much of it, depends on the "
                        f"values of a tensor ({error}); give it a fixed size, as torch.where does"
                    ) from error
                shapes = ", ".join(f"{name}{list(spec.shape)}" for name, spec in zip(layer.reads, read, strict=True))
                raise CapslogError(f"layer {layer.name!r} cannot run on {shapes}: {error}") from error
            if len(result) != len(layer.writes):
                raise CapslogError(
                    f"layer {layer.name!r} returned {len(result)} tensors but declares writes={list(layer.writes)}"
                )
            return tuple(TensorSpec.of(tensor) for tensor in result)


class _Operators(TorchDispatchMode):
    """Mode that refuses products of matrices of two dtypes, as devices do but fake tensors do not, and computes the
    shape of `grid_sampler_2d` itself, for which fake tensors would run a hundred operators.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and len({tensor.dtype for tensor in args[-2:]}) > 1:
            first, second = (str(tensor.dtype).removeprefix("torch.") for tensor in args[-2:])
            raise RuntimeError(f"matrices of {first} and {second} cannot be multiplied")
        if func is _GRID_SAMPLER:  # values [B, C, ...] at a grid [B, H, W, 2]
            values, grid = args[:2]
            if (values.shape[0], 2, values.dtype) == (grid.shape[0], grid.shape[-1], grid.dtype):
                return values.new_empty((*values.shape[:2], *grid.shape[1:3]))
        return func(*args, **kwargs or {})


_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
_GRID_SAMPLER = torch.ops.aten.grid_sampler_2d.default


def fake_operands(
    layer: Layer, read: Sequence[TensorSpec], device: str
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Make, inside a `FakeTensorMode`, a layer's parameters and buffers by name, and the tensors that it reads."""
    state = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).requires_grad_(
            tensor.requires_grad
        )
        for name, tensor in [*layer.module.named_parameters(), *layer.module.named_buffers()]
    }
    return state, tuple(spec.empty(device).requires_grad_(spec.requires_grad) for spec in read)


def call_on(layer: Layer, state: dict[str, Tensor], arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that a layer writes with `state` in place of its own parameters and buffers."""
    result = torch.func.functional_call(layer.module, state, arguments, tie_weights=True)
    return (result,) if isinstance(result, Tensor) else result
