"""Makes every operation of a captured graph take sizes that may change from a tensor near it.

Called by `capture_layers` after an export with dynamic dimensions. The export reads a size once, from an input of the
model, and passes the number to every operation that needs it; but only tensors cross a cut, and a module that replaces
its part of the graph has one tensor for an input. Afterwards no number goes from one operation to another's part.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from varuna_capslog.model.capture.export import Captured, is_open
from varuna_capslog.model.capture.runtime import Sizes

__all__ = ["localise_sizes", "sizes_of"]


def localise_sizes(captured: Captured) -> None:
    """Change the graph in place; without dynamic dimensions nothing changes.

    A size of an input is read from a tensor near the operation that has it for a size, else where the export reads it.
    Other numbers are read from the operation's own operands, else computed as in the export.
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
    """Return the sizes of a value: numbers, and (name, least, most or None) of those that may change."""
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
    """Return a node just before `user` that gives the number."""
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
    """Yield (tensor, dimension) with that size among what `user` was computed from, last first; then among the operands
    of what its result meets, which an operation without operands needs (the noise of a stochastic depth).

    everywhere: False: search its operands only.
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
    """Yield nodes reachable from a node, by rising position or, with order -1, falling; numbers are left out."""
    seen = {start}
    waiting: list[tuple[int, fx.Node]] = []
    node = start
    while True:
        for neighbour in following(node):
            if neighbour not in seen and neighbour in position and not _is_number(neighbour):
                seen.add(neighbour)
                heapq.heappush(waiting, (order * position[neighbour], neighbour))
        if not waiting:
            return
        node = heapq.heappop(waiting)[1]
        yield node
