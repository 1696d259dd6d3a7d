"""Modules, other than the model's own, of which captured layers are made.

They hold no parameters (a layer's parameters keep the model's names) and refuse inputs that were not captured.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.layer import Frozen

__all__ = [
    "ByMode",
    "ByShape",
    "CapturedGraph",
    "FixedSize",
    "Guard",
    "OfTheModel",
    "Region",
    "SequentialSlice",
    "Sizes",
    "Varying",
    "hold",
    "names_of",
]


Sizes = tuple[int | tuple[str, int, int | None], ...]
"""Sizes of a tensor: numbers, or (name, least, most or None) for sizes that may change; equal names are equal sizes."""


class FixedSize(CapslogError):
    """The model's code fixes a size that an example leaves open, or makes other layers for other sizes."""


class Varying:
    """Example input whose sizes in some `dimensions` may change when the captured model runs.

    `tensor`: the example, of at least 2 in these dimensions.
    """

    def __init__(self, tensor: Tensor, dimensions: Sequence[int]) -> None:
        self.tensor, self.dimensions = tensor, tuple(dimensions)


class OfTheModel:
    """Value of the captured model that a layer or chain holds; copies and pickles hold None instead."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> OfTheModel:
        return OfTheModel()

    def __reduce__(self) -> Any:
        return OfTheModel, ()


class CapturedGraph(Frozen, fx.GraphModule):
    """Part of a captured model's graph. It never changes, so copies share graph and code: a plain `fx.GraphModule`
    would copy the graph and compile its code again, which takes longer than an estimate of the layer.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedGraph:
        # without GraphModule's constructor, which makes a class with compiled code for every module
        copied: CapturedGraph = object.__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._graph)] = self._graph
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied


def hold(layer: fx.GraphModule, name: str, value: Any) -> None:
    """Store a value under a qualified name in a captured layer, as its constructor does with names of its graph."""
    path, _, last = name.rpartition(".")
    if isinstance(value, nn.Module):
        layer.add_submodule(name, value)
        return
    if path and not any(existing == path for existing, _ in layer.named_modules(remove_duplicate=False)):
        layer.add_submodule(path, nn.Module())
    owner = layer.get_submodule(path)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(last, value)
    else:
        setattr(owner, last, value)


class Guard(nn.Module):
    """Refuses inputs of a shape that was not captured, and eval mode where only training was captured.

    layer: the layer's name, for the message. names: names of its inputs.
    shapes: captured shapes of the inputs, with a name and bounds for each size that may change.
    train_only: why the layer is right in training mode only, or None.
    conditions: comparisons of sizes that may change, by name; the capture is right only where all are true.
    dtypes: dtypes of the inputs in the example, which are not checked; () where they are not needed.
    """

    def __init__(
        self,
        layer: str,
        names: Sequence[str],
        shapes: Sequence[Sizes],
        train_only: str | None,
        conditions: Sequence[str] = (),
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        super().__init__()
        self.layer, self.names, self.shapes, self.train_only = layer, tuple(names), tuple(shapes), train_only
        self.dtypes = tuple(dtypes)
        size_names = {size[0] for shape in shapes for size in shape if not isinstance(size, int)}
        self.conditions = tuple(text for text in conditions if names_of(text) <= size_names)

    def forward(self, *tensors: Tensor) -> None:
        """Raise CapslogError for inputs or a mode that were not captured."""
        if self.train_only is not None and not self.training:
            raise CapslogError(
                f"layer {self.layer!r} was captured for training only: {self.train_only}; evaluate the model itself"
            )
        changing: dict[str, int] = {}
        for name, shape, tensor in zip(self.names, self.shapes, tensors, strict=True):
            if tuple(tensor.shape) != shape and not self._takes(tensor.shape, shape, changing):
                shown = ", ".join(map(_size_text, shape))
                raise CapslogError(
                    f"layer {self.layer!r} was captured for {name!r} of shape [{shown}] but got "
                    f"{list(tensor.shape)}; capture the model again with example_inputs of that size"
                )

        for text in self.conditions:
            if not _holds(text, changing):
                shown = ", ".join(f"{name}={size}" for name, size in changing.items())
                raise CapslogError(
                    f"layer {self.layer!r} was captured where {text}, but got {shown}: the model does something else "
                    "for these sizes; leave them out of the data or give one size only"
                )

    def takes(self, shapes: Sequence[Sequence[int]]) -> bool:
        """True where the layer was captured for inputs of these shapes."""
        changing: dict[str, int] = {}
        fits = all(self._takes(*pair, changing) for pair in zip(shapes, self.shapes, strict=True))
        return fits and all(_holds(text, changing) for text in self.conditions)

    @staticmethod
    def _takes(sizes: Sequence[int], captured: Sizes, changing: dict[str, int]) -> bool:
        """True where these sizes were captured. changing: size of each name so far in this call; names are added."""
        if len(sizes) != len(captured):
            return False
        for size, expected in zip(sizes, captured, strict=True):
            if isinstance(expected, int):
                fits = size == expected
            else:
                name, least, most = expected
                fits = least <= size and (most is None or size <= most) and changing.setdefault(name, size) == size
            if not fits:
                return False
        return True


def _holds(condition: str, sizes: Mapping[str, int]) -> bool:
    return bool(eval(_compiled(condition), {"__builtins__": {}}, sizes))


@functools.cache
def _compiled(condition: str) -> Any:
    names_of(condition)  # refuses everything except arithmetic
    return compile(condition, "<condition>", "eval")


def names_of(condition: str) -> set[str]:
    """Return the sizes that a condition compares. Raises ValueError for any Python but comparisons of whole numbers."""
    tree = ast.parse(condition, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC) or (isinstance(node, ast.Constant) and not isinstance(node.value, int)):
            raise ValueError(f"{condition} is no comparison of whole numbers")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


_ARITHMETIC = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Load),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)


def _size_text(size: int | tuple[str, int, int | None]) -> str:
    if isinstance(size, int):
        return str(size)
    name, least, most = size
    return f"{name} (from {least}{'' if most is None else f' to {most}'})" if name.isidentifier() else name


class ByShape(CapturedGraph):
    """Captured layer with a graph for each of several shapes, all on the same modules; its own graph is the first."""

    graphs: tuple[fx.Graph, ...]
    """Graphs of all shapes."""
    _codes: tuple[Callable[..., Any], ...]
    _guards: tuple[str, ...]

    def take_graphs(self, graphs: Sequence[fx.Graph], guards: Sequence[str]) -> None:
        """Set the graphs, and the names of their guards; the code of the first graph exists already."""
        others = [type(fx.GraphModule(self, graph)).forward for graph in graphs[1:]]
        self.graphs, self._guards = tuple(graphs), tuple(guards)
        self._codes = type(self).forward, *others
        type(self).forward = _run_chosen

    def chosen(self, shapes: Sequence[Sequence[int]]) -> Callable[..., Any]:
        """Return the code captured for inputs of these shapes; if there is none, the first, which refuses them."""
        guards = [self.get_submodule(name) for name in self._guards]
        numbers = (number for number, guard in enumerate(guards) if isinstance(guard, Guard) and guard.takes(shapes))
        return self._codes[next(numbers, 0)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ByShape:
        memo |= {id(graph): graph for graph in self.graphs}
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ByShape)
        return copied


def _run_chosen(self: ByShape, *values: Tensor) -> Any:
    return self.chosen([value.shape for value in values])(self, *values)


class ByMode(nn.Module):
    """Function with constant arguments that differ between training and eval: dropout's probability, `training=` flags.

    target: the function. spec: the structure of (args, kwargs).
    training, evaluation: its flattened arguments in each mode. slots: positions of the call's tensors among them.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        spec: pytree.TreeSpec,
        training: Sequence[Any],
        evaluation: Sequence[Any],
        slots: Sequence[int],
    ) -> None:
        super().__init__()
        self.target, self.spec, self.slots = target, spec, tuple(slots)
        self.in_training, self.in_evaluation = tuple(training), tuple(evaluation)

    def forward(self, *tensors: Any) -> Any:
        """Return the function's result for the module's present mode."""
        leaves = list(self.in_training if self.training else self.in_evaluation)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.target(*args, **kwargs)


class Region(nn.Module):
    """Part of the graph that runs under the gradient mode or autocast that the model's code sets.

    context, arguments: `torch.set_grad_enabled` or `torch.autocast`, and its arguments.
    """

    def __init__(
        self, body: fx.GraphModule, context: Callable[..., AbstractContextManager[Any]], arguments: Sequence[Any]
    ) -> None:
        super().__init__()
        self.body: fx.GraphModule = body
        self.context, self.arguments = context, tuple(arguments)

    @property
    def key(self) -> object:
        """Key that is equal for regions that do the same."""
        return self.context, self.arguments, str(self.body.graph)

    def forward(self, *values: Any) -> Any:
        """Return the body's outputs, a tuple."""
        if self.context is torch.autocast:
            values = tuple(map(_no_leaf, values))
        with self.context(*self.arguments):
            return self.body(*values)


def _no_leaf(value: Any) -> Any:
    """Return a view of a leaf that crossed a cut: autocast would cache one copy of it, and add gradients in 16 bits."""
    crossed = (
        isinstance(value, Tensor) and value.is_leaf and value.requires_grad and not isinstance(value, nn.Parameter)
    )
    return value.view_as(value) if crossed else value


def runs_its_children(model: nn.Module) -> bool:
    """True for an nn.Sequential without a forward of its own, in its class or on the object, and without hooks."""
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    has_own_forward = getattr(model.forward, "__func__", None) is not nn.Sequential.forward
    return isinstance(model, nn.Sequential) and not has_own_forward and not any(hooks)


class SequentialSlice(Frozen, nn.Sequential):
    """Consecutive children of an nn.Sequential, under their own names.

    The slice's input has crossed a cut: other layers read it, and its gradient is taken. Where an in-place child
    (`nn.ReLU(inplace=True)`) may change it, the slice copies it first: if the child is the first, or only children
    that may return their input, such as dropout in eval mode, come before it.
    """

    def __init__(self, children: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__(OrderedDict(children))
        self._copy_input = _may_change_input([child for _, child in children])
        self.meta = {"source_modules": tuple(name for name, _ in children), "source_lists": ()}

    def forward(self, x: Tensor) -> Tensor:
        """Run the children in order."""
        return super().forward(x.clone() if self._copy_input else x)


_FRESH_OUTPUT = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
)


def _may_change_input(children: Sequence[nn.Module]) -> bool:
    for child in children:
        if isinstance(child, _FRESH_OUTPUT):
            return False
        if any(getattr(module, "inplace", False) for module in child.modules()):
            return True
    return False
