"""Merges several captures of one model, each for other input sizes, where no single capture runs them all.

All captures hold the model's own parameters and modules. A merged layer holds these with the graphs of all captures,
and runs the graph that was captured for the shapes of its inputs. Where these shapes do not decide (a table of
positions that is made from nothing), the layer also reads an input of the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.runtime import ByShape, CapturedGraph, Guard, Sizes, hold
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.signature import run_signature

__all__ = ["OneOf", "by_shape"]


class OneOf:
    """Example inputs of several shapes, each captured by itself.

    Args:
        examples: each as for one capture: a mapping of keyword arguments, or positional ones. The first decides where
            the model is cut.
    """

    def __init__(self, examples: Sequence[Mapping[str, Any] | Sequence[Any]]) -> None:
        self.examples = tuple(examples)


def by_shape(captures: Sequence[CapturedLayers], name: str) -> CapturedLayers:
    """Merge the layers of several captures; those of a single capture are returned as they are.

    Args:
        name: the model's, for messages.

    Raises:
        CapslogError: for some sizes the model is cut into other layers or hands on other tensors.
    """
    layers, inputs, outputs = captures[0]
    for others, other_inputs, other_outputs in captures[1:]:
        signatures = [(layer.name, layer.reads, layer.writes) for layer in layers]
        if (signatures, inputs, outputs) != (
            [(layer.name, layer.reads, layer.writes) for layer in others],
            other_inputs,
            other_outputs,
        ):
            raise CapslogError(
                f"{name} is not the same chain of layers for all sizes of its inputs: {_difference(layers, others)}; "
                "give the sizes one by one, or cut points at which it is"
            )
    if len(captures) == 1:
        return captures[0]
    sizes = [_sizes_of_inputs(capture) for capture in captures]
    merged_layers = []
    for number, layer in enumerate(layers):
        modules = [capture[0][number].module for capture in captures]
        if not all(isinstance(module, fx.GraphModule) for module in modules):  # of an nn.Sequential, for any shape
            merged_layers.append(layer)
            continue
        graphs = cast(list[fx.GraphModule], modules)
        beside = _told_apart_by(layer.name, graphs, sizes)
        extra = [] if beside is None else [(beside, input_sizes[beside]) for input_sizes in sizes]
        reads = layer.reads if beside is None else (*layer.reads, beside)
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
            return f"{_described(layer)} for one size, {_described(other_layer)} for another one"
    return f"{len(layers)} layers or {len(others)}"


def _described(layer: Layer) -> str:
    return f"layer {layer.name!r} reads {list(layer.reads)} and writes {list(layer.writes)}"


def _merged(modules: Sequence[fx.GraphModule], extra: Sequence[tuple[str, Sizes]]) -> nn.Module:
    """Merge a layer's graphs for several shapes into one module.

    extra: for each module, name and shape of one more input that selects the graph; empty where none is needed.
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
                attribute = _held(module, str(node.target))
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


def _held(module: nn.Module, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), module)


def _name(target: str, attribute: object, number: int, held: Mapping[str, object]) -> str:
    """Name under which the merged module holds an attribute: its own, or a new one where another object has that."""
    present = held.get(target, attribute)
    return target if present is attribute or _equal(present, attribute) else f"shape{number}_{target.replace('.', '_')}"


def _equal(first: object, second: object) -> bool:
    """True where two constants of the model's code hold the same numbers."""
    if isinstance(first, nn.Parameter) or not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


def _take_over(merged: ByShape, module: fx.GraphModule) -> None:
    """Take over modes, persistence of buffers and the layer's place in its model from one of the captures."""
    kept_out = {
        id(value)
        for part in module.modules()
        for name, value in part._buffers.items()
        if name in part._non_persistent_buffers_set
    }
    for part in merged.modules():
        out = {name for name, value in part._buffers.items() if id(value) in kept_out}
        part._non_persistent_buffers_set |= out
    merged.training = module.training
    assert isinstance(module, CapturedGraph)
    merged.freeze_as(module)
    for key, value in module.meta.items():
        before = merged.meta.get(key, ())
        both = isinstance(value, tuple) and isinstance(before, tuple)
        merged.meta[key] = tuple(dict.fromkeys((*before, *value))) if both else merged.meta.get(key, value)


def _told_apart_by(layer: str, modules: Sequence[fx.GraphModule], sizes: Sequence[Mapping[str, Sizes]]) -> str | None:
    """Return the model's input that a layer must read as well, or None.

    It needs one where its own tensors have the same shapes for two sizes but it does not do the same with them.
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
    signatures = [run_signature([Layer("", module, (), ())]) for module in (first, second)]
    return signatures[0] == signatures[1] and all(
        tensor is other_tensor or _equal(tensor, other_tensor)
        for tensor, other_tensor in zip(_tensors(first), _tensors(second), strict=True)
    )


def _tensors(module: fx.GraphModule) -> list[object]:
    """Return what a graph reads beside its inputs, in order."""
    return [_held(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
