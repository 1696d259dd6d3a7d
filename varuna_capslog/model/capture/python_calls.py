"""Modules of a captured layer that run the user's own Python at every step, where a graph would not do the same.

`opaque` makes them for a module that is kept whole, for an autograd Function, whose backward a graph cannot hold, and
for a hook that the model's code gives a tensor. They hold no parameters: a module that is kept whole lies beside them
in the layer, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.runtime import FixedSize
from varuna_capslog.model.known_values import Known, KnownValues
from varuna_capslog.model.layer import Frozen

__all__ = [
    "CallShape",
    "FunctionCall",
    "Hooked",
    "MadeTensor",
    "PythonCall",
    "Whole",
    "WholeModel",
    "values_last",
]


class MadeTensor(NamedTuple):
    """Description of a tensor in a call's result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> MadeTensor:
        """Describe a tensor, also one without values. Raises FixedSize where its sizes were left open."""
        sizes = [*tensor.shape, *tensor.stride()]
        if any(isinstance(size, torch.SymInt) and not size.node.expr.is_number for size in sizes):
            raise FixedSize("the sizes of the inputs cannot change where the model runs as Python; give one size only")
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(shape, stride, tensor.dtype, str(tensor.device))

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return an uninitialised tensor of this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


@dataclass(frozen=True)
class CallShape:
    """Description of a call of Python code, without its tensors.

    spec, constants: structure and leaves of (args, kwargs), with None in the places (`slots`) of tensors.
    argument_shapes: shapes of the tensors among the arguments.
    result_spec, result_constants, result_slots: spec, constants and slots of the result. tensors: its tensors.
    passed: (number of a result's tensor, number of the tensor argument that it is); other calls may make a new tensor.
    values: for each tensor argument its values, if they derive from the model's inputs alone; () where the call reads
        no values.
    """

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    slots: tuple[int, ...]
    argument_shapes: tuple[tuple[int, ...], ...]
    result_spec: pytree.TreeSpec
    result_constants: tuple[Any, ...]
    result_slots: tuple[int, ...]
    tensors: tuple[MadeTensor, ...]
    passed: tuple[tuple[int, int], ...]
    values: tuple[Known | None, ...] = ()

    @classmethod
    def of(cls, arguments: tuple[Any, Any], result: Any, values: tuple[Known | None, ...] = ()) -> CallShape:
        """Describe a call with these (args, kwargs). Raises FixedSize where sizes of its result were left open."""
        leaves, spec = pytree.tree_flatten(arguments)
        slots = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        numbers = {id(leaves[at]): number for number, at in enumerate(slots)}
        results, result_spec = pytree.tree_flatten(result)
        result_slots = tuple(at for at, leaf in enumerate(results) if isinstance(leaf, Tensor))
        tensors = [results[at] for at in result_slots]
        passed = [(number, numbers[id(tensor)]) for number, tensor in enumerate(tensors) if id(tensor) in numbers]
        return cls(
            spec,
            _without_tensors(leaves),
            slots,
            tuple(tuple(leaves[at].shape) for at in slots),
            result_spec,
            _without_tensors(results),
            result_slots,
            tuple(map(MadeTensor.of, tensors)),
            tuple(passed),
            values,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for calls with the same arguments and results, except for unknown values of tensors."""
        structures = str(self.spec), str(self.result_spec), self.constants, self.slots
        of_values = tuple(value and value.key for value in self.values)
        return *structures, self.result_constants, self.result_slots, self.tensors, self.passed, of_values

    def leaves(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the flattened result with these tensors in it."""
        leaves = list(self.result_constants)
        for at, tensor in zip(self.result_slots, tensors, strict=True):
            leaves[at] = tensor
        return leaves

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """Return the result with these tensors in it."""
        return pytree.tree_unflatten(self.leaves(tensors), self.result_spec)


def _without_tensors(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)


class PythonCall(nn.Module):
    """Call of Python code, with the captured call's arguments except tensors, which are inputs.

    from_memory: True: for inputs of the captured shapes, return tensors without values, of the captured result's
        shapes, instead of making the call.
    """

    def __init__(self, shape: CallShape) -> None:
        super().__init__()
        self.shape, self.from_memory = shape, False

    @property
    def key(self) -> object:
        """Key that is equal for calls of the same code with the same arguments except tensors."""
        return self.describe(), self.shape.key

    def describe(self) -> str:
        """Return the name of the called code, for messages."""
        raise NotImplementedError

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call; return its result."""
        raise NotImplementedError

    def held(self) -> Iterable[Tensor]:
        """Return the parameters that the call uses."""
        return ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the call makes."""
        leaves = self._leaves(tensors)
        return tuple(leaves[at] for at in self.shape.result_slots)

    def _leaves(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the call's flattened result; everything except its tensors must be as in the captured call."""
        shape = self.shape
        if self.from_memory and tuple(tuple(tensor.shape) for tensor in tensors) == shape.argument_shapes:
            return self._remembered(tensors)
        leaves = list(shape.constants)
        for slot, tensor in zip(shape.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, shape.spec)
        with self._knowing(tensors) if shape.values else nullcontext():
            actual, spec = pytree.tree_flatten(self.call(*args, **kwargs))
        if spec != shape.result_spec or not all(map(_alike, actual, shape.result_constants)):
            raise CapslogError(
                f"{self.describe()} returned something else than when the model was captured: "
                f"{_text(actual)} instead of {_text(shape.result_constants)} in {shape.result_spec}; let it return the "
                "same structure and the same values beside its tensors in every call"
            )
        return list(actual)

    @contextmanager
    def _knowing(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let tensors without values, of the captured shapes, have the values that the captured call got and read."""
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != self.shape.argument_shapes or not isinstance(tensors[0], FakeTensor):
            yield
            return
        opened = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, KnownValues))
        mode = next(opened, None)
        with nullcontext(mode) if mode is not None else KnownValues() as mode:
            for tensor, value in zip(tensors, self.shape.values, strict=True):
                if value is not None:
                    mode.add(tensor, value.tensor)
            with mode.learning():
                yield

    def _remembered(self, tensors: Sequence[Tensor]) -> list[Any]:
        # with other random numbers, other tensors may carry a gradient
        carries = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *self.held()))
        made = [tensor.empty(tensors[0].device if tensors else None) for tensor in self.shape.tensors]
        for tensor in made:
            tensor.requires_grad_(carries and (tensor.is_floating_point() or tensor.is_complex()))
        return self.shape.leaves(made)


def _alike(leaf: Any, captured: Any) -> bool:
    if isinstance(leaf, Tensor):
        return captured is None
    return leaf is captured or (type(leaf) is type(captured) and bool(leaf == captured))


def _text(leaves: Sequence[Any]) -> str:
    return str([f"a tensor{list(leaf.shape)}" if isinstance(leaf, Tensor) else leaf for leaf in leaves])


@contextmanager
def values_last(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep values that calls in these modules got until the end of the block, for backwards."""
    calls = (part for module in modules for part in module.modules() if isinstance(part, PythonCall))
    with KnownValues() if any(call.shape.values for call in calls) else nullcontext():
        yield


class Whole(PythonCall):
    """Module that is called as a whole, with any arguments and results.

    path: the module's qualified name in the model, under which the layer holds it.
    """

    def __init__(self, module: nn.Module, path: str, shape: CallShape) -> None:
        super().__init__(shape)
        self.path = path
        self._module = (module,)  # in a tuple, the module does not become a submodule

    @property
    def module(self) -> nn.Module:
        """The module that is called."""
        return self._module[0]

    def describe(self) -> str:
        return f"module {self.path!r} ({type(self.module).__name__})"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def held(self) -> Iterable[Tensor]:
        return self.module.parameters()


class WholeModel(Frozen, PythonCall):
    """Model that is one layer, with its own parameters, buffers and submodules under their own names.

    outputs: indices, in the flattened result, of the tensors that the layer writes. why: why no graph can replace it.
    """

    def __init__(self, model: nn.Module, shape: CallShape, outputs: Sequence[int], why: str) -> None:
        PythonCall.__init__(self, shape)
        # the model's own tables, so that the model has all that is moved, loaded or listed here
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self._model = (model,)  # in a tuple, the model does not become a submodule
        self.outputs = tuple(outputs)
        parts, lists = [*model.named_modules()][1:], (nn.ModuleList, nn.ModuleDict)
        self.meta: dict[str, Any] = {
            "source_modules": tuple(path for path, part in parts if not any(part.children())),
            "source_lists": tuple(path for path, part in parts if isinstance(part, lists)),
            "whole": {"": why},
        }

    @property
    def model(self) -> nn.Module:
        """The model that is called."""
        return self._model[0]

    def train(self, mode: bool = True) -> WholeModel:
        """Set the mode of the model itself and of its layer."""
        self.model.train(mode)
        super().train(mode)
        return self

    def describe(self) -> str:
        return f"the {type(self.model).__name__}"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def held(self) -> Iterable[Tensor]:
        return self.parameters()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the layer writes."""
        leaves = self._leaves(tensors)
        return tuple(leaves[at] for at in self.outputs)


class FunctionCall(PythonCall):
    """Call of an autograd Function, which keeps its own backward."""

    def __init__(self, kind: type, shape: CallShape) -> None:
        super().__init__(shape)
        self.kind = kind

    def describe(self) -> str:
        return f"the autograd Function {self.kind.__qualname__}"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)  # type: ignore[attr-defined]


class Hooked(nn.Module):
    """Tensor with a hook of the user's on its gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.hook = hook

    @property
    def key(self) -> object:
        """Key that is equal for hooks of the same code."""
        return getattr(self.hook, "__code__", self.hook)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor as a view that has the hook."""
        view = x.view_as(x)
        if view.requires_grad:
            view.register_hook(self.hook)
        return view
