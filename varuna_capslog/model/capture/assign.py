"""Assigns every operation of a captured graph to a layer, so that parallel branches stay parallel.

Operations in a cut point's module belong to that cut point's layer. For every other operation two facts count: the cut
points that it waits for, and the last cut point that was executed before it. It joins the layer of this last cut point
if the layer already waits for everything that the operation waits for, and if everything that needs the operation
already waits for the layer; in a plain chain this always holds. Other operations form layers of their own. Therefore
a cut point never waits for one that it does not need, and the layers have a topological order.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.collapse import mutated_arguments
from varuna_capslog.model.capture.export import Captured, module_calls, module_path
from varuna_capslog.model.capture.repeats import storage_key

__all__ = ["assign_layers", "joined"]


def joined(count: int, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """For each of `count` consecutive positions, return the first position that it is joined with.

    ranges: first and last position of each group that is joined; ranges that overlap are joined as well.
    """
    place = list(range(count))
    for first, last in ranges:
        for at in range(first + 1, last + 1):
            place[at] = min(place[at], place[first])
    for at in range(1, count):  # a position that a later range joined belongs to the first of all that overlap
        place[at] = place[place[at]]
    return place


@dataclass
class _Cut:
    """Cut point: the graph is cut before it.

    name: name of the module, and of the layer.
    position: place of the first operation in the order of execution.
    end: place behind the module's last operation before the next cut point.
    rest_of: for the operations behind a cut point's module, the number of that cut point; None for a module.
    behind: the cut points that its layer waits for, itself included.
    """

    name: str
    position: int
    end: int
    rest_of: int | None = None
    behind: int = 0


@dataclass(eq=False)
class _Unit:
    """Operations that stay together: an operation with its tuple's getitem operations, or those of a cut point's
    module.

    Sets of cut points are integers, with one bit for each.

    position: place of the first operation.
    cut: the last cut point before it, -1 for none. own: True where the unit is that cut point's module.
    behind: the cut points that it waits for, its own included. ahead: the cut points that wait for it.
    """

    position: int
    cut: int
    own: bool
    nodes: list[fx.Node] = field(default_factory=list)
    sources: set[_Unit] = field(default_factory=set)
    users: set[_Unit] = field(default_factory=set)
    behind: int = 0
    ahead: int = 0


@dataclass(eq=False)
class _Layer:
    """Layer. rest: True for the operations behind a cut point's module, with automatic cut points."""

    units: list[_Unit]
    name: str = ""
    rest: bool = False

    @property
    def position(self) -> int:
        return self.units[0].position

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return (node for unit in self.units for node in unit.nodes)


def assign_layers(
    captured: Captured, model: nn.Module, cut_points: Sequence[str], lenient: bool
) -> tuple[dict[fx.Node, int], list[str]]:
    """Return the layer of every operation and the layers' names; put the graph's operations into the layers' order.

    lenient: see `split_graph`. Raises CapslogError: a cut point that never runs or begins where another one does.
    """
    nodes = [node for node in captured.graph.nodes if node.op in ("call_function", "call_module")]
    cuts = _find_cuts(nodes, model, cut_points, lenient)
    units = _make_units(nodes, cuts)
    _find_dependences(units, cuts)
    groups: dict[tuple[int, int], list[_Unit]] = {}
    for unit in units:
        groups.setdefault((unit.behind, unit.cut), []).append(unit)
    layers, loose = [], []
    for (behind, cut), group in groups.items():
        if cut >= 0 and behind == cuts[cut].behind:
            is_rest = cuts[cut].rest_of is not None
            layers.append(_Layer(group, "" if is_rest else cuts[cut].name, is_rest))
        else:
            loose += [_Layer(part) for part in _apart(group, model)]
    layers = sorted([*layers, *loose], key=lambda layer: layer.position)
    _join_readers([layer for layer in loose if layer.position and not _weigh(layer, model)], layers)
    _name_layers(layers, nodes, model)
    layers = _topological(layers)
    layer_of = {node: index for index, layer in enumerate(layers) for node in layer.nodes}
    _put_in_order(sorted(nodes, key=layer_of.__getitem__))
    return layer_of, [layer.name for layer in layers]


def _find_cuts(nodes: Sequence[fx.Node], model: nn.Module, cut_points: Sequence[str], lenient: bool) -> list[_Cut]:
    starts, firsts = dict[int, str](), _first_places(nodes)
    for cut in cut_points:
        first = firsts.get(cut)
        if lenient and (first is None or first in starts):
            continue
        if first is None:
            hidden = any(
                _path_in(path, cut)
                for node in nodes
                for stack in node.meta.get("inner_stacks", ())
                for path, _ in stack.values()
            )
            why = (
                "runs inside a torch.no_grad() or autocast block of the model's code; cut before what holds the block"
                if hidden
                else "does nothing in this model's forward (never called, or it returns its input); choose another"
            )
            raise CapslogError(f"cut point {cut!r} {why}")
        if first in starts:
            raise CapslogError(
                f"cut points {starts[first]!r} and {cut!r} begin at the same operation; keep one of them"
            )
        starts[first] = cut
    cuts: list[_Cut] = []
    begins = sorted(starts)
    for begin, following in pairwise([*begins, len(nodes)]):
        name = starts[begin]
        call = next(key for key, path in module_calls(nodes[begin]).items() if _path_in(path, name))
        inside = [at for at in range(begin, following) if call in module_calls(nodes[at])]
        cuts.append(_Cut(name, begin, 1 + inside[-1]))
        if not lenient:
            continue
        end = 1 + max(at for at in range(begin, following) if _runs_in(nodes[at], name))
        later_nodes = nodes[end:following]
        name = next((path for node in later_nodes if (path := module_path(node))), "")
        if name and name not in starts.values() and any(_has_weights(node, model) for node in later_nodes):
            cuts.append(_Cut(name, end, end, rest_of=len(cuts) - 1))
            starts[end] = name
    return cuts


def _first_places(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Map qualified name of a module -> place of the first operation that runs in it or in a module inside it."""
    firsts: dict[str, int] = {}
    for at, node in enumerate(nodes):
        for path in () if _unpacks(node) else set(module_calls(node).values()):
            while path and path not in firsts:
                firsts[path] = at
                path = path.rpartition(".")[0]
    return firsts


def _make_units(nodes: Sequence[fx.Node], cuts: Sequence[_Cut]) -> list[_Unit]:
    """Return the units in the order of execution, each with the units that it waits for and that wait for it."""
    unit_of: dict[fx.Node, _Unit] = {}
    units: list[_Unit] = []
    begins = {cut.position: number for number, cut in enumerate(cuts)}
    number = -1
    for position, node in enumerate(nodes):
        number = begins.get(position, number)
        source = node.args[0] if _unpacks(node) else None
        if isinstance(source, fx.Node) and source in unit_of:
            unit = unit_of[source]  # only tensors cross a cut
        elif number >= 0 and cuts[number].position < position < cuts[number].end:
            unit = unit_of[nodes[cuts[number].position]]
        else:
            unit = _Unit(position, number, number >= 0 and position < cuts[number].end)
            units.append(unit)
        unit.nodes.append(node)
        unit_of[node] = unit
    for before, after in [*_data_order(nodes), *_order_of_changes(nodes)]:
        first, second = unit_of.get(before), unit_of[after]
        if first is not None and first is not second:
            first.users.add(second)
            second.sources.add(first)
    return units


def _data_order(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    return ((source, node) for node in nodes for source in node.all_input_nodes)


def _order_of_changes(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (before, after): a write comes after all earlier uses of its memory and before all later ones."""
    users: dict[int, list[fx.Node]] = {}
    changes: list[tuple[int, fx.Node]] = []
    for node in nodes:
        for memory in dict.fromkeys(map(_memory, [node, *node.all_input_nodes])):
            if memory is not None:
                users.setdefault(memory, []).append(node)
        changes += [(memory, node) for memory in map(_memory, mutated_arguments(node)) if memory is not None]
    for memory, change in changes:
        at = users[memory].index(change)
        yield from ((before, change) for before in users[memory][:at])
        yield from ((change, after) for after in users[memory][at + 1 :])


def _memory(node: fx.Node) -> int | None:
    key = storage_key(node)
    return None if isinstance(key, fx.Node) else key


def _find_dependences(units: Sequence[_Unit], cuts: Sequence[_Cut]) -> None:
    """Fill in `behind` and `ahead` of units, and `behind` of cut points. An operation that joins the layer of the
    preceding cut point takes over `behind` of that cut point.
    """
    for unit in units:
        for source in unit.sources:
            unit.behind |= source.behind
        if unit.own:
            unit.behind |= 1 << unit.cut
            cuts[unit.cut].behind = unit.behind
            for number, cut in enumerate(cuts):
                if cut.rest_of == unit.cut:
                    cut.behind = unit.behind | 1 << number
        elif unit.cut >= 0 and (rest_of := cuts[unit.cut].rest_of) is not None and unit.behind >> rest_of & 1:
            unit.behind |= 1 << unit.cut
    for unit in reversed(units):
        for user in unit.users:
            unit.ahead |= user.ahead | (1 << user.cut if user.own else 0)
        if unit.cut < 0 or unit.own:
            continue
        level = cuts[unit.cut].behind
        if unit.behind | level == level and all(user.behind & level == level for user in unit.users):
            unit.behind = level


def _apart(group: Sequence[_Unit], model: nn.Module) -> list[list[_Unit]]:
    """Split operations that wait for the same cut points into parts without an edge between them.

    Parts with weights stay apart if different cut points wait for them. A part without weights joins a part with
    weights if every cut point that waits for the part without weights also waits for the other part.
    """
    part_of: dict[_Unit, list[_Unit]] = {}
    for unit in group:
        part_of[unit] = [unit]
        for source in unit.sources & part_of.keys():
            if part_of[source] is not part_of[unit]:
                small, large = sorted((part_of[source], part_of[unit]), key=len)
                large += small
                part_of |= dict.fromkeys(small, large)
    parts = [
        sorted(part, key=lambda unit: unit.position) for part in {id(part): part for part in part_of.values()}.values()
    ]
    parts.sort(key=lambda part: (not _weigh(_Layer(part), model), part[0].position))
    merged: list[tuple[int, list[_Unit]]] = []
    for part in parts:
        ahead = 0
        for unit in part:
            ahead |= unit.ahead
        weighs = _weigh(_Layer(part), model)
        for merged_ahead, units in merged:
            if merged_ahead == ahead or (not weighs and merged_ahead | ahead == merged_ahead):
                units += part
                break
        else:
            merged.append((ahead, list(part)))
    return [sorted(part, key=lambda unit: unit.position) for _, part in merged]


def _name_layers(layers: Sequence[_Layer], nodes: Sequence[fx.Node], model: nn.Module) -> None:
    """Name the layers that begin with no cut point's module. The first layer and layers behind such a module are named
    after the first module that runs in them; others after the innermost module around all their weights.
    """
    taken = {layer.name for layer in layers}
    for layer in layers:
        if layer.name:
            continue
        weighted = [module_path(node) for node in layer.nodes if _has_weights(node, model)]
        base = "" if layer.rest or layer.position == 0 else _common_path(weighted)
        base = base or next((path for node in layer.nodes if (path := module_path(node))), "")
        if not base and layer.position == 0:
            first = next((path for node in nodes if (path := module_path(node))), "start")
            base = "start" if first in taken else first
        layer.name = base = base or "join"
        number = 1
        while layer.name in taken:
            number += 1
            layer.name = f"{base}_{number}"
        taken.add(layer.name)


def _common_path(paths: Sequence[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _join_readers(weightless: Sequence[_Layer], layers: list[_Layer]) -> None:
    """Merge each layer without weights into the single layer that reads it, if there is only one; changes `layers`."""
    layer_of = {unit: layer for layer in layers for unit in layer.units}
    for layer in sorted(weightless, key=lambda layer: layer.position, reverse=True):
        readers = {layer_of[user] for unit in layer.units for user in unit.users} - {layer}
        if len(readers) != 1:
            continue
        reader = readers.pop()
        layer_of |= dict.fromkeys(layer.units, reader)
        reader.units += layer.units
        layers.remove(layer)


def _topological(layers: Sequence[_Layer]) -> list[_Layer]:
    """Sort the layers so that each follows all layers that it waits for, otherwise in the order of execution."""
    layer_of = {unit: layer for layer in layers for unit in layer.units}
    sources = {
        layer: {layer_of[source] for unit in layer.units for source in unit.sources} - {layer} for layer in layers
    }
    readers: dict[_Layer, list[_Layer]] = {layer: [] for layer in layers}
    for layer, needed in sources.items():
        for source in needed:
            readers[source].append(layer)
    ready = [(layer.position, at) for at, layer in enumerate(layers) if not sources[layer]]
    heapq.heapify(ready)
    numbers = {layer: at for at, layer in enumerate(layers)}
    ordered = []
    while ready:
        layer = layers[heapq.heappop(ready)[1]]
        ordered.append(layer)
        for reader in readers[layer]:
            sources[reader].discard(layer)
            if not sources[reader]:
                heapq.heappush(ready, (reader.position, numbers[reader]))
    assert len(ordered) == len(layers), "the layers' dependences form a circle"
    return ordered


def _put_in_order(ordered: Sequence[fx.Node]) -> None:
    for before, node in pairwise(ordered):
        if before.next is not node:
            before.append(node)


def _weigh(layer: _Layer, model: nn.Module) -> bool:
    return any(_has_weights(node, model) for node in layer.nodes)


def _has_weights(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module" and module_calls(node):
        return next(model.get_submodule(module_path(node)).parameters(), None) is not None
    return any(source.op == "get_attr" for source in node.all_input_nodes)


def _unpacks(node: fx.Node) -> bool:
    return bool(node.args) and node.target is operator.getitem


def _path_in(path: str, cut: str) -> bool:
    return path == cut or path.startswith(cut + ".")


def _runs_in(node: fx.Node, cut: str) -> bool:
    return any(_path_in(path, cut) for path in module_calls(node).values())
