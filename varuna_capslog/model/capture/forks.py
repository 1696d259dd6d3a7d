"""Finds where a model's own modules run side by side: the automatic cut points of its branches.

Called by `capture_layers` before a captured graph is changed. The repeated blocks of a model, which are its other
automatic cut points, stay whole: within them every attention and every gated network has a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import Tensor, fx, nn

from varuna_capslog.model.capture.export import Captured, module_calls

__all__ = ["forked_modules"]


def forked_modules(captured: Captured, model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return modules with parameters that read one floating-point tensor side by side, in the order of execution.

    Two children of one module are side by side if neither waits for the other. Operations between the tensor and a
    child that belong to no child, such as a functional pooling, count as the child's.

    Args:
        blocks: modules whose inside is not searched, and that are not named again.
    """
    children: dict[str, dict[str, str]] = {"": {}}
    for node in captured.graph.nodes:
        parent = ""
        for key, path in module_calls(node).items():
            if parent in blocks:
                break
            children.setdefault(parent, {})[key] = path
            parent = path
    forked: set[str] = set()
    for parent, calls in children.items():
        weighted = [key for key, path in calls.items() if any(True for _ in model.get_submodule(path).parameters())]
        if len(weighted) > 1:
            forked.update(calls[key] for key in _side_by_side(captured, parent, weighted))
    first = {path: at for at, node in reversed(list(enumerate(captured.graph.nodes))) for path in _paths(node)}
    # a module with blocks or branches of its own is cut before these
    chosen = [
        path for path in forked - {*blocks} if not any(inner.startswith(path + ".") for inner in [*forked, *blocks])
    ]
    return sorted(chosen, key=first.__getitem__)


def _side_by_side(captured: Captured, parent: str, children: Sequence[str]) -> Iterator[str]:
    numbers = {key: number for number, key in enumerate(children)}
    behind: dict[fx.Node, int] = {}
    origins: dict[fx.Node, frozenset[fx.Node]] = {}
    reads: list[set[fx.Node]] = [set() for _ in children]
    waits = [0 for _ in children]
    for node in captured.graph.nodes:
        child = next((numbers[key] for key in module_calls(node) if key in numbers), None)
        sources = node.all_input_nodes
        behind[node] = 0 if child is None else 1 << child
        for source in sources:
            behind[node] |= behind[source]
        between = child is None and node.op not in ("placeholder", "get_attr") and (parent in ("", *_paths(node)))
        origins[node] = frozenset().union(*(origins[source] for source in sources)) if between else frozenset([node])
        if child is not None:
            waits[child] |= behind[node]
            reads[child].update(*(origins[source] for source in sources))
    tensors = [{node for node in row if _is_float(node)} for row in reads]
    for first, second in combinations(range(len(children)), 2):
        if tensors[first] & tensors[second] and not (waits[first] >> second & 1 or waits[second] >> first & 1):
            yield from (children[first], children[second])


def _paths(node: fx.Node) -> list[str]:
    return list(module_calls(node).values())


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op != "get_attr" and isinstance(value, Tensor) and value.is_floating_point()
