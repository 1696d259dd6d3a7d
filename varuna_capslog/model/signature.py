"""Decides when two layers, or two ranges of layers, do the same work on other parameters, so it is measured once.

`ShapeTable` and the estimator run layers of one signature once. A signature holds all that a result can depend on; a
value that cannot be compared is equal to itself only, so that in doubt the work is done again. It leaves out names,
and with them a layer's place in its model, and strings with the qualified name of the module that holds them (peft's
adapters).
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from varuna_capslog.model.capture.python_calls import CallShape, Whole
from varuna_capslog.model.capture.repeats import is_own_name
from varuna_capslog.model.capture.runtime import ByMode, ByShape, CapturedGraph, Frozen, Guard, SequentialSlice
from varuna_capslog.model.layer import Layer

__all__ = ["Signatures", "layer_signature", "run_signature"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_THEMSELVES = (type, types.FunctionType, types.BuiltinFunctionType, OpOverload)
"""Types whose values are compared by identity; often they are the same object in every block."""

_RATES = {
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
    "timm.layers.drop.DropPath": "drop_prob",
}
"""Probabilities that grow from block to block. Only the values 0 and 1 change the work."""

_NAMES: Mapping[type, Sequence[str]] = {Frozen: ("meta", "frozen", "_trained"), Whole: ("path",)}
"""Attributes that are names in the model, or follow from them."""

_OWN_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _OWN_OF_MODULES if name.endswith("_hooks")))


def layer_signature(layer: Layer) -> tuple[object, ...]:
    """Return `run_signature` of one layer."""
    return run_signature([layer])


def run_signature(layers: Sequence[Layer]) -> tuple[object, ...]:
    """Return a key that is equal for two lists of layers that do the same work.

    It holds: the classes of all modules, their attributes (dilation, stride, eps, dropout rates), hooks and modes; the
    operations of captured graphs with their constants; shape, strides, dtype and `requires_grad` of every parameter and
    buffer; which of these tensors and modules are the same object; how many tensors each layer reads and writes.
    """
    description = _Description()
    return tuple(_of_layer(layer, description) for layer in layers)


def _of_layer(layer: Layer, description: _Description) -> object:
    return len(layer.reads), len(layer.writes), description.module(layer.module)


class Signatures:
    """Keys of runs of consecutive layers, as by `run_signature`; each layer is described once.

    If the layers of a run share no module and no tensor, the keys of the single layers decide.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._descriptions: dict[int, tuple[object, frozenset[int]]] = {}

    def run(self, first: int, end: int) -> tuple[object, ...]:
        """Return the key of layers first .. end-1."""
        described = [self._described(layer) for layer in range(first, end)]
        if len(frozenset().union(*(held for _, held in described))) < sum(len(held) for _, held in described):
            return run_signature(self._layers[first:end])
        return "apart", *(signature for signature, _ in described)

    def _described(self, layer: int) -> tuple[object, frozenset[int]]:
        if layer not in self._descriptions:
            description = _Description()
            signature = _of_layer(self._layers[layer], description)
            self._descriptions[layer] = signature, description.held
        return self._descriptions[layer]


class _Same:
    """Key equal to itself only; it keeps the object, so that no other object can take its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Description:
    """Describes modules and tensors by their properties; repeated ones by the number of the first description."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    @property
    def held(self) -> frozenset[int]:
        """Identities of the modules and tensors that were described."""
        return frozenset(self._numbers)

    def module(self, module: nn.Module, path: str = "") -> object:
        """Describe a module. path: its qualified name, as far as it is known."""
        number = self._numbers.get(id(module))
        if number is not None:
            return "again", number
        self._numbers[id(module)] = len(self._numbers)
        held = [
            *((name, self._tensor(tensor)) for name, tensor in module._parameters.items()),
            *((name, self._tensor(tensor)) for name, tensor in module._buffers.items()),
        ]
        hooks = [(name, self.value(list(vars(module)[name].values()))) for name in _HOOKS if vars(module)[name]]
        if isinstance(module, fx.GraphModule) and type(module).__mro__[1] in (fx.GraphModule, CapturedGraph, ByShape):
            # it holds modules under their names in the whole model
            parts = [self.module(part, name) for name, part in module._modules.items() if part is not None]
            graphs = module.graphs if isinstance(module, ByShape) else (module.graph,)
            operations = tuple(operation for graph in graphs for operation in self._graph(module, graph))
            content: object = (fx.GraphModule, tuple(tensor for _, tensor in held), tuple(parts), operations)
        else:
            children = [
                (name, None if part is None else self.module(part, f"{path}.{name}"))
                for name, part in module._modules.items()
            ]
            if isinstance(module, SequentialSlice) or type(module) is nn.Module:
                # the capture made it, with children under their names in the whole model
                children = [("", described) for _, described in children]
            content = (type(module), tuple(held), tuple(children), tuple(self._attributes(module, path)))
        frozen: tuple[int, ...] = ()
        if isinstance(module, Frozen) and module.frozen:
            frozen = tuple(at for at, (name, _) in enumerate(module.named_modules()) if name in module.frozen)
        return (module.training, *frozen), tuple(hooks), content

    def value(self, value: object, numbers: dict[fx.Node, int] | None = None, path: str = "") -> object:
        """Describe a value of an attribute or of an operation's argument.

        numbers: of the nodes of the graph. path: qualified name of the module that has the attribute.
        """
        if isinstance(value, fx.Node):
            assert numbers is not None
            return "node", numbers[value]
        if isinstance(value, str) and is_own_name(value, path):
            return "its name"
        if isinstance(value, _PLAIN):
            return type(value), value  # 1, 1.0 and True are equal, but not to an operation
        if isinstance(value, _THEMSELVES):
            return value
        if isinstance(value, CallShape):
            return type(value), self.value(value.key)
        if type(value) is slice:
            value = ("slice", value.start, value.stop, value.step)
        if isinstance(value, dict):
            pairs = [(self.value(key), self.value(part, numbers, path)) for key, part in value.items()]
            return type(value), tuple(pairs)
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.value(part, numbers, path) for part in value)
        if isinstance(value, nn.Module):
            return self.module(value)
        return _Same(value)

    def _tensor(self, tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        number = self._numbers.get(id(tensor))
        if number is not None:
            return "again", number
        self._numbers[id(tensor)] = len(self._numbers)
        if tensor.layout != torch.strided:
            return _Same(tensor)
        return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad

    def _attributes(self, module: nn.Module, path: str) -> Iterator[tuple[str, object]]:
        if isinstance(module, Guard):
            yield "shapes", module.shapes
            yield "conditions", module.conditions
            yield "train_only", module.train_only is not None
            return
        rate = _RATES.get(f"{type(module).__module__}.{type(module).__qualname__}")
        for key, value in sorted(vars(module).items()):
            if key in _OWN_OF_MODULES or any(
                isinstance(module, kind) and key in names for kind, names in _NAMES.items()
            ):
                continue
            if isinstance(module, ByMode) and key == "spec":
                yield key, str(value)
            elif key == rate and isinstance(value, float) and 0 < value < 1:
                yield key, "between 0 and 1"
            else:
                yield key, self.value(value, path=path)

    def _graph(self, module: fx.GraphModule, graph: fx.Graph) -> Iterator[object]:
        if type(graph._codegen) is not fx.graph.CodeGen:
            yield _Same(module)
            return
        numbers: dict[fx.Node, int] = {}
        for node in graph.nodes:
            target: object = None
            if node.op == "call_module":
                target = self.module(module.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                held: Any = module
                for part in str(node.target).split("."):
                    held = getattr(held, part)
                target = self._tensor(held) if isinstance(held, Tensor) else self.value(held)
            elif node.op in ("call_function", "call_method"):
                target = self.value(node.target)
            yield node.op, target, self.value(node.args, numbers), self.value(node.kwargs, numbers)
            numbers[node] = len(numbers)
