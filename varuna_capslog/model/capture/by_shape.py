"""One chain from several captures of one model, each for other sizes of its inputs, where no capture runs them all.

All captures hold the model's own parameters and modules. A layer keeps what they hold, with the graphs of all, and runs
the graph that was captured for the shapes that it gets. Where these do not tell it which one (a table of positions that
is made from nothing), it reads an input of the model besides.
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
    """The layers of several captures as one; of one capture, as they are.

    Args:
        name: the model's, for messages.

    Raises:
        CapslogError: for some sizes the model is cut into other layers or hands on other tensors.
    """
    layers, inputs, outputs = captures[0]
    for other, theirs, results in captures[1:]:
        told = [(layer.name, layer.reads, layer.writes) for layer in layers]
        if (told, inputs, outputs) != ([(one.name, one.reads, one.writes) for one in other], theirs, results):
            raise CapslogError(
                f"{name} is not the same chain of layers for all sizes of its inputs: {_difference(layers, other)}; "
                "give the sizes one by one, or cut points at which it is"
            )
    if len(captures) == 1:
        return captures[0]
    sizes = [_sizes_of_inputs(capture) for capture in captures]
    found = []
    for number, layer in enumerate(layers):
        modules = [capture[0][number].module for capture in captures]
        if not all(isinstance(module, fx.GraphModule) for module in modules):  # of an nn.Sequential, for any shape
            found.append(layer)
            continue
        same = cast(list[fx.GraphModule], modules)
        beside = _told_apart_by(layer.name, same, sizes)
        extra = [] if beside is None else [(beside, own[beside]) for own in sizes]
        reads = layer.reads if beside is None else (*layer.reads, beside)
        found.append(Layer(layer.name, _merged(same, extra), reads, layer.writes))
    return found, inputs, outputs


def _sizes_of_inputs(captured: CapturedLayers) -> dict[str, Sizes]:
    """The shapes of the chain's inputs, as the layers that read them were captured for."""
    found: dict[str, Sizes] = {}
    for layer in captured[0]:
        if isinstance(layer.module, fx.GraphModule):
            guard = _guard(layer.module)
            found |= {name: sizes for name, sizes in zip(guard.names, guard.shapes, strict=True) if name in captured[1]}
    return found


def _guard(module: fx.GraphModule) -> Guard:
    return cast(Guard, module.get_submodule("guard"))


def _difference(layers: Sequence[Layer], others: Sequence[Layer]) -> str:
    for one, other in zip(layers, others, strict=False):
        if (one.name, one.reads, one.writes) != (other.name, other.reads, other.writes):
            return f"{_described(one)} for one size, {_described(other)} for another one"
    return f"{len(layers)} layers or {len(others)}"


def _described(layer: Layer) -> str:
    return f"layer {layer.name!r} reads {list(layer.reads)} and writes {list(layer.writes)}"


def _merged(modules: Sequence[fx.GraphModule], extra: Sequence[tuple[str, Sizes]]) -> nn.Module:
    """One module for what a layer does for several shapes.

    extra: name and shape, for each of the modules, of one more input, by which it is chosen; none: it needs none.
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
            env[node] = graph.node_copy(node, lambda one, known=env: known[one])  # type: ignore[misc]
            if node.op in ("get_attr", "call_module"):
                own = _held(module, str(node.target))
                env[node].target = _name(str(node.target), own, number, held)
                held.setdefault(str(env[node].target), own)
        graphs.append(graph)
    merged = ByShape(held, graphs[0], class_name="CapturedLayer")
    for target, own in held.items():
        hold(merged, target, own)
    merged.take_graphs(graphs, guards)
    for module in modules:
        _take_over(merged, module)
    return merged


def _held(module: nn.Module, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), module)


def _name(target: str, own: object, number: int, held: Mapping[str, object]) -> str:
    """The name of something that a graph holds: its own, or another one where that is of another thing's."""
    there = held.get(target, own)
    return target if there is own or _equal(there, own) else f"shape{number}_{target.replace('.', '_')}"


def _equal(one: object, other: object) -> bool:
    """Whether two constants of the model's code are the same numbers."""
    if isinstance(one, nn.Parameter) or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _take_over(merged: ByShape, module: fx.GraphModule) -> None:
    """Modes, persistence of buffers and the layer's place in its model, as one of the captures has them."""
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
    """The input of the model that a layer must read to know what to do, where its own tensors have the same shapes for
    two sizes and it does not do the same with them; None where it needs none.
    """
    unclear = [
        (one, other)
        for one, other in itertools.combinations(range(len(modules)), 2)
        if _guard(modules[one]).shapes == _guard(modules[other]).shapes and not _same_work(modules[one], modules[other])
    ]
    if not unclear:
        return None
    for name in sizes[0]:
        if all(sizes[one].get(name) != sizes[other].get(name) for one, other in unclear):
            return name
    raise CapslogError(
        f"layer {layer!r} does not do the same for two of the sizes that the model is captured for, but gets tensors "
        "of the same shapes for both, and no input of the model tells them apart; leave one of these sizes out"
    )


def _same_work(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    signatures = [run_signature([Layer("", each, (), ())]) for each in (one, other)]
    return signatures[0] == signatures[1] and all(
        left is right or _equal(left, right) for left, right in zip(_tensors(one), _tensors(other), strict=True)
    )


def _tensors(module: fx.GraphModule) -> list[object]:
    """What a graph reads that is none of its inputs, in order."""
    return [_held(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
