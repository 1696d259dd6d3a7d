"""Names the tensors in what a model takes and returns by their places there; and modules in slices of lists."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

__all__ = ["input_tensors", "name_slices", "named_leaves", "paths_of"]


def input_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors in one argument of a model, by the names of its chain's inputs: `batch` for a tensor,
    `batch_image` and `batch_extra_0` for those in dicts and lists.
    """
    return {
        "_".join([name, *(re.sub("[^a-zA-Z0-9]", "_", key).lower() for key in path)]): leaf
        for path, leaf in paths_of(value)
        if isinstance(leaf, Tensor)
    }


def named_leaves(tree: Any, taken: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Return every leaf of a model's result, named by its place: `logits`, `loss`, `0.1`; a bare one is `output`.

    Args:
        taken: names that no leaf gets.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in paths_of(tree):
        name = ".".join(path) or "output"
        while name in taken or name in leaves:
            name += "_out"
        leaves[name] = leaf
    return list(leaves.items())


def paths_of(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf with the keys, numbers or attributes that lead to it, in torch's order.

    In a class that was registered without a way to name its parts (as those of diffusers are), the names of its entries
    or attributes are used.
    """
    if pytree.tree_is_leaf(tree):
        yield path, tree
        return

    def inside(value: Any) -> bool:
        return value is not tree

    children = pytree.tree_flatten(tree, inside)[0]
    try:
        keys = [_text(key[0]) for key, _ in pytree.tree_flatten_with_path(tree, inside)[0]]
    except ValueError:
        entries = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", {})
        keys = [_name_in(entries, child, place) for place, child in enumerate(children)]
    for key, child in zip(keys, children, strict=True):
        yield from paths_of(child, (*path, key))


def _text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _name_in(entries: Mapping[Any, Any], child: Any, place: int) -> str:
    return next((str(name) for name, part in entries.items() if part is child), str(place))


def name_slices(model: nn.Module, root: fx.GraphModule) -> None:
    """Give modules that the code takes from a slice of a list (`self.layers[:2]`) their qualified names."""

    def number(match: re.Match[str]) -> str:
        bounds = [None if bound == "None" else int(bound) for bound in match.groups()[1:4]]
        places = range(len(list(model.get_submodule(match[1]).children())))[slice(*bounds)]
        return f"{match[1]}.{places[int(match[5])]}"

    for graph in [module for module in root.modules() if isinstance(module, fx.GraphModule)]:
        for node in graph.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            if any(".slice(" in str(entry[0]) for entry in stack.values()):
                renamed = {key: (_SLICE.sub(number, entry[0]), *entry[1:]) for key, entry in stack.items()}
                node.meta["nn_module_stack"] = renamed


_SLICE = re.compile(r"^(.*?)\.slice\((\S+), (\S+), (\S+)\)\.(\d+)")
