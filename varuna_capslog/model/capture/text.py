"""Writes a captured model as text and reads it: a process that has captured passes it to others that have not.

`kept` keeps it in a file. The text holds the graphs of the layers, and what the model lacks; the parameters, buffers
and modules that the graphs name are those of the model that the reader has built itself. It is data, not code: the
only functions that it names are operators on tensors and a few functions of Python and torch.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from varuna_capslog.model.capture.python_calls import (
    CallShape,
    FunctionCall,
    MadeTensor,
    PythonCall,
    Whole,
    WholeModel,
)
from varuna_capslog.model.capture.runtime import ByMode, CapturedGraph, Guard, Region
from varuna_capslog.model.capture.split import layer_module
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.training_modes import freeze_layers

__all__ = ["CapturedLayers", "NotText", "from_text", "to_text"]

CapturedLayers = tuple[list[Layer], tuple[str, ...], tuple[str, ...]]
"""Result of `capture_layers`: layers, names of the inputs, names of the outputs."""

_TORCH = ("clone", "sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sqrt")
_FUNCTIONS: tuple[tuple[ModuleType, Sequence[str]], ...] = (
    (operator, operator.__all__),
    (math, ("ceil", "floor", "trunc", "sqrt", "pow")),
    (builtins, ("getattr",)),
    (torch, _TORCH),
)
_NAMED: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name) for module, names in _FUNCTIONS for name in names
}
_CONTEXTS: dict[str, Callable[..., Any]] = {"set_grad_enabled": torch.set_grad_enabled, "autocast": torch.autocast}
_TYPES = (torch.dtype, torch.layout, torch.memory_format)


class NotText(Exception):
    """A capture holds something that has no text form; says what."""


def to_text(captured: CapturedLayers, model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """Return the text of a captured model, and the tensors that it refers to by name.

    Raises:
        NotText: a constant that is no tensor, or a function that the text may not name.
    """
    layers, inputs, outputs = captured
    tensors: dict[str, Tensor] = {}
    written: list[dict[str, Any]] = []
    for layer in layers:
        module = layer.module
        if isinstance(module, WholeModel):
            described = {"call": _call_text(module), "outputs": module.outputs}
        elif isinstance(module, fx.GraphModule):
            described = {
                **_graph_of(module, model, f"{len(written)}.", tensors),
                "paths": module.meta["source_modules"],
            }
        else:
            raise NotText(f"layer {layer.name!r} is no captured graph")
        written.append({**described, "name": layer.name, "reads": layer.reads, "writes": layer.writes})
    meta: dict[str, Any] = layers[-1].module.meta  # type: ignore[assignment]
    properties = {name: meta[name] for name in ("whole", "joined") if name in meta}
    return json.dumps({"layers": written, "inputs": inputs, "outputs": outputs, "told": properties}), tensors


def from_text(text: str, tensors: Mapping[str, Tensor], model: nn.Module) -> CapturedLayers:
    """Return the captured model that `to_text` described, on the parameters and modules of `model`."""
    read = json.loads(text)
    layers = []
    for number, described in enumerate(read["layers"]):
        module: CapturedGraph | WholeModel
        if "call" in described:
            module = WholeModel(model, _call_shape(described["call"]), described["outputs"], "")
        else:
            graph, extra = _graph_from(described, f"{number}.", tensors, model)
            module = layer_module(graph, extra, model, described["paths"])
        layers.append(Layer(described["name"], module, tuple(described["reads"]), tuple(described["writes"])))
    layers[-1].module.meta |= read["told"]
    freeze_layers(layers, model)
    return layers, tuple(read["inputs"]), tuple(read["outputs"])


def _graph_of(module: fx.GraphModule, model: nn.Module | None, place: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a graph's nodes, and objects of theirs that are not the model's; `place` begins its tensors' names."""
    nodes, extra = [], {}
    for node in module.graph.nodes:
        target: Any = node.target
        if node.op == "call_function":
            target = _function_name(target)
        elif node.op in ("call_module", "get_attr"):
            held = operator.attrgetter(target)(module)
            if not _is_models(held, target, model):
                extra[target] = _held_text(held, f"{place}{target}", tensors)
        nodes.append([node.op, node.name, target, _value_text(node.args), _value_text(dict(node.kwargs))])
    return {"nodes": nodes, "extra": extra}


def _graph_from(
    described: Mapping[str, Any], place: str, tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[fx.Graph, Any]:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in described["nodes"]:
        callee = _function(target) if op == "call_function" else target
        made[name] = graph.create_node(op, callee, _value(args, made), _value(kwargs, made), name)
    extra = {key: _held(value, f"{place}{key}", tensors, model) for key, value in described["extra"].items()}
    return graph, extra


def _is_models(held: Any, target: str, model: nn.Module | None) -> bool:
    try:
        return model is not None and operator.attrgetter(target)(model) is held
    except AttributeError:
        return False


def _held_text(held: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(held, Tensor):
        tensors[place] = held.detach().contiguous()
        return {"kind": "tensor"}
    if isinstance(held, Guard):
        arguments = [held.layer, held.names, held.shapes, held.train_only, held.conditions]
        return {"kind": "guard", "given": arguments, "dtypes": _value_text(held.dtypes)}
    if isinstance(held, ByMode):
        arguments = [pytree.treespec_dumps(held.spec), _value_text(held.in_training), _value_text(held.in_evaluation)]
        return {"kind": "by_mode", "target": _function_name(held.target), "given": arguments, "slots": held.slots}
    if isinstance(held, Region):
        name = next((name for name, context in _CONTEXTS.items() if context is held.context), None)
        body = _graph_of(held.body, None, f"{place}.", tensors)
        return {"kind": "region", "context": name, "arguments": _value_text(held.arguments), "body": body}
    if isinstance(held, Whole):
        return {"kind": "whole", "path": held.path, "call": _call_text(held)}
    if isinstance(held, FunctionCall):
        name = f"{held.kind.__module__}:{held.kind.__qualname__}"
        _function_kind(name)
        return {"kind": "function", "name": name, "call": _call_text(held)}
    raise NotText(f"{place.partition('.')[2]!r} is a {type(held).__name__}")


def _held(described: Mapping[str, Any], place: str, tensors: Mapping[str, Tensor], model: nn.Module) -> Any:
    match described["kind"]:
        case "tensor":
            return tensors[place]
        case "guard":
            layer, names, shapes, train_only, conditions = described["given"]
            sizes = [tuple(tuple(size) if isinstance(size, list) else size for size in shape) for shape in shapes]
            return Guard(layer, names, sizes, train_only, conditions, _value(described["dtypes"], {}))
        case "by_mode":
            spec, training, evaluation = described["given"]
            leaves = _value(training, {}), _value(evaluation, {})
            return ByMode(_function(described["target"]), pytree.treespec_loads(spec), *leaves, described["slots"])
        case "whole":
            return Whole(model.get_submodule(described["path"]), described["path"], _call_shape(described["call"]))
        case "function":
            return FunctionCall(_function_kind(described["name"]), _call_shape(described["call"]))
        case _:
            graph, extra = _graph_from(described["body"], f"{place}.", tensors, model)
            arguments = _value(described["arguments"], {})
            return Region(CapturedGraph(extra, graph), _CONTEXTS[described["context"]], arguments)


def _call_text(call: PythonCall) -> Any:
    """Describe a call's arguments and result beside tensors."""
    shape = call.shape
    try:
        specs = pytree.treespec_dumps(shape.spec), pytree.treespec_dumps(shape.result_spec)
    except NotImplementedError as error:
        raise NotText(f"{call.describe()} takes or returns objects of a class without a text form") from error
    tensors = [(tensor.shape, tensor.stride, _value_text(tensor.dtype), tensor.device) for tensor in shape.tensors]
    constants = _value_text(shape.constants), _value_text(shape.result_constants)
    return [*specs, *constants, shape.slots, shape.given, shape.made, tensors, shape.passed]


def _call_shape(described: Any) -> CallShape:
    spec, result_spec, constants, results, slots, shapes, made, tensors, passed = described
    return CallShape(
        pytree.treespec_loads(spec),
        _value(constants, {}),
        tuple(slots),
        tuple(map(tuple, shapes)),
        pytree.treespec_loads(result_spec),
        _value(results, {}),
        tuple(made),
        tuple(
            MadeTensor(tuple(shape), tuple(stride), _value(dtype, {}), device)
            for shape, stride, dtype, device in tensors
        ),
        tuple((at, number) for at, number in passed),
    )


def _function_kind(name: str) -> Any:
    """Return an autograd Function that this process has imported already."""
    module, _, path = name.partition(":")
    try:
        kind = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError) as error:
        raise NotText(f"it calls the autograd Function {name}, which cannot be imported by this name") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        raise NotText(f"{name} is no autograd Function")
    return kind


def _function_name(function: Any) -> str:
    if isinstance(function, OpOverload):
        return f"torch.ops.{function}"
    name = next((name for name, candidate in _NAMED.items() if candidate is function), None)
    if name is None:
        raise NotText(f"it calls {getattr(function, '__name__', function)!r}")
    return name


def _function(name: str) -> Callable[..., Any]:
    if name.startswith("torch.ops."):
        return operator.attrgetter(name.removeprefix("torch.ops."))(torch.ops)
    return _NAMED[name]


def _value_text(value: Any) -> Any:
    """Return JSON for an argument: plain values as they are, everything else as {kind: description}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_value_text(part) for part in value]}
    if isinstance(value, list):
        return [_value_text(part) for part in value]
    if isinstance(value, dict):
        return {"dict": [[key, _value_text(part)] for key, part in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_value_text(bound) for bound in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, _TYPES):
        return {"torch": str(value).removeprefix("torch.")}
    raise NotText(f"an argument is a {type(value).__name__}")


def _value(described: Any, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(described, list):
        return [_value(part, made) for part in described]
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    match kind:
        case "node":
            return made[content]
        case "tuple":
            return tuple(_value(part, made) for part in content)
        case "dict":
            return {key: _value(part, made) for key, part in content}
        case "slice":
            return slice(*(_value(bound, made) for bound in content))
        case "device":
            return torch.device(content)
        case _:
            constant = getattr(torch, content)
            assert isinstance(constant, _TYPES)
            return constant
