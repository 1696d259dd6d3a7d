"""Cuts a captured graph into the layers of a chain.

`assign` decides which layer each node belongs to; values that later layers need cross the cut under a readable name.
In-place operations never change a tensor that crossed a cut.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.assign import assign_layers, joined
from varuna_capslog.model.capture.collapse import mutated_arguments
from varuna_capslog.model.capture.export import (
    Captured,
    follow_device,
    is_open,
    module_calls,
    module_path,
    nodes_by_storage,
)
from varuna_capslog.model.capture.python_calls import Whole
from varuna_capslog.model.capture.repeats import storage_key, value_of
from varuna_capslog.model.capture.runtime import CapturedGraph, Guard, OfTheModel, Region, Sizes
from varuna_capslog.model.layer import Layer, freeze_layers

__all__ = ["layer_module", "localise_sizes", "open_regions", "part_identities", "split_graph"]


# -- Makes every operation of a captured graph read sizes that may change from a tensor near it.
#
# Called by `capture_layers` after an export with dynamic dimensions. The export reads a size once, from an input of
# the model, and passes the number to every operation that needs it; but only tensors cross a cut, and a module that
# replaces its part of the graph has one tensor as its input. Afterwards every operation reads or computes the numbers
# that it needs directly before it.


def localise_sizes(captured: Captured) -> None:
    """Change the graph in place; without dynamic dimensions nothing changes.

    An operation reads an input's size from a near tensor with the same size, else from the export's tensor. It reads
    other numbers from its own operands, else computes them as the export does.
    """
    numbers = [node for node in captured.graph.nodes if _is_number(node)]
    if not numbers:
        return
    position = {node: at for at, node in enumerate(captured.graph.nodes)}
    for user in [node for node in position if not _is_number(node)]:
        made: dict[fx.Node, fx.Node] = {}
        for number in [node for node in user.all_input_nodes if _is_number(node)]:
            user.replace_input_with(number, _near(captured.graph, number, user, position, made))
    for number in reversed(numbers):
        if not number.users:
            captured.graph.erase_node(number)


def sizes_of(node: fx.Node, bounds: dict[str, tuple[int, int | None]]) -> Sizes:
    """Return the sizes of a value: numbers, and (name, least, most or None) for sizes that may change."""
    sizes: list[Any] = []
    for size in node.meta["val"].shape:
        name = str(size)
        sizes.append((name, *bounds.get(name, (0, None))) if is_open(size) else int(size))
    return tuple(sizes)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(
        node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _near(
    graph: fx.Graph, number: fx.Node, user: fx.Node, position: dict[fx.Node, int], made: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Return a node just before `user` that reads or computes the number."""
    if number in made:
        return made[number]
    is_read = number.target is torch.ops.aten.sym_size.int
    source = next(_tensors_with(number, user, position, everywhere=is_read), number.args if is_read else None)
    target: Any = number.target
    if source is not None:
        target, arguments = torch.ops.aten.sym_size.int, source
    else:
        swap = lambda node: _near(graph, node, user, position, made) if _is_number(node) else node  # noqa: E731
        arguments = fx.map_arg(number.args, swap)
    with graph.inserting_before(user):
        node = made[number] = graph.call_function(target, tuple(arguments), dict(number.kwargs))
    node.meta = {"val": number.meta["val"], "nn_module_stack": user.meta.get("nn_module_stack")}
    return node


def _tensors_with(
    number: fx.Node, user: fx.Node, position: dict[fx.Node, int], everywhere: bool
) -> Iterator[tuple[fx.Node, int]]:
    """Yield (tensor, dimension) with this size among the values from which `user` is computed, last first; then among
    the other operands of operations on its result, for operations without operands (the noise of a stochastic depth).

    everywhere: False: search only the operands of `user`.
    """
    wanted = number.meta["val"].node.expr

    def fitting(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.op != "get_attr":
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == wanted:
                    yield node, dimension

    if not everywhere:
        for source in user.all_input_nodes:
            yield from fitting(source)
        return
    for node in _reached(user, position, lambda node: node.all_input_nodes, -1):
        yield from fitting(node)
    for node in _reached(user, position, lambda node: node.users, 1):
        for source in node.all_input_nodes:
            if position.get(source, len(position)) < position[user]:
                yield from fitting(source)


def _reached(
    start: fx.Node, position: dict[fx.Node, int], following: Callable[[fx.Node], Iterable[fx.Node]], order: int
) -> Iterator[fx.Node]:
    """Yield nodes reachable from a node, by ascending position or, with order -1, descending; numbers are left out."""
    visited = {start}
    waiting: list[tuple[int, fx.Node]] = []
    node = start
    while True:
        for neighbour in following(node):
            if neighbour not in visited and neighbour in position and not _is_number(neighbour):
                visited.add(neighbour)
                heapq.heappush(waiting, (order * position[neighbour], neighbour))
        if not waiting:
            return
        node = heapq.heappop(waiting)[1]
        yield node


# -- cutting a captured graph into the layers of a chain


def split_graph(
    captured: Captured,
    model: nn.Module,
    cut_points: Sequence[str],
    outputs: Sequence[str] | None,
    train_only: str | None,
    lenient: bool = False,
) -> tuple[list[Layer], tuple[str, ...], tuple[str, ...]]:
    """Return the layers of a captured model, and the names of the tensors that enter and leave it.

    Args:
        captured: the graph; it cannot be used afterwards.
        model: its parameters and modules become those of the layers.
        cut_points: submodules to cut before.
        outputs: names of the wanted outputs, None for all.
        train_only: why the graph must not run in eval mode, or None.
        lenient: skip, instead of refusing, cut points that never run or begin where another does; also cut where
            weights that belong to no block follow a block (the final norm and head).

    Raises:
        CapslogError: a cut point that never runs or begins where another one does, an unknown output, an in-place
            change of a value of which two views cross a cut.
    """
    wanted = _choose_outputs(captured, outputs)
    layer_of, names = assign_layers(captured, model, cut_points, lenient)
    sharing = nodes_by_storage(captured.graph.nodes)
    behind = list(_changes_behind(captured, wanted, layer_of, sharing)) if lenient else []
    of_one = _with_joined_layers(layer_of, names, captured, behind, model, lenient)
    layer_of, names = of_one.layer_of, of_one.names
    _protect_boundaries(captured, wanted, layer_of, sharing)
    value_names = _name_values(captured, wanted, layer_of)
    parts: list[list[fx.Node]] = [[] for _ in names]
    for node in captured.graph.nodes:
        if node in layer_of:
            parts[layer_of[node]].append(node)
    last_use = {node: max((layer_of[user] for user in node.users if user in layer_of), default=-1) for node in layer_of}
    layers, model_parts = [], part_identities(model)
    for index, part in enumerate(parts):
        reads: list[fx.Node] = []
        for node in part:
            for source in node.all_input_nodes:
                if source.op != "get_attr" and layer_of.get(source) != index and source not in reads:
                    reads.append(source)
        writes = [(value_names[node], node) for node in part if last_use[node] > index or node in wanted.values()]
        if index == len(parts) - 1:
            # a tensor returned under two names, or an unchanged input, is written again under the other name
            made = {written for written, _ in writes}
            for output, node in wanted.items():
                if output not in made and value_names.get(node) != output:
                    writes.append((output, node))
                    if layer_of.get(node) != index and node not in reads:
                        reads.append(node)
        read_names = {value_names[node]: node for node in reads}
        guard = _guard_of(captured, names[index], read_names, train_only)
        module = _layer_module(captured, model, part, reads, [n for _, n in writes], guard, model_parts)
        layers.append(Layer(names[index], module, tuple(read_names), tuple(written for written, _ in writes)))
    changes = captured.watch.changes if captured.watch is not None and captured.watch.keeps else []
    left_behind = [(change.put, values) for change, values in zip(changes, captured.left_behind or (), strict=True)]
    watch = captured.watch
    python = bool(captured.whole or (watch is not None and (watch.drawn or watch.changes)))
    properties = {
        "result": captured.result,
        "whole": captured.whole,
        "left": OfTheModel(left_behind),
        "python": python,
        "joined": of_one.whys,
        "parts": of_one.parts,
    }
    layers[-1].module.meta |= properties  # type: ignore[operator]
    freeze_layers(layers, model)
    return layers, tuple(captured.inputs), tuple(wanted)


@dataclass
class _Joined:
    """Layers after joining. layer_of: layer of every node. names: names of the layers. whys: a sentence for each range
    that was joined. parts: name of a joined layer -> the former names of the other layers that it holds.
    """

    layer_of: dict[fx.Node, int]
    names: list[str]
    whys: list[str]
    parts: dict[str, list[str]]


def _with_joined_layers(
    layer_of: Mapping[fx.Node, int],
    names: list[str],
    captured: Captured,
    changes: Iterable[tuple[fx.Node, Sequence[fx.Node]]],
    model: nn.Module,
    lenient: bool,
) -> _Joined:
    """Join all layers from the first to the last that call one module with running statistics, since one rank must add
    these in the order of the calls. With automatic cut points (lenient), also join layers that begin with a module of
    the model's `not_parted` to the layer before, and the layers that make several views of a tensor to the layer that
    changes the tensor in place (`changes`, as `_changes_behind` yields them).
    """
    ranges: dict[tuple[int, int], str] = {}
    for norm, layers in _statistics(layer_of, captured, model).items():
        if min(layers) < max(layers):
            why = f"which makes all calls of {norm}, since its running statistics are added in their order"
            ranges.setdefault((min(layers), max(layers)), why)
    for node, views in changes:
        makers = [layer_of[view] for view in views if view in layer_of]
        if len(views) > 1 and makers:
            why = f"since {module_path(node) or 'the model'} changes in place a tensor that is read through other views"
            ranges.setdefault((min(makers), layer_of[node]), why)
    whys = getattr(model, "not_parted", {}) if lenient else {}
    for reason, group in groupby(range(len(names)), lambda at: whys.get(names[at])):
        numbers = list(group)
        if reason is not None and numbers[-1] > 0:
            ranges[max(0, numbers[0] - 1), numbers[-1]] = reason
    place = joined(len(names), sorted(ranges))
    kept = sorted(set(place))
    sentences = [
        f"{names[first]} to {names[last]} are one layer, {why}"
        for (first, last), why in ranges.items()
        if not any(low <= first and last <= high and (low, high) != (first, last) for low, high in ranges)
    ]
    parts: dict[str, list[str]] = {}
    for at, first in enumerate(place):
        if first < at:
            parts.setdefault(names[first], []).append(names[at])
    numbers_of = {node: kept.index(place[layer]) for node, layer in layer_of.items()}
    return _Joined(numbers_of, [names[at] for at in kept], sentences, parts)


def _statistics(layer_of: Mapping[fx.Node, int], captured: Captured, model: nn.Module) -> dict[str, list[int]]:
    """Return the layers that call each module with running statistics, by the module's name."""
    users: dict[int, list[int]] = {}
    norms: dict[int, str] = {}
    for node, layer in layer_of.items():
        if node.op != "call_module":
            continue
        called = captured.extra.get(str(node.target))
        if called is not None and not isinstance(called, Whole):
            continue
        path = called.path if isinstance(called, Whole) else str(node.target)
        for name, part in model.get_submodule(path).named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats and part.training:
                users.setdefault(id(part), []).append(layer)
                norms[id(part)] = f"{path}.{name}".rstrip(".")
    return {norms[module_id]: layers for module_id, layers in users.items()}


def _choose_outputs(captured: Captured, outputs: Sequence[str] | None) -> dict[str, fx.Node]:
    for output in outputs or ():
        if output not in captured.outputs:
            raise CapslogError(
                f"outputs={list(outputs or ())} names {output!r}; the model returns {list(captured.outputs)}"
            )
    return {output: captured.outputs[output] for output in (captured.outputs if outputs is None else outputs)}


def _changes_behind(
    captured: Captured,
    wanted: Mapping[str, fx.Node],
    layer_of: Mapping[fx.Node, int],
    sharing: Mapping[int | fx.Node, Sequence[fx.Node]],
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each in-place operation on tensors of earlier layers, and the values of these layers that share the changed
    storage and are read in the operation's layer or later.

    sharing: nodes by storage; the caller may add nodes between two results.
    """
    for node in list(captured.graph.nodes):
        if node not in layer_of:
            continue
        index = layer_of[node]
        for written in mutated_arguments(node):
            crossing = [
                source
                for source in sharing[storage_key(written)]
                if (source.op == "placeholder" or layer_of.get(source, index) < index)
                and (source in wanted.values() or any(layer_of.get(user, -1) >= index for user in source.users))
            ]
            if crossing:
                yield node, crossing


def _protect_boundaries(
    captured: Captured,
    wanted: dict[str, fx.Node],
    layer_of: dict[fx.Node, int],
    sharing: dict[int | fx.Node, list[fx.Node]],
) -> None:
    """Copy a value of an earlier layer before an in-place operation on (a view of) it; later readers read the copy."""
    for node, crossing in _changes_behind(captured, wanted, layer_of, sharing):
        index = layer_of[node]
        if len(crossing) > 1:
            raise CapslogError(
                f"module {module_path(node) or 'the model'!r} changes in place a tensor that crosses the cut "
                f"before layer {index} in {len(crossing)} views; cut elsewhere or make that operation out of place"
            )
        base = crossing[0]
        head = next(node for node in captured.graph.nodes if layer_of.get(node) == index)
        with captured.graph.inserting_before(head):
            copy = captured.graph.call_function(torch.clone, (base,))
        copy.meta = {**value_of(base), "nn_module_stack": head.meta.get("nn_module_stack")}
        layer_of[copy] = index
        sharing.setdefault(storage_key(copy), []).append(copy)
        later = {user for user in base.users if user is not copy and layer_of[user] >= index}
        base.replace_all_uses_with(copy, delete_user_cb=later.__contains__)
        for output, value in wanted.items():
            if value is base:
                wanted[output] = copy


def _name_values(
    captured: Captured, wanted: Mapping[str, fx.Node], layer_of: Mapping[fx.Node, int]
) -> dict[fx.Node, str]:
    names = {node: name for name, node in captured.inputs.items()}
    for name, node in wanted.items():
        names.setdefault(node, name)
    taken = set(names.values()) | set(captured.inputs) | set(wanted)
    for node in captured.graph.nodes:
        if node in names or not any(layer_of.get(user, -1) > layer_of.get(node, 1 << 60) for user in node.users):
            continue
        path = module_path(node)
        plain = path if node.op == "call_module" and node.target == path else f"{path}.{node.name}".lstrip(".")
        name, number = plain, 1
        while name in taken:
            number += 1
            name = f"{plain}.{number}"
        names[node] = name
        taken.add(name)
    return names


def _guard_of(captured: Captured, layer: str, reads: Mapping[str, fx.Node], train_only: str | None) -> Guard:
    shapes = [sizes_of(node, captured.bounds) for node in reads.values()]
    dtypes = [node.meta["val"].dtype for node in reads.values()]
    return Guard(layer, list(reads), shapes, train_only, captured.conditions, dtypes)


def _layer_module(
    captured: Captured,
    model: nn.Module,
    part: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    writes: Sequence[fx.Node],
    guard: Guard,
    model_parts: Collection[int],
) -> nn.Module:
    graph = fx.Graph()
    env = {node: graph.placeholder(f"value_{index}") for index, node in enumerate(reads)}
    extra = {**captured.extra, "guard": guard}
    graph.call_module("guard", tuple(env.values()))

    def here(node: fx.Node) -> fx.Node:
        if node not in env and node.op == "get_attr":
            env[node] = graph.create_node("get_attr", node.target)
        return env[node]

    for node in part:
        env[node] = graph.node_copy(node, here)
    results = tuple(here(node) for node in writes)
    graph.output(results[0] if len(results) == 1 else results)
    graph.eliminate_dead_code(_has_effect)
    anchor = next((node for node in graph.nodes if node.op in ("placeholder", "get_attr")), None)
    follow_device(graph, anchor)
    for node in graph.nodes:
        node.meta = {}
    paths = tuple(dict.fromkeys(path for node in part if (path := module_path(node))))
    return layer_module(graph, extra, model, paths, model_parts)


def part_identities(model: nn.Module) -> set[int]:
    """Return the identities of a model's modules."""
    return {id(part) for part in model.modules()}


def layer_module(
    graph: fx.Graph,
    extra: Mapping[str, Any],
    model: nn.Module,
    paths: Sequence[str],
    model_parts: Collection[int],
) -> CapturedGraph:
    """Make the module of a layer: its graph on the model's parameters and modules, and on objects that the model lacks
    (`extra`, by attribute name). paths: qualified names of the model's modules that the layer runs. model_parts: result
    of `part_identities`, computed once for all layers.
    """
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    held = {target: extra[target] if target in extra else operator.attrgetter(target)(model) for target in targets}
    module = CapturedGraph(held, graph, class_name="CapturedLayer")
    for part in list(module.modules()):
        if isinstance(part, Whole):
            module.add_submodule(part.path, part.module)
    _keep_persistence(module, model)
    for submodule in module.modules():
        if id(submodule) not in model_parts:
            submodule.training = model.training
    module.meta["source_modules"], module.meta["source_lists"] = tuple(paths), _lists_above(model, paths)
    return module


def _lists_above(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the ModuleLists and ModuleDicts of the model that hold modules of these names."""
    owners = dict.fromkeys(".".join(path.split(".")[:n]) for path in paths for n in range(1, path.count(".") + 1))
    return tuple(owner for owner in owners if isinstance(model.get_submodule(owner), (nn.ModuleList, nn.ModuleDict)))


def _keep_persistence(module: fx.GraphModule, model: nn.Module) -> None:
    """Keep buffers that the model does not save (rotary frequencies, constants of the code) out of checkpoints."""
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(path)
        if name not in owner._buffers:
            continue
        if str(node.target).startswith("constant_") or name in model.get_submodule(path)._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.add(name)


def _has_effect(node: fx.Node) -> bool:
    """True where a node stays although nothing reads its result. Random operators advance the generator of others."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op in ("placeholder", "output", "call_module") or bool(mutated_arguments(node)) or is_random


# -- Divides the parts of a captured graph that run under the model's own autocast or no_grad blocks.
#
# An export returns such a part as one operation, in which no cut can lie. `capture_layers` calls this for each graph;
# each piece is an operation in the same context, so that the results stay the same to the last bit.


def open_regions(captured: Captured, cut_points: Collection[str]) -> None:
    """Replace each region that runs several cut points' modules by one region for each module and for the operations
    between them; changes the graph in place. A region whose pieces would change each other's tensors stays whole.
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
    """Return the operations of a region, divided at cut points."""
    outer = module_calls(node).keys()
    pieces: list[list[fx.Node]] = []
    for (cut, inside), run in groupby(_operations(region), lambda operation: _place(operation, outer, cut_points)):
        if cut is None and not inside and pieces:
            pieces[-1] += run  # operations outside modules belong to the piece before them
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
    """Return the call of a cut point's module that runs an operation, and whether any module of the region runs it."""
    calls = {key: path for key, path in module_calls(operation).items() if key not in outer}
    return next((key for key, path in reversed(calls.items()) if path in cut_points), None), bool(calls)


def _with_weights_together(node: fx.Node, region: Region, pieces: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Join all pieces from the first to the last that read the same weight, since autocast caches one copy of it."""
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
    """Replace one region by a region for each of the pieces, and its results by the results of these."""
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
                values[operation].meta = {**value_of(operation), "nn_module_stack": stack}
    for user in list(node.users):
        value = values[results[user.args[1]]]
        user.replace_all_uses_with(value)
        captured.outputs.update({name: value for name, output in captured.outputs.items() if output is user})
        captured.graph.erase_node(user)
    captured.graph.erase_node(node)
    del captured.extra[str(node.target)]


def _stack_of(piece: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the module calls that all operations of a piece share; operations outside modules do not count."""
    stacks = [
        stack
        for operation in piece
        if (stack := operation.meta.get("nn_module_stack") or {}) and module_path(operation)
    ]
    return {key: entry for key, entry in stacks[0].items() if all(key in stack for stack in stacks)} if stacks else {}


def _graph_of(piece: Sequence[fx.Node], writes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
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
