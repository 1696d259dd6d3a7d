"""Cuts open the parts of a captured graph that run under autocast, or without gradients, of the model's own.

An export gives such a part as one operation, in which no cut could lie. Called by `capture_layers` for each graph; each
piece is an operation in the same context, so that what is computed stays the same to the last bit.
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
    """Puts one region for each cut point's module, and for what lies between them, in the place of each that runs
    several; changes the graph in place. A region of which pieces would change each other's tensors stays one.
    """
    for node in captured.graph.find_nodes(op="call_module"):
        region = captured.extra.get(str(node.target))
        if isinstance(region, Region):
            pieces = _pieces(node, region, cut_points)
            if len(pieces) > 1:
                _put_pieces(captured, node, region, pieces)
            elif pieces:
                for one in (node, *node.users):
                    one.meta["nn_module_stack"] = _stack_of(pieces[0])


def _pieces(node: fx.Node, region: Region, cut_points: Collection[str]) -> list[list[fx.Node]]:
    """The operations of a region, apart as cut points ask."""
    outer = module_calls(node).keys()
    found: list[list[fx.Node]] = []
    for (cut, inside), run in groupby(_operations(region), lambda one: _place(one, outer, cut_points)):
        if cut is None and not inside and found:
            found[-1] += run  # what is no module's follows the one before it
        else:
            found.append(list(run))
    made = {one: number for number, piece in enumerate(found) for one in piece}
    for one in made:
        if any(made.get(argument, -1) not in (made[one], -1) for argument in mutated_arguments(one)):
            return [list(made)]
    return _with_weights_together(node, region, found) if region.context is torch.autocast else found


def _operations(region: Region) -> list[fx.Node]:
    operations = (one for one in region.body.graph.nodes if one.op in ("call_function", "call_module"))
    return [one for one in operations if one.target is not getattr]


def _place(one: fx.Node, outer: Collection[str], cut_points: Collection[str]) -> tuple[str | None, bool]:
    """The call of a cut point's module that an operation lies in, and whether it lies in a module of the region."""
    calls = {key: path for key, path in module_calls(one).items() if key not in outer}
    return next((key for key, path in reversed(calls.items()) if path in cut_points), None), bool(calls)


def _with_weights_together(node: fx.Node, region: Region, pieces: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """One piece of all from the first to the last that reads a weight, of which autocast makes one copy."""
    number = {one: at for at, piece in enumerate(pieces) for one in piece}
    ranges = []
    for given, source in zip(region.body.graph.find_nodes(op="placeholder"), node.args, strict=True):
        users = [number[user] for user in given.users if user in number]
        if isinstance(source, fx.Node) and source.op == "get_attr" and users:
            ranges.append((min(users), max(users)))
    place = joined(len(pieces), ranges)
    return [[one for at in group for one in pieces[at]] for _, group in groupby(range(len(pieces)), place.__getitem__)]


def _put_pieces(captured: Captured, node: fx.Node, region: Region, pieces: Sequence[list[fx.Node]]) -> None:
    """Puts a region for each of the pieces in the place of one, and what they make in the place of its results."""
    body = region.body.graph
    values: dict[fx.Node, fx.Node] = dict(zip(body.find_nodes(op="placeholder"), node.args, strict=True))  # type: ignore[arg-type]
    (results,) = body.find_nodes(op="output")[0].args
    kept = {one for one in results if isinstance(one, fx.Node)}
    for number, piece in enumerate(pieces):
        writes = [one for one in piece if one in kept or not set(one.users) <= {*piece}]
        graph, reads = _graph_of(piece, writes)
        held = {str(one.target): region.body.get_submodule(str(one.target)) for one in piece if one.op == "call_module"}
        target = f"{node.target}_{number}"
        captured.extra[target] = Region(CapturedGraph(nn.ModuleDict(held), graph), region.context, region.arguments)
        stack = _stack_of(piece)
        with captured.graph.inserting_before(node):
            call = captured.graph.call_module(target, tuple(values[one] for one in reads))
            call.meta = {"val": tuple(one.meta.get("val") for one in writes), "nn_module_stack": stack}
            call.meta["inner_stacks"] = [one.meta.get("nn_module_stack") or {} for one in piece]
            for place, one in enumerate(writes):
                values[one] = captured.graph.call_function(operator.getitem, (call, place))
                values[one].meta = {"val": one.meta.get("val"), "nn_module_stack": stack}
    for user in list(node.users):
        value = values[results[user.args[1]]]
        user.replace_all_uses_with(value)
        captured.outputs.update({name: value for name, other in captured.outputs.items() if other is user})
        captured.graph.erase_node(user)
    captured.graph.erase_node(node)
    del captured.extra[str(node.target)]


def _stack_of(piece: Sequence[fx.Node]) -> dict[str, Any]:
    """The calls of modules that a piece runs in, but for what follows them and is no module's."""
    stacks = [stack for one in piece if (stack := one.meta.get("nn_module_stack") or {}) and module_path(one)]
    return {key: entry for key, entry in stacks[0].items() if all(key in stack for stack in stacks)} if stacks else {}


def _graph_of(piece: Sequence[fx.Node], writes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of some operations, and the values that it reads."""
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()
    env: dict[fx.Node, fx.Node] = {}

    def here(one: fx.Node) -> fx.Node:
        if one in env:
            return env[one]
        if one.target is getattr:  # the device of a value that is read
            env[one] = graph.node_copy(one, here)
        elif one not in inputs:
            with graph.inserting_before():
                inputs[one] = graph.placeholder(f"value_{len(inputs)}")
        return env.get(one) or inputs[one]

    for one in piece:
        env[one] = graph.node_copy(one, here)
    graph.output(tuple(env[one] for one in writes))
    return graph, [*reversed(inputs)]
