"""Merges the training and the eval capture of a model into one graph that is right in both modes.

Most differences are gone once modules have their parts back (`collapse`). The others are functions called with
`training=self.training` or a probability chosen by it: the same node with other constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.model.capture.export import Captured, module_path
from varuna_capslog.model.capture.runtime import ByMode

__all__ = ["merge_modes"]


def merge_modes(training: Captured, evaluation: Captured, model: nn.Module) -> str | None:
    """Merge the eval capture into the training one, in place.

    The two lists of nodes are walked side by side. A node may differ in its constants (it becomes a `ByMode`), and a
    module that did nothing in eval mode (dropout, stochastic depth) may be missing there, as may a `contiguous()` of a
    tensor that is contiguous in eval mode already.

    Returns:
        None, or why the two do more than that differently; then the training graph is unchanged in meaning and must
        not be run in eval mode.
    """
    if _shapes(training) != _shapes(evaluation):
        return "it fixes other sizes of its inputs in eval mode"
    same: dict[fx.Node, fx.Node] = {}
    held = {(node.op, node.target): node for node in training.graph.nodes if node.op in ("placeholder", "get_attr")}
    ours = [node for node in training.graph.nodes if node.op in ("call_function", "call_module")]
    theirs = [node for node in evaluation.graph.nodes if node.op in ("call_function", "call_module")]
    for node in evaluation.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if (node.op, node.target) not in held:
                return f"it uses {node.target!r} in eval mode only"
            same[node] = held[node.op, node.target]
    active_in_eval = {node.target for node in theirs if node.op == "call_module"}
    # a training node that eval mode skips stands for its input there
    skipped: dict[fx.Node, fx.Node] = {}
    by_mode: list[tuple[fx.Node, fx.Node]] = []
    eval_nodes = iter(theirs)
    counterpart = next(eval_nodes, None)
    for node in ours:
        if counterpart is not None and _alike(node, counterpart, same, skipped, training, evaluation):
            if not _equal_leaves(node, counterpart):
                by_mode.append((node, counterpart))
            same[counterpart] = node
            counterpart = next(eval_nodes, None)
        elif str(node.target) == "aten.contiguous.default" or (
            node.op == "call_module" and node.target not in active_in_eval and node.target not in training.extra
        ):
            skipped[node] = node.args[0]
        else:
            return f"module {_where(node, model)} does something else in eval mode"
    if counterpart is not None:
        return f"module {_where(counterpart, model)} does more in eval mode"
    for name, node in training.outputs.items():
        theirs_node = evaluation.outputs.get(name)
        if theirs_node is None or same[theirs_node] is not _through(node, skipped):
            return f"the output {name!r} is another value in eval mode"
    training.conditions = tuple(dict.fromkeys([*training.conditions, *evaluation.conditions]))
    for index, (node, eval_node) in enumerate(by_mode):
        _switch(training, node, eval_node, f"by_mode_{index}")
    return None


def _shapes(captured: Captured) -> list[str]:
    return [str(node.meta["val"].shape) for node in captured.inputs.values()]


def _through(node: Any, skipped: Mapping[fx.Node, fx.Node]) -> Any:
    while isinstance(node, fx.Node) and node in skipped:
        node = skipped[node]
    return node


def _leaves(node: fx.Node) -> tuple[list[Any], pytree.TreeSpec]:
    args, kwargs = list(node.args), dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        # an argument left out is its default: one mode often names what the other leaves out
        for argument in schema.arguments[len(args) :]:
            if not argument.kwarg_only and argument.name in kwargs:
                args.append(kwargs.pop(argument.name))
            elif argument.has_default_value() and not argument.kwarg_only:
                args.append(argument.default_value)
            elif argument.has_default_value():
                kwargs.setdefault(argument.name, argument.default_value)
    return pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))


def _alike(
    node: fx.Node,
    counterpart: fx.Node,
    same: Mapping[fx.Node, fx.Node],
    skipped: Mapping[fx.Node, fx.Node],
    training: Captured,
    evaluation: Captured,
) -> bool:
    if (node.op, node.target) != (counterpart.op, counterpart.target):
        return False
    mine_extra, other_extra = training.extra.get(str(node.target)), evaluation.extra.get(str(counterpart.target))
    if mine_extra is not None and not _same_extra(mine_extra, other_extra):
        return False
    (mine, spec), (yours, other_spec) = _leaves(node), _leaves(counterpart)
    if spec != other_spec or len(mine) != len(yours):
        return False
    return all(
        same.get(b) is _through(a, skipped) if isinstance(b, fx.Node) else not isinstance(a, fx.Node)
        for a, b in zip(mine, yours, strict=True)
    )


def _equal_leaves(node: fx.Node, counterpart: fx.Node) -> bool:
    pairs = zip(_leaves(node)[0], _leaves(counterpart)[0], strict=True)
    return all(isinstance(a, fx.Node) or (type(a) is type(b) and a == b) for a, b in pairs)


def _same_extra(mine: Any, yours: Any) -> bool:
    """True where two modules that a capture has added do the same."""
    return type(mine) is type(yours) and bool(mine.key == yours.key)


def _switch(captured: Captured, node: fx.Node, counterpart: fx.Node, name: str) -> None:
    (training, spec), (evaluation, _) = _leaves(node), _leaves(counterpart)
    slots = [index for index, leaf in enumerate(training) if isinstance(leaf, fx.Node)]
    tensors = [training[slot] for slot in slots]
    constants = [
        [None if index in slots else leaf for index, leaf in enumerate(leaves)] for leaves in (training, evaluation)
    ]
    captured.extra[name] = ByMode(node.target, spec, constants[0], constants[1], slots)  # type: ignore[arg-type]
    node.op, node.target, node.args, node.kwargs = "call_module", name, tuple(tensors), {}


def _where(node: fx.Node, model: nn.Module) -> str:
    path = str(node.target) if node.op == "call_module" and "_" not in str(node.target)[:8] else module_path(node)
    return repr(path or type(model).__name__)
