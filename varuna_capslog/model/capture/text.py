"""Writes a captured model as text and reads it: the process that captures a model passes it to other processes.

The text holds the graphs of the layers, and objects that the model lacks; the parameters, buffers and modules that the
graphs name are those of the model that the reading process has built. The text is data, not code: the only functions
that it names are operators on tensors and a few functions of Python and torch.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import itertools
import json
import logging
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import whole_file, write_failure, write_text
from varuna_capslog.model import signature
from varuna_capslog.model.capture.python_calls import (
    CallShape,
    FunctionCall,
    MadeTensor,
    PythonCall,
    Whole,
    WholeModel,
)
from varuna_capslog.model.capture.runtime import (
    ByMode,
    ByShape,
    CapturedGraph,
    FixedSize,
    Guard,
    Region,
    Sizes,
    Varying,
    hold,
)
from varuna_capslog.model.capture.split import layer_module, part_identities
from varuna_capslog.model.known_values import Known
from varuna_capslog.model.layer import Layer, freeze_layers
from varuna_capslog.model.sources import class_name, code_digest, module_settings
from varuna_capslog.model.state_file import load_tensors

__all__ = ["CaptureRequest", "CapturedLayers", "Kept", "OneOf", "by_shape"]


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
    """Raised where a capture holds an object that has no text form, which the message names."""


def to_text(captured: CapturedLayers, model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """Return the text of a captured model, and the tensors that it refers to by name.

    Raises NotText for a constant that is no tensor, or a function that the text may not name.
    """
    layers, inputs, outputs = captured
    tensors: dict[str, Tensor] = {}
    written: list[dict[str, Any]] = []
    for layer in layers:
        module = layer.module
        if isinstance(module, WholeModel):
            described = {"call": _call_text(module, f"{len(written)}.", tensors), "outputs": module.outputs}
        elif isinstance(module, fx.GraphModule):
            described = {
                **_graph_of(module, model, f"{len(written)}.", tensors),
                "paths": module.meta["source_modules"],
            }
        else:
            raise NotText(f"layer {layer.name!r} is no captured graph")
        written.append({**described, "name": layer.name, "reads": layer.reads, "writes": layer.writes})
    meta: dict[str, Any] = layers[-1].module.meta  # type: ignore[assignment]
    properties = {name: meta[name] for name in ("whole", "joined", "parts") if name in meta}
    return json.dumps({"layers": written, "inputs": inputs, "outputs": outputs, "told": properties}), tensors


def from_text(text: str, tensors: Mapping[str, Tensor], model: nn.Module) -> CapturedLayers:
    """Return the captured model that `to_text` described, on the parameters and modules of `model`."""
    read = json.loads(text)
    layers, model_parts = [], part_identities(model)
    for number, described in enumerate(read["layers"]):
        module: CapturedGraph | WholeModel
        if "call" in described:
            module = WholeModel(model, _call_shape(described["call"], tensors), described["outputs"], "")
        else:
            graph, extra = _graph_from(described, f"{number}.", tensors, model)
            module = layer_module(graph, extra, model, described["paths"], model_parts)
        layers.append(Layer(described["name"], module, tuple(described["reads"]), tuple(described["writes"])))
    layers[-1].module.meta |= read["told"]
    freeze_layers(layers, model)
    return layers, tuple(read["inputs"]), tuple(read["outputs"])


def _graph_of(module: fx.GraphModule, model: nn.Module | None, place: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a graph's nodes, and objects that they name and the model lacks. place: prefix of the tensors' names."""
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
        return {"kind": "whole", "path": held.path, "call": _call_text(held, place, tensors)}
    if isinstance(held, FunctionCall):
        name = f"{held.kind.__module__}:{held.kind.__qualname__}"
        _function_kind(name)
        return {"kind": "function", "name": name, "call": _call_text(held, place, tensors)}
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
            return Whole(
                model.get_submodule(described["path"]), described["path"], _call_shape(described["call"], tensors)
            )
        case "function":
            return FunctionCall(_function_kind(described["name"]), _call_shape(described["call"], tensors))
        case _:
            graph, extra = _graph_from(described["body"], f"{place}.", tensors, model)
            arguments = _value(described["arguments"], {})
            return Region(CapturedGraph(extra, graph), _CONTEXTS[described["context"]], arguments)


def _call_text(call: PythonCall, place: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a call's arguments and result; known values of tensors are among `tensors`, by names after `place`."""
    shape = call.shape
    try:
        specs = pytree.treespec_dumps(shape.spec), pytree.treespec_dumps(shape.result_spec)
    except NotImplementedError as error:
        raise NotText(f"{call.describe()} takes or returns objects of a class without a text form") from error
    made = [(tensor.shape, tensor.stride, _value_text(tensor.dtype), tensor.device) for tensor in shape.tensors]
    constants = _value_text(shape.constants), _value_text(shape.result_constants)
    names = [None if value is None else f"{place}.value_{at}" for at, value in enumerate(shape.values)]
    tensors |= {name: value.tensor for name, value in zip(names, shape.values, strict=True) if name and value}
    return [*specs, *constants, shape.slots, shape.argument_shapes, shape.result_slots, made, shape.passed, names]


def _call_shape(described: Any, tensors: Mapping[str, Tensor]) -> CallShape:
    spec, result_spec, constants, results, slots, shapes, result_slots, made, passed, names = described
    return CallShape(
        pytree.treespec_loads(spec),
        _value(constants, {}),
        tuple(slots),
        tuple(map(tuple, shapes)),
        pytree.treespec_loads(result_spec),
        _value(results, {}),
        tuple(result_slots),
        tuple(
            MadeTensor(tuple(shape), tuple(stride), _value(dtype, {}), device) for shape, stride, dtype, device in made
        ),
        tuple((at, number) for at, number in passed),
        tuple(name and Known(tensors[name]) for name in names),
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


# -- Keeps captures for every process of a run: files in the run's folder, each with one captured model.
#
# `capture_layers` reads here first. A file belongs to the model's code, structure, inputs and cut points and to the
# version of torch; where anything differs, or the file is damaged, the model is captured again, which is always right.
# A file holds the layers, but not the objects in which the model returns its outputs (`captured_result`), which no run
# needs.


_DAMAGED = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    NotText,
)
"""Errors from reading a file whose contents differ from those that were written."""

_REFUSAL = ".txt"
"""Suffix of a file that says why a request cannot be captured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureRequest:
    """Arguments of `capture_layers`, which decide what is captured.

    example: (positional arguments, keyword arguments).
    """

    model: nn.Module
    cut_points: Sequence[str] | None
    example: tuple[tuple[Any, ...], Mapping[str, Any]]
    outputs: Sequence[str] | None
    evaluates: bool | None

    def digest(self, code: Sequence[str] = ()) -> str:
        """Return the SHA-256 of all that decides a capture, without weights. code: Python modules that also count."""
        digest = hashlib.sha256(repr((torch.__version__, self.cut_points, self.outputs, self.evaluates)).encode())
        leaves, spec = pytree.tree_flatten((self.example[0], dict(self.example[1])))
        digest.update(repr(([_described(leaf) for leaf in leaves], str(spec))).encode())
        tensors: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            digest.update(repr((path, class_name(type(module)), list(module_settings(module)))).encode())
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    first = tensors.setdefault(id(tensor), f"{path}.{name}")
                    digest.update(repr((name, first, tensor.shape, tensor.stride(), tensor.dtype)).encode())
                    digest.update(repr((tensor.requires_grad, name in module._non_persistent_buffers_set)).encode())
        digest.update(code_digest({type(module) for module in self.model.modules()}, code).encode())
        for file in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()


def _described(leaf: Any) -> object:
    if isinstance(leaf, Varying):
        return leaf.dimensions, _described(leaf.tensor)
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.requires_grad
    return class_name(type(leaf)), repr(leaf)


class Kept:
    """Stored captures of one run.

    folder: folder of the run's captures, which may be missing.
    code: Python modules, beside those of the model's classes, whose code decides what is captured.

    Attributes:
        writes: True: store new captures here.
    """

    def __init__(self, folder: Path, code: Sequence[str] = ()) -> None:
        self._folder, self._code = folder, tuple(code)
        self.writes = False

    def read(self, request: CaptureRequest) -> CapturedLayers | None:
        """Return the stored capture for this request, on the modules of its model; None if there is none. Raises
        FixedSize where a file says that the request cannot be captured.
        """
        if not self._folder.is_dir():
            return None
        path = self._path(request)
        if (refusal := path.with_suffix(_REFUSAL)).is_file():
            raise FixedSize(refusal.read_text(encoding="utf-8"))
        try:
            contents = load_tensors(path)
            tensors = contents["tensors"]
            if contents["digest"] != _digest(contents["layers"], tensors):
                raise ValueError("its digest differs")
            return from_text(contents["layers"], tensors, request.model)
        except FileNotFoundError:
            if not self.writes:
                _log.warning(
                    "%s holds no capture of this model, code and torch %s: it is captured here",
                    self._folder,
                    torch.__version__,
                )
        except _DAMAGED as error:
            _log.warning("the kept capture %s is damaged (%s): the model is captured here", path, error)
        return None

    def refuse(self, request: CaptureRequest, error: FixedSize) -> None:
        """Record that a request cannot be captured, so that no other process tries."""
        for evaluates in (True, False):  # the sizes of inputs do not depend on the modes that are asked for
            write_text(self._path(replace(request, evaluates=evaluates)).with_suffix(_REFUSAL), str(error))

    def write(self, request: CaptureRequest, captured: CapturedLayers) -> None:
        """Store a capture; if it has no text form, the log says so, and every process captures the model itself."""
        try:
            text, tensors = to_text(captured, request.model)
        except NotText as error:
            _log.warning("the captured model is not handed to the workers (%s): each captures it itself", error)
            return
        path = self._path(request)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                torch.save({"layers": text, "tensors": tensors, "digest": _digest(text, tensors)}, file)
        except OSError as error:
            raise write_failure(f"{path} cannot be written", error) from error

    def _path(self, request: CaptureRequest) -> Path:
        return self._folder / f"{request.digest(self._code)[:32]}.pt"


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(repr((name, Known(tensors[name]).key)).encode())
    return digest.hexdigest()


# -- Merges several captures of one model, each for other input sizes, where no single capture runs them all.
#
# All captures hold the model's own parameters and modules. A merged layer holds these with the graphs of all
# captures, and runs the graph that was captured for the shapes of its inputs. Where these shapes do not decide (a
# table of positions that is made without inputs), the layer also reads an input of the model.


class OneOf:
    """Example inputs of several shapes, for each of which a model is captured.

    examples: each as for one capture, a mapping of keyword arguments or positional arguments. The first example decides
        where the model is cut.
    """

    def __init__(self, examples: Sequence[Mapping[str, Any] | Sequence[Any]]) -> None:
        self.examples = tuple(examples)


def by_shape(captures: Sequence[CapturedLayers], name: str) -> CapturedLayers:
    """Merge the layers of several captures; return those of a single capture unchanged. name: the model's name, for
    messages. Raises FixedSize where for some sizes the model has other layers, or its layers pass other tensors.
    """
    layers, inputs, outputs = captures[0]
    for others, other_inputs, other_outputs in captures[1:]:
        signatures = [(layer.name, layer.reads, layer.writes) for layer in layers]
        if (signatures, inputs, outputs) != (
            [(layer.name, layer.reads, layer.writes) for layer in others],
            other_inputs,
            other_outputs,
        ):
            raise FixedSize(
                f"{name} is not the same chain of layers for all sizes of its inputs: {_difference(layers, others)}; "
                "give the sizes one by one, or cut points at which it is"
            )
    if len(captures) == 1:
        return captures[0]
    sizes = [_sizes_of_inputs(capture) for capture in captures]
    merged_layers = []
    for number, layer in enumerate(layers):
        modules = [capture[0][number].module for capture in captures]
        if not all(isinstance(module, fx.GraphModule) for module in modules):  # a slice of an nn.Sequential: any shape
            merged_layers.append(layer)
            continue
        graphs = cast(list[fx.GraphModule], modules)
        telling_input = _told_apart_by(layer.name, graphs, sizes)
        extra = [] if telling_input is None else [(telling_input, input_sizes[telling_input]) for input_sizes in sizes]
        reads = layer.reads if telling_input is None else (*layer.reads, telling_input)
        merged_layers.append(Layer(layer.name, _merged(graphs, extra), reads, layer.writes))
    return merged_layers, inputs, outputs


def _sizes_of_inputs(captured: CapturedLayers) -> dict[str, Sizes]:
    """Return the shapes of the chain's inputs, as the layers that read them were captured for."""
    shapes: dict[str, Sizes] = {}
    for layer in captured[0]:
        if isinstance(layer.module, fx.GraphModule):
            guard = _guard(layer.module)
            shapes |= {
                name: sizes for name, sizes in zip(guard.names, guard.shapes, strict=True) if name in captured[1]
            }
    return shapes


def _guard(module: fx.GraphModule) -> Guard:
    return cast(Guard, module.get_submodule("guard"))


def _difference(layers: Sequence[Layer], others: Sequence[Layer]) -> str:
    for layer, other_layer in zip(layers, others, strict=False):
        if (layer.name, layer.reads, layer.writes) != (other_layer.name, other_layer.reads, other_layer.writes):
            return f"{_layer_text(layer)} for one size, {_layer_text(other_layer)} for another one"
    return f"{len(layers)} layers or {len(others)}"


def _layer_text(layer: Layer) -> str:
    return f"layer {layer.name!r} reads {list(layer.reads)} and writes {list(layer.writes)}"


def _merged(modules: Sequence[fx.GraphModule], extra: Sequence[tuple[str, Sizes]]) -> nn.Module:
    """Merge a layer's graphs for several shapes into one module. extra: for each module, name and shape of an added
    input that selects the graph; empty where no such input is needed.
    """
    graphs: list[fx.Graph] = []
    guards: list[str] = []
    held: dict[str, Any] = {}
    for number, module in enumerate(modules):
        graph, env, values = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()
        guard = _guard(module)
        if extra:
            name, sizes = extra[number]
            guard = Guard(guard.layer, (*guard.names, name), (*guard.shapes, sizes), guard.train_only, guard.conditions)
        for node in module.graph.find_nodes(op="placeholder"):
            env[node] = graph.node_copy(node)
            values.append(env[node])
        if extra:
            values.append(graph.placeholder(f"value_{len(values)}"))
        guards.append(_name("guard", guard, number, held))
        held[guards[-1]] = guard
        graph.call_module(guards[-1], tuple(values))
        for node in module.graph.nodes:
            if node.op == "placeholder" or (node.op == "call_module" and node.target == "guard"):
                continue
            env[node] = graph.node_copy(node, lambda source, copies=env: copies[source])  # type: ignore[misc]
            if node.op in ("get_attr", "call_module"):
                attribute = _attribute_of(module, str(node.target))
                env[node].target = _name(str(node.target), attribute, number, held)
                held.setdefault(str(env[node].target), attribute)
        graphs.append(graph)
    merged = ByShape(held, graphs[0], class_name="CapturedLayer")
    for target, attribute in held.items():
        hold(merged, target, attribute)
    merged.take_graphs(graphs, guards)
    for module in modules:
        _take_over(merged, module)
    return merged


def _attribute_of(module: nn.Module, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), module)


def _name(target: str, attribute: object, number: int, held: Mapping[str, object]) -> str:
    """Return the merged module's name for an attribute: its own name, or a new one if another object has that name."""
    present = held.get(target, attribute)
    return target if present is attribute or _equal(present, attribute) else f"shape{number}_{target.replace('.', '_')}"


def _equal(first: object, second: object) -> bool:
    """True where two constants of the model's code hold the same numbers."""
    if isinstance(first, nn.Parameter) or not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


def _take_over(merged: ByShape, module: fx.GraphModule) -> None:
    """Take over modes, persistence of buffers and `meta` from one of the captures."""
    kept_out = {
        id(value)
        for part in module.modules()
        for name, value in part._buffers.items()
        if name in part._non_persistent_buffers_set
    }
    for part in merged.modules():
        not_persistent = {name for name, value in part._buffers.items() if id(value) in kept_out}
        part._non_persistent_buffers_set |= not_persistent
    merged.training = module.training
    assert isinstance(module, CapturedGraph)
    merged.freeze_as(module)
    for key, value in module.meta.items():
        before = merged.meta.get(key, ())
        both = isinstance(value, tuple) and isinstance(before, tuple)
        merged.meta[key] = tuple(dict.fromkeys((*before, *value))) if both else merged.meta.get(key, value)


def _told_apart_by(layer: str, modules: Sequence[fx.GraphModule], sizes: Sequence[Mapping[str, Sizes]]) -> str | None:
    """Return the model's input that a layer must also read, if for two of the sizes the layer gets tensors of the same
    shapes but computes something else; else None.
    """
    unclear = [
        (first, second)
        for first, second in itertools.combinations(range(len(modules)), 2)
        if _guard(modules[first]).shapes == _guard(modules[second]).shapes
        and not _same_work(modules[first], modules[second])
    ]
    if not unclear:
        return None
    for name in sizes[0]:
        if all(sizes[first].get(name) != sizes[second].get(name) for first, second in unclear):
            return name
    raise CapslogError(
        f"layer {layer!r} does not do the same for two of the sizes that the model is captured for, but gets tensors "
        "of the same shapes for both, and no input of the model tells them apart; leave one of these sizes out"
    )


def _same_work(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    signatures = [signature.run_signature([Layer("", module, (), ())]) for module in (first, second)]
    return signatures[0] == signatures[1] and all(
        tensor is other_tensor or _equal(tensor, other_tensor)
        for tensor, other_tensor in zip(_tensors(first), _tensors(second), strict=True)
    )


def _tensors(module: fx.GraphModule) -> list[object]:
    """Return the tensors and objects that a graph reads in addition to its inputs, in order."""
    return [_attribute_of(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
