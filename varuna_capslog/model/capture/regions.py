"""Cuts open the parts of a captured graph that run under the model's own autocast or no_grad blocks.

An export returns such a part as one operation, in which no cut can lie. `capture_layers` calls this for each graph;
each piece is an operation in the same context, so that the results stay the same to the last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from varuna_capslog.model.capture.assign import joined
from varuna_capslog.model.capture.collapse import mutated_arguments
from varuna_capslog.model.capture.export import Captured, module_calls, module_path
from varuna_capslog.model.capture.runtime import CapturedGraph, Region

__all__ = ["open_regions"]


def open_regions(captured: Captured, cut_points: Collection[str]) -> None:
    """Replace each region that runs several cut points' modules by one region for each of them and for what lies
    between; changes the graph in place. A region whose pieces would change each other's tensors stays one.
    """
    for node in captured.graph.find_nodes(op="call_module"):
        region = captured.extra.get(str(node.target))
        if isinstance(region, Region):
            pieces = _pieces(node, region, cut_points)
            if len(pieces) > 1:
                _put_pieces(captured, node, region, pieces)
            elif pieces:
                for operation in (node, *node.users):
                    operation.meta["nn_module_stack"] = _stack_of(pieces[0])


def _pieces(node: fx.Node, region: Region, cut_points: Collection[str]) -> list[list[fx.Node]]:
    """Return the operations of a region, divided where cut points ask."""
    outer = module_calls(node).keys()
    pieces: list[list[fx.Node]] = []
    for (cut, inside), run in groupby(_operations(region), lambda operation: _place(operation, outer, cut_points)):
        if cut is None and not inside and pieces:
            pieces[-1] += run  # operations of no module follow those before them
        else:
            pieces.append(list(run))
    made = {operation: number for number, piece in enumerate(pieces) for operation in piece}
    for operation in made:
        if any(made.get(argument, -1) not in (made[operation], -1) for argument in mutated_arguments(operation)):
            return [list(made)]
    return _with_weights_together(node, region, pieces) if region.context is torch.autocast else pieces


def _operations(region: Region) -> list[fx.Node]:
    operations = (node for node in region.body.graph.nodes if node.op in ("call_function", "call_module"))
    return [operation for operation in operations if operation.target is not getattr]


def _place(operation: fx.Node, outer: Collection[str], cut_points: Collection[str]) -> tuple[str | None, bool]:
    """Return an operation's call of a cut point's module, and whether it lies in a module of the region."""
    calls = {key: path for key, path in module_calls(operation).items() if key not in outer}
    return next((key for key, path in reversed(calls.items()) if path in cut_points), None), bool(calls)


def _with_weights_together(node: fx.Node, region: Region, pieces: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Join all pieces from the first to the last that reads a weight, since autocast makes one copy of it."""
    number = {operation: at for at, piece in enumerate(pieces) for operation in piece}
    ranges = []
    for argument, source in zip(region.body.graph.find_nodes(op="placeholder"), node.args, strict=True):
        users = [number[user] for user in argument.users if user in number]
        if isinstance(source, fx.Node) and source.op == "get_attr" and users:
            ranges.append((min(users), max(users)))
    place = joined(len(pieces), ranges)
    return [
        [operation for at in group for operation in pieces[at]]
        for _, group in groupby(range(len(pieces)), place.__getitem__)
    ]


def _put_pieces(captured: Captured, node: fx.Node, region: Region, pieces: Sequence[list[fx.Node]]) -> None:
    """Replace one region by a region for each of the pieces, and its results by what the pieces make."""
    body = region.body.graph
    values: dict[fx.Node, fx.Node] = dict(zip(body.find_nodes(op="placeholder"), node.args, strict=True))  # type: ignore[arg-type]
    (results,) = body.find_nodes(op="output")[0].args
    kept = {output for output in results if isinstance(output, fx.Node)}
    for number, piece in enumerate(pieces):
        writes = [operation for operation in piece if operation in kept or not set(operation.users) <= {*piece}]
        graph, reads = _graph_of(piece, writes)
        held = {
            str(operation.target): region.body.get_submodule(str(operation.target))
            for operation in piece
            if operation.op == "call_module"
        }
        target = f"{node.target}_{number}"
        captured.extra[target] = Region(CapturedGraph(nn.ModuleDict(held), graph), region.context, region.arguments)
        stack = _stack_of(piece)
        with captured.graph.inserting_before(node):
            call = captured.graph.call_module(target, tuple(values[source] for source in reads))
            call.meta = {"val": tuple(operation.meta.get("val") for operation in writes), "nn_module_stack": stack}
            call.meta["inner_stacks"] = [operation.meta.get("nn_module_stack") or {} for operation in piece]
            for place, operation in enumerate(writes):
                values[operation] = captured.graph.call_function(operator.getitem, (call, place))
                values[operation].meta = {"val": operation.meta.get("val"), "nn_module_stack": stack}
    for user in list(node.users):
        value = values[results[user.args[1]]]
        user.replace_all_uses_with(value)
        captured.outputs.update({name: value for name, output in captured.outputs.items() if output is user})
        captured.graph.erase_node(user)
    captured.graph.erase_node(node)
    del captured.extra[str(node.target)]


def _stack_of(piece: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the calls of modules that a piece runs in, without trailing operations of no module."""
    stacks = [
        stack
        for operation in piece
        if (stack := operation.meta.get("nn_module_stack") or {}) and module_path(operation)
    ]
    return {key: entry for key, entry in stacks[0].items() if all(key in stack for stack in stacks)} if stacks else {}


def _graph_of(piece: Sequence[fx.Node], writes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph of some operations, and the values that it reads."""
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()
    env: dict[fx.Node, fx.Node] = {}

    def here(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        if node.target is getattr:  # the device of a value that is read
            env[node] = graph.node_copy(node, here)
        elif node not in inputs:
            with graph.inserting_before():
                inputs[node] = graph.placeholder(f"value_{len(inputs)}")
        return env.get(node) or inputs[node]

    for operation in piece:
        env[operation] = graph.node_copy(operation, here)
    graph.output(tuple(env[operation] for operation in writes))
    return graph, [*reversed(inputs)]
