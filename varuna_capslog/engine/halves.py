"""A backward in two halves: first the gradients of what a graph reads, later those of its parameters.

The first half differentiates only the paths from the outputs to the inputs, and records the gradient at every node from
which a path to a parameter branches off. The second half differentiates from these nodes to the parameters. Each sum
has the terms of a whole backward in the same order, so both ways give the same bits.

The parts of a graph that lead only to parameters fall into groups that share no node. Where one use of a parameter lies
on the path from another use to the inputs (a module that applies one weight twice), the gradients of the two uses could
not be told apart: such a group is differentiated from the outputs once more. A graph with a part that torch cannot
differentiate for some inputs alone (`torch.utils.checkpoint` with `use_reentrant`) is differentiated as a whole in the
first half, and nothing is left for the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from varuna_capslog.engine.offload import GradientBox, laid_out

__all__ = ["WeightHalf", "input_half"]

_Name = TypeVar("_Name")


@dataclass
class _Group:
    """Parameters, and the nodes from which paths to them branch off; None: differentiate from the outputs."""

    nodes: list[Node] | None
    parameters: list[Tensor]


@dataclass
class WeightHalf:
    """Second half of a backward, for the gradients of the parameters. It holds the graph until `run`.

    outputs: of the graph, each with its gradient, if a group must be differentiated from them.
    noted: node -> gradients of its outputs, by number. seeds: ids of the storages of the first gradients.
    """

    outputs: list[tuple[GradientEdge, Tensor]]
    groups: list[_Group] = field(default_factory=list)
    noted: dict[Node, dict[int, Tensor]] = field(default_factory=dict)
    seeds: frozenset[int] = frozenset()

    def run(self) -> None:
        """Add the gradients of the parameters to their `.grad`, and release the graph."""
        while self.groups:
            group = self.groups.pop()
            later = {node for remaining in self.groups for node in remaining.nodes or ()}
            again = any(remaining.nodes is None for remaining in self.groups)
            if group.nodes is None:
                starts = self.outputs
            else:
                starts = [
                    (GradientEdge(node, number), gradient)
                    for node in group.nodes
                    for number, gradient in self.noted.get(node, {}).items()
                ]
            if starts:
                torch.autograd.backward(
                    [edge for edge, _ in starts],
                    [gradient for _, gradient in starts],
                    inputs=group.parameters,
                    retain_graph=again or group.nodes is None or not later.isdisjoint(group.nodes),
                )
        self.noted.clear()
        self.outputs.clear()

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients that it holds besides the graph."""
        return [gradient for row in self.noted.values() for gradient in row.values()]


def input_half(
    outputs: list[tuple[GradientEdge, Tensor]], leaves: Mapping[_Name, Tensor | GradientBox]
) -> tuple[dict[_Name, Tensor], WeightHalf]:
    """Differentiate a graph with respect to its leaves, and keep it for the other half.

    Returns the gradients of the leaves that have one, each in the layout of its leaf, and the other half.
    """
    graph = _Graph(outputs, leaves.values())
    if graph.refuses_halves:
        torch.autograd.backward([edge for edge, _ in outputs], [gradient for _, gradient in outputs])
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, WeightHalf([])
    seeds = frozenset(gradient.untyped_storage()._cdata for _, gradient in outputs)
    weight_half = WeightHalf(outputs, graph.groups(), seeds=seeds)
    for edge, gradient in outputs:
        if edge.node not in graph.on_the_way:
            weight_half.noted.setdefault(edge.node, {})[edge.output_nr] = gradient
    if all(group.nodes is not None for group in weight_half.groups):
        weight_half.outputs = []  # the graph between them and the noted nodes is freed with the first half
    wanted = {name: graph.entries[id(leaf)] for name, leaf in leaves.items() if id(leaf) in graph.entries}
    if not wanted:
        return {}, weight_half
    hooks = []
    for node in {node for group in weight_half.groups for node in group.nodes or ()} & graph.on_the_way:

        def note(gradients: Sequence[Tensor | None], node: Node = node) -> None:
            weight_half.noted[node] = {
                number: gradient for number, gradient in enumerate(gradients) if gradient is not None
            }

        hooks.append(node.register_prehook(note))
    leaf_gradients = torch.autograd.grad(
        [edge for edge, _ in outputs],
        [GradientEdge(node, 0) for node in wanted.values()],
        [gradient for _, gradient in outputs],
        retain_graph=True,
        allow_unused=True,
    )
    for hook in hooks:
        hook.remove()
    return {
        name: laid_out(gradient, leaves[name].stride())
        for name, gradient in zip(wanted, leaf_gradients, strict=True)
        if gradient is not None
    }, weight_half


class _Graph:
    """Nodes behind some outputs. entries: leaf id -> node of its gradient. on_the_way: nodes with a path to a leaf."""

    def __init__(self, outputs: Iterable[tuple[GradientEdge, Tensor]], leaves: Iterable[Any]) -> None:
        wanted = {id(leaf) for leaf in leaves}
        self.entries: dict[int, Node] = {}
        self.next: dict[Node, list[Node]] = {}  # in an order in which every node stands behind those that it leads to
        self.outputs = [edge.node for edge, _ in outputs]
        stack: list[tuple[Node, list[Node] | None]] = [(node, None) for node in self.outputs]
        while stack:
            node, behind = stack.pop()
            if behind is not None:  # all of them have been passed
                self.next[node] = behind
            elif node not in self.next:
                behind = self._behind(node, wanted)
                stack += [(node, behind), *((successor, None) for successor in behind if successor not in self.next)]
        entries = set(self.entries.values())
        self.on_the_way: set[Node] = set()
        for node, behind in self.next.items():
            if node in entries or not self.on_the_way.isdisjoint(behind):
                self.on_the_way.add(node)

    def _behind(self, node: Node, wanted: set[int]) -> list[Node]:
        leaf = getattr(node, "variable", None)
        leaf = getattr(node, "box", None) if leaf is None else leaf
        if id(leaf) in wanted:
            self.entries[id(leaf)] = node
            return []
        return [successor for successor, _ in node.next_functions if successor is not None]

    @property
    def refuses_halves(self) -> bool:
        """True where a part of it recomputes and differentiates in its own backward (reentrant checkpointing)."""
        return any(node.name() == "CheckpointFunctionBackward" for node in self.next)

    def groups(self) -> list[_Group]:
        """Parameters in groups that are reached from the same nodes."""
        first: dict[Node, Node] = {}  # a node that leads to parameters only -> the representative of its group

        def stands_for(node: Node) -> Node:
            while first[node] is not node:
                first[node] = node = first[first[node]]
            return node

        alone = [node for node in self.next if node not in self.on_the_way]
        for node in alone:
            first[node] = node
        for node in alone:
            for successor in self.next[node]:
                first[stands_for(successor)] = stands_for(node)
        parameters: dict[Node, list[Tensor]] = {}
        for node in alone:
            if (variable := getattr(node, "variable", None)) is not None:
                parameters.setdefault(stands_for(node), []).append(variable)
        starts: dict[Node, dict[Node, None]] = {}
        for node in self.outputs:
            if node in first:
                starts.setdefault(stands_for(node), {})[node] = None
        for node in reversed(self.next):
            for successor in self.next[node]:
                if node in self.on_the_way and successor in first:
                    starts.setdefault(stands_for(successor), {})[node] = None
        by_starts: dict[tuple[Node, ...], list[Tensor]] = {}
        for representative, tensors in parameters.items():
            by_starts.setdefault(tuple(starts.get(representative, ())), []).extend(tensors)
        return [_Group(None if self._in_line(nodes) else list(nodes), tensors) for nodes, tensors in by_starts.items()]

    def _in_line(self, nodes: Sequence[Node]) -> bool:
        """True where a path leads from one of the nodes to another."""
        if len(nodes) < 2:
            return False
        several, leads = set(nodes), set[Node]()
        for node, behind in self.next.items():
            if not several.isdisjoint(behind) or not leads.isdisjoint(behind):
                leads.add(node)
        return not several.isdisjoint(leads)
