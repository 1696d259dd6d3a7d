"""A backward in two halves: first the gradients of a graph's inputs (action I), later those of its parameters (W).

The input half differentiates only the paths from the outputs to the inputs, and records the gradient at every node from
which a path to a parameter branches off. The weight half differentiates from these nodes to the parameters. Each sum
has the same terms in the same order as in a whole backward, so the results have the same bits.

The parts of a graph that lead only to parameters form groups that share no node. Where one use of a parameter lies on
the path from another use to the inputs (a module that applies one weight twice), recorded gradients would mix the two
uses: the weight half differentiates such a group from the outputs again. Some graphs cannot be differentiated for some
inputs alone (`torch.utils.checkpoint` with `use_reentrant`): the input half then computes all gradients.
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
    """Parameters, and the nodes from which paths to them branch off; None: differentiate from the graph's outputs."""

    nodes: list[Node] | None
    parameters: list[Tensor]


@dataclass
class WeightHalf:
    """Weight half of a backward. It keeps the graph alive until `run`.

    outputs: of the graph, each with its gradient, if a group must be differentiated from them.
    noted: node -> recorded gradients of its outputs, by number. seeds: storage ids of the gradients of the outputs.
    """

    outputs: list[tuple[GradientEdge, Tensor]]
    groups: list[_Group] = field(default_factory=list)
    noted: dict[Node, dict[int, Tensor]] = field(default_factory=dict)
    seeds: frozenset[int] = frozenset()

    def run(self) -> None:
        """Add the gradients of the parameters to their `.grad`, and free the graph."""
        while self.groups:
            group = self.groups.pop()
            later = {node for remaining in self.groups for node in remaining.nodes or ()}
            repeats_graph = any(remaining.nodes is None for remaining in self.groups)
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
                    retain_graph=repeats_graph or group.nodes is None or not later.isdisjoint(group.nodes),
                )
        self.noted.clear()
        self.outputs.clear()

    @property
    def gradients(self) -> list[Tensor]:
        """Recorded gradients."""
        return [gradient for row in self.noted.values() for gradient in row.values()]


def input_half(
    outputs: list[tuple[GradientEdge, Tensor]], leaves: Mapping[_Name, Tensor | GradientBox]
) -> tuple[dict[_Name, Tensor], WeightHalf]:
    """Differentiate a graph with respect to its leaves, and keep the graph for the weight half.

    Returns the gradients of the leaves that have one, each in the layout of its leaf, and the weight half.
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
        weight_half.outputs = []  # so that the graph between them and the noted nodes is freed now
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
    """Nodes of a graph. entries: leaf id -> node of its gradient. on_the_way: nodes with a path to a leaf."""

    def __init__(self, outputs: Iterable[tuple[GradientEdge, Tensor]], leaves: Iterable[Any]) -> None:
        wanted = {id(leaf) for leaf in leaves}
        self.entries: dict[int, Node] = {}
        self.next: dict[Node, list[Node]] = {}  # successors by node; a node comes after its successors
        self.outputs = [edge.node for edge, _ in outputs]
        stack: list[tuple[Node, list[Node] | None]] = [(node, None) for node in self.outputs]
        while stack:
            node, behind = stack.pop()
            if behind is not None:  # all its successors are done
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
        """True where a part of the graph recomputes and differentiates in its backward (reentrant checkpointing)."""
        return any(node.name() == "CheckpointFunctionBackward" for node in self.next)

    def groups(self) -> list[_Group]:
        """Parameters, grouped by the nodes from which paths to them branch off."""
        first: dict[Node, Node] = {}  # union-find: node that leads to parameters only -> representative of its group

        def stands_for(node: Node) -> Node:
            while first[node] is not node:
                first[node] = node = first[first[node]]
            return node

        off_the_way = [node for node in self.next if node not in self.on_the_way]
        for node in off_the_way:
            first[node] = node
        for node in off_the_way:
            for successor in self.next[node]:
                first[stands_for(successor)] = stands_for(node)
        parameters: dict[Node, list[Tensor]] = {}
        for node in off_the_way:
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
