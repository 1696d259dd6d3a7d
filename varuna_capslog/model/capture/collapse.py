"""Replaces parts of a captured graph by calls of the model's own submodules, the largest that compute the same.

An export unrolls every module into tensor operations. A call of the module itself keeps what the operations lose:
dropout and batch norm follow train() and eval(), the engine can hook BatchNorm's running statistics, autocast and dtype
rules stay Python. A module replaces its part only when calling it as `module(x)` is certainly the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor, fx, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.export import Captured, module_calls, nodes_by_storage, same_storage
from varuna_capslog.model.capture.repeats import storage_key, value_of

__all__ = ["collapse_modules", "forked_modules", "mutated_arguments"]


def collapse_modules(captured: Captured, model: nn.Module, cut_points: Sequence[str]) -> None:
    """Replace, outermost first, each call of a submodule by one `call_module` node; changes the graph in place.

    A call is replaced when neither a cut point nor a module that is kept whole lies inside the module, every call of it
    in this model had one tensor as its only argument and returned one tensor, and its operations form one run of nodes
    that take one value from outside (except the module's own parameters and buffers) and leave one value. An embedding
    with sparse gradients stays an operation, which makes dense gradients.

    Raises CapslogError for a module, other than a batch norm, that changes a buffer or a parameter in its forward.
    """
    _refuse_state(captured, model)
    _read_buffers_themselves(captured)
    nodes = [node for node in captured.graph.nodes if node.op in ("call_function", "call_module")]
    spans: dict[str, list[int]] = {}
    paths: dict[str, str] = {}
    for index, node in enumerate(nodes):
        for key, path in module_calls(node).items():
            paths[key] = path
            spans.setdefault(key, []).append(index)
    keeps = captured.watch is not None and captured.watch.keeps
    dense = set() if keeps else {node for node in nodes if _made_dense(node)}
    done: set[int] = set()
    for key in sorted(spans, key=lambda key: (spans[key][0], -len(spans[key]), len(paths[key]))):
        indices, path = spans[key], paths[key]
        if done & set(indices) or any(cut.startswith(path + ".") for cut in cut_points):
            continue
        if any(f"{kept_path}.".startswith(f"{path}.") for kept_path in captured.whole):
            continue  # a module that is kept whole is, or lies in, this module, and has a call of its own
        module = model.get_submodule(path)
        if id(module) not in captured.unary or indices[-1] - indices[0] + 1 != len(indices):
            continue
        part = [nodes[index] for index in indices]
        if dense & set(part):
            continue
        if all("inner_stacks" in node.meta or node.target is operator.getitem for node in part):
            continue  # all of it is one no_grad or autocast block, which may lie around the call instead of inside
        ends = _single_ends(part, module, captured, model)
        if ends is None:
            continue
        source, result = ends
        with captured.graph.inserting_before(part[0]):
            call = captured.graph.call_module(path, (source,))
        call.meta = {**value_of(result), "nn_module_stack": _stack_at(part[0], key)}
        call.meta["mutates"] = any(
            same_storage(argument, source) for node in part for argument in mutated_arguments(node)
        )
        result.replace_all_uses_with(call)
        for name, node in captured.outputs.items():
            if node is result:
                captured.outputs[name] = call
        for node in reversed(part):
            captured.graph.erase_node(node)
        done |= set(indices)


def _read_buffers_themselves(captured: Captured) -> None:
    """Make readers of an in-place operation's result on a buffer read the buffer itself.

    A second call of a batch norm continues from the count that the first call returned, which no other module needs.
    """
    for node in captured.graph.nodes:
        for argument in mutated_arguments(node):
            if argument.op == "get_attr" and argument is node.args[0] and same_storage(argument, node):
                node.replace_all_uses_with(argument)


def _made_dense(node: fx.Node) -> bool:
    """Make an embedding's gradient dense, since gradients are added, normed and sent; True where it was sparse."""
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "sparse" not in names:
        return False
    place = names.index("sparse")
    if place < len(node.args) and node.args[place] is True:
        node.update_arg(place, False)
    elif node.kwargs.get("sparse") is True:
        node.update_kwarg("sparse", False)
    else:
        return False
    return True


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node writes into: `self` of an in-place operation, the input of an in-place module."""
    if node.op == "call_module":
        return node.all_input_nodes if node.meta.get("mutates") else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        written += [
            leaf for leaf in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(leaf, fx.Node)
        ]
    return written


def _single_ends(
    part: list[fx.Node], module: nn.Module, captured: Captured, model: nn.Module
) -> tuple[fx.Node, fx.Node] | None:
    inside, returned = set(part), set(captured.outputs.values())
    tensor_ids = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    sources: list[fx.Node] = []
    for node in part:
        for source in node.all_input_nodes:
            if source in inside or source in sources:
                continue
            if source.op == "get_attr":
                # a constant that the code made does not belong to the module, so the part stays operations
                if (
                    source.target in captured.extra
                    or id(operator.attrgetter(str(source.target))(model)) not in tensor_ids
                ):
                    return None
                continue
            sources.append(source)
    results = [node for node in part if node in returned or any(user not in inside for user in node.users)]
    return (sources[0], results[0]) if len(sources) == 1 and len(results) == 1 else None


def _stack_at(node: fx.Node, key: str) -> dict[str, Any]:
    stack = node.meta["nn_module_stack"]
    keys = list(stack)
    return {name: stack[name] for name in keys[: keys.index(key) + 1]}


def _refuse_state(captured: Captured, model: nn.Module) -> None:
    states = captured.graph.find_nodes(op="get_attr")
    held = nodes_by_storage(state for state in states if state.target not in captured.extra)
    for node in captured.graph.nodes:
        for argument in mutated_arguments(node):
            changed = held.get(storage_key(argument))
            if not changed:
                continue
            owner, _, name = str(changed[0].target).rpartition(".")
            kind = type(model.get_submodule(owner))
            if not issubclass(kind, nn.modules.batchnorm._BatchNorm):
                raise CapslogError(
                    f"module {owner or 'the model itself'!r} ({kind.__name__}) changes its {name!r} in its forward; a "
                    "pipeline cannot keep such state in order, only batch norm's running statistics"
                )


# -- Finds where a model's own modules run in parallel: the automatic cut points of its branches.
#
# Called by `capture_layers` before a captured graph is changed. The repeated blocks of a model, which are its other
# automatic cut points, stay whole: within them every attention and every gated network has a fork.


def forked_modules(captured: Captured, model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return modules with parameters that read one floating-point tensor side by side, in the order of execution.

    Two children of one module are side by side if neither waits for the other. Operations between the tensor and a
    child that belong to no child, such as a functional pooling, count as the child's.

    blocks: modules that are neither searched inside nor returned.
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
