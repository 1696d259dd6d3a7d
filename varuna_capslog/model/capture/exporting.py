"""Exports a model until the graph does what the model does; decides which modules have to stay Python, and why.

A module whose code cannot be exported, or whose random numbers an export would take for constants, is kept whole: its
Python runs at every step. Where this applies to the model's own outermost code, the whole model is kept. A model that
keeps a state from one forward to the next is refused: a pipeline repeats forwards, and runs them on several ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.export import (
    Captured,
    NotCaptured,
    OutputName,
    export_model,
    module_path,
    named_leaves,
    paths_of,
)
from varuna_capslog.model.capture.opaque import MadeCall, OpaqueCalls
from varuna_capslog.model.capture.python_calls import CallShape, Whole, WholeModel
from varuna_capslog.model.capture.runtime import ByMode, Region, Varying
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.capture.trial import has_weights, same_bits, try_model
from varuna_capslog.model.hollow import NeedsValues
from varuna_capslog.model.known_values import Known
from varuna_capslog.model.layer import Layer, freeze_layers, in_training
from varuna_capslog.model.python_state import GLOBAL, PythonState, StateChange, crafted_draws
from varuna_capslog.model.sources import line_of

__all__ = ["Exporter", "KeptWhole", "merge_modes", "whole_layer"]


_TRIES = 30


class KeptWhole(Exception):
    """Raised where the whole model has to stay Python, with the reason."""


class Exporter:
    """Exports of a model with an example.

    keeps: True: the graphs also return what the model's code leaves on its modules.

    Attributes:
        whole: why a module is kept whole, by its qualified name.
    """

    def __init__(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], keeps: bool = False
    ) -> None:
        self._model, self._arguments, self._keywords = model, arguments, dict(keywords)
        self._keeps = keeps
        self.whole: dict[str, str] = {}
        self._made: dict[str, list[MadeCall]] = {}

    def export(self) -> Captured:
        """Return the graph of the model in its present mode.

        Raises:
            KeptWhole: no part of it can be a graph.
            FixedSize: as `export_model`.
            CapslogError: the model fails on its example, or it keeps a state.
        """
        for _ in range(_TRIES):
            try:
                captured = self._once(bool(self.whole))
            except NotCaptured as error:
                self._keep_failing(error)
                continue
            self._refuse_state(captured)
            new = self._drawing(captured) | self._hooked(captured) | self._leaving(captured)
            new |= self._sized(captured) | self._normed(captured)
            if not new:
                captured.whole = self._told(captured)
                return captured
            self._keep(new)
        raise KeptWhole("too many of its modules cannot be captured")

    def _once(self, by_module: bool, states: AbstractContextManager[Any] | None = None) -> Captured:
        modules = {path: self._model.get_submodule(path) for path in self.whole}
        with states or nullcontext():
            calls = OpaqueCalls(modules, self._made)
            return export_model(self._model, self._arguments, self._keywords, calls, by_module, self._keeps)

    def _told(self, captured: Captured) -> dict[str, str]:
        """Return why modules are kept whole, and for which of them costs depend on the example's values."""
        calls = [held for held in captured.extra.values() if isinstance(held, Whole) and held.shape.values]
        return self.whole | {call.path: f"{self.whole[call.path]}; {_OF_EXAMPLE}" for call in calls}

    # -- failing modules -----------------------------------------------------------------------------------------------

    def _keep_failing(self, error: NotCaptured) -> None:
        """Keep the module whole that failed in an export; if it is whole already, keep the module around it."""
        path = self._covering(error.path)
        if path in self._made:
            path = path.rpartition(".")[0]
            while type(self._model.get_submodule(path)).forward is nn.Module.forward:  # such as a list
                path = path.rpartition(".")[0]
        arguments, keywords = self._bare()
        modules = {path: self._model.get_submodule(path)} if path else {}
        calls = OpaqueCalls(modules, records=True)
        try:
            try_model(self._model, arguments, keywords, calls)
        except Exception as failure:
            if not has_weights(self._model):
                where = f"module {error.path!r}" if error.path else f"the {type(self._model).__name__}"
                raise NeedsValues(where, error.why) from failure
            reason = " ".join(str(failure).split())[:300] or type(failure).__name__
            raise CapslogError(f"{error}; the model itself fails on this example, too ({reason})") from failure
        if not path:
            raise KeptWhole(error.why)
        self._made |= calls.made
        self._keep({path: error.why})

    def _bare(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return bare(self._arguments), {name: bare(argument) for name, argument in self._keywords.items()}

    def _covering(self, path: str) -> str:
        """Return the outermost module that is kept whole around a module, or the module itself."""
        return min(
            (kept_path for kept_path in self.whole if f"{path}.".startswith(f"{kept_path}.")), key=len, default=path
        )

    def _keep(self, reasons: Mapping[str, str]) -> None:
        if "" in reasons:
            raise KeptWhole(reasons[""])
        self.whole |= reasons
        for path in list(self.whole):
            if self._covering(path) != path:
                del self.whole[path]

    # -- random numbers ------------------------------------------------------------------------------------------------

    def _drawing(self, captured: Captured) -> dict[str, str]:
        """Map each module whose export would be wrong, since its code decides by random numbers -> the reason."""
        reasons = dict.fromkeys(_with_generators(captured), "it draws from a generator of its own")
        assert captured.watch is not None
        if not captured.watch.drawn or (self.whole and not self._uncovered(captured.watch.drawers)):
            return reasons
        texts, drawers = {graph_text(captured)}, dict(captured.watch.drawers)
        for high in (False, True):
            try:
                crafted = self._once(True, crafted_draws(high))
            except NotCaptured:
                texts.add("")
                continue
            assert crafted.watch is not None
            texts.add(graph_text(crafted))
            for path, names in crafted.watch.drawers.items():
                drawers.setdefault(path, set()).update(names)
        own_generators = {path: names for path, names in self._uncovered(drawers).items() if names - GLOBAL.keys()}
        if len(texts) > 1 or own_generators:
            deciding = self._uncovered(drawers) or {"": set(captured.watch.drawn)}
            for path, names in deciding.items():
                line = line_of(type(self._model.get_submodule(path)), r"\brandom\b|\brng\b|\.(random|uniform|choice)\(")
                reasons[path] = f"its code draws from {' and '.join(sorted(names))}{line}"
        return reasons

    def _uncovered(self, drawers: Mapping[str, set[str]]) -> dict[str, set[str]]:
        return {path: names for path, names in drawers.items() if self._covering(path) not in self.whole}

    # -- further things that no graph has ------------------------------------------------------------------------------

    def _hooked(self, captured: Captured) -> dict[str, str]:
        """Map each module with a backward hook that is not always called as `module(one tensor)` -> the reason."""
        return {
            path: "it has a hook on its backward"
            for path, module in self._model.named_modules()
            if (module._backward_hooks or module._backward_pre_hooks)
            and id(module) not in captured.unary
            and self._covering(path) not in self.whole
        }

    def _sized(self, captured: Captured) -> dict[str, str]:
        """Map each module with a tensor whose size depends on values, so that it has no known bounds -> the reason."""
        reasons: dict[str, str] = {}
        for node in captured.graph.nodes:
            leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if _may_be_open(leaf)]
            if any(map(free_unbacked_symbols, leaves)):
                path = module_path(node)
                line = line_of(type(self._model.get_submodule(path)), r"def forward")
                why = "it makes a tensor whose size depends on the values of another"
                if any(isinstance(leaf, torch.SymFloat) for leaf in leaves):
                    why = "it reads a value of a tensor"
                reasons.setdefault(path, f"{why}{line}")
        if reasons:
            arguments, keywords = self._bare()
            paths = [self._covering(path) for path in reasons if path]
            calls = OpaqueCalls({path: self._model.get_submodule(path) for path in paths}, records=True)
            try:
                try_model(self._model, arguments, keywords, calls)
            except Exception:
                if has_weights(self._model):
                    raise
            else:
                self._made |= calls.made
        return reasons

    def _normed(self, captured: Captured) -> dict[str, str]:
        """Map each module with a batch norm in a `Region` -> the reason: only a call of the norm counts statistics."""
        reasons: dict[str, str] = {}
        for node in captured.graph.find_nodes(op="call_module"):
            region = captured.extra.get(str(node.target))
            if isinstance(region, Region) and any(map(_counts, region.body.graph.nodes)):
                path, context = module_path(node), region.context.__name__
                line = line_of(type(self._model.get_submodule(path)), rf"\b({context}|no_grad)\b")
                reasons[path] = f"its code calls a batch norm under {context}{line}"
        return {path: why for path, why in reasons.items() if self._covering(path) not in self.whole}

    def _leaving(self, captured: Captured) -> dict[str, str]:
        """Map each module whose change would differ in the next call, or cannot be replayed -> the reason."""
        if not self._keeps:
            return {}
        assert captured.watch is not None
        changes = [change for change in captured.watch.changes if self._covering(change.module or "") not in self.whole]
        return {
            change.module or "": f"its code changes its {change.name}"
            for change in changes
            if change.put is None or change.counts or not all(map(_is_plain, pytree.tree_leaves(change.after)))
        }

    # -- state between forwards ----------------------------------------------------------------------------------------

    def _refuse_state(self, captured: Captured) -> None:
        """Refuse a model whose graph depends on what its code changed in an earlier forward."""
        assert captured.watch is not None
        changes = [change for change in captured.watch.changes if self._covering(change.module or "") not in self.whole]
        for change in changes:
            if change.kind == "iterator" or _reads(captured, change):
                raise CapslogError(state_sentence(self._model, [change]))
        counters = [change for change in changes if change.counts]
        text = graph_text(captured) if counters else ""
        for values in _other_numbers(counters):
            try:
                recaptured = self._once(False, self._with_values(counters, values))
            except NotCaptured:
                continue
            if graph_text(recaptured) != text:
                raise CapslogError(state_sentence(self._model, counters))
        kept = [change for change in changes if isinstance(change.after, Tensor) and change.put is not None]
        if not kept:
            return
        zeros = [
            torch.zeros(change.after.shape, dtype=change.after.dtype, device=change.after.device) for change in kept
        ]
        try:
            recaptured = self._once(False, self._with_values(kept, zeros))
        except NotCaptured:
            return
        assert recaptured.watch is not None
        for change in recaptured.watch.changes:
            if any(
                change.name == kept_change.name and change.module == kept_change.module for kept_change in kept
            ) and _reads(recaptured, change):
                raise CapslogError(state_sentence(self._model, [change]))

    @contextmanager
    def _with_values(self, changes: Sequence[StateChange], values: Sequence[Any]) -> Iterator[None]:
        """Set the changed attributes to these values; restore all state at the end."""
        state = PythonState(dict(self._model.named_modules()), files=True)
        try:
            for change, value in zip(changes, values, strict=True):
                assert change.put is not None
                change.put(value)
            yield
        finally:
            state.put_back()


def _counts(node: fx.Node) -> bool:
    """True where a node is a batch norm that adds to its running statistics."""
    if "batch_norm" not in str(node.target):
        return False
    return len(node.args) > 5 and bool(node.args[5]) and node.args[3] is not None


def _may_be_open(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (Tensor, bool, int, float, str, type(None)))


def bare(value: Any) -> Any:
    """Return an example input without its `Varying` wrapper, also inside tuples."""
    if isinstance(value, tuple):
        return tuple(map(bare, value))
    return value.tensor if isinstance(value, Varying) else value


def state_sentence(model: nn.Module, changes: Sequence[StateChange]) -> str:
    """Return the sentence that refuses a model whose forward makes these changes and depends on them."""
    change = changes[0]
    owner = "the model itself" if not change.module else f"module {change.module!r}"
    kind_of_owner = type(model.get_submodule(change.module or ""))
    owner += line_of(kind_of_owner, rf"\b{re.escape(re.split(r'[.[]', change.name)[0])}\b.*=[^=]")
    kind = "attribute" if change.kind == "attribute of an object" else change.kind
    return (
        f"{owner} changes its {kind} {change.name!r} in its forward, and what it computes depends on it; a pipeline "
        "runs forwards again and on several ranks, which cannot keep such state in order, only batch norm's running "
        "statistics: make it an input of the model, or change it between steps"
    )


def graph_text(captured: Captured) -> str:
    """Return the text of a graph's computation, equal for graphs that compute the same."""
    lines = [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in captured.graph.nodes]
    for name, held in sorted(captured.extra.items()):
        if isinstance(held, Tensor):
            lines.append(f"{name} {Known(held).key}")
        else:
            lines.append(f"{name} {getattr(held, 'key', held)}")
    return "\n".join([*lines, str(list(captured.outputs))])


def _reads(captured: Captured, change: StateChange) -> bool:
    """True where a graph reads the tensor that was there before a change."""
    if not isinstance(change.before, Tensor):
        return False
    target = f"{change.module}.{change.name}".lstrip(".")
    for node in captured.graph.find_nodes(op="get_attr"):
        held = captured.extra.get(str(node.target))
        same = isinstance(held, Tensor) and change.kind != "buffer" and held.data_ptr() == change.before.data_ptr()
        if node.users and (same or (change.kind == "buffer" and node.target == target)):
            return True
    return False


def _other_numbers(counters: Sequence[StateChange]) -> Iterator[list[Any]]:
    """Yield values that these numbers may have in later forwards: the next ones, an arbitrary one, and a large one."""
    if counters:
        yield [counter.after for counter in counters]
        yield [type(counter.after)(counter.after + 1) for counter in counters]
        yield [type(counter.after)(7 * counter.after + 1009) for counter in counters]
        yield [type(counter.after)(10**9) for counter in counters]


def _with_generators(captured: Captured) -> Iterator[str]:
    """Yield the modules whose graph draws from a generator object of their own."""
    for node in captured.graph.find_nodes(op="get_attr"):
        if isinstance(captured.extra.get(str(node.target)), torch.Generator):
            yield from dict.fromkeys(module_path(user) for user in node.users)


# -- Merges the training and the eval capture of a model into one graph that is right in both modes.
#
# Most differences disappear when modules replace their parts of the graph (`collapse`). The others are functions called
# with `training=self.training`, or with a probability that depends on the mode: the same node with other constants.


def merge_modes(training: Captured, evaluation: Captured, model: nn.Module) -> str | None:
    """Merge the eval capture into the training capture, in place. Return None, or the reason why that is impossible:
    then the training graph computes the same as before, and must not run in eval mode.

    The two lists of nodes are compared in order. A node may differ in its constants (it becomes a `ByMode`). A module
    that did nothing in eval mode (dropout, stochastic depth) may be missing there, as may a `contiguous()` of a tensor
    that is contiguous in eval mode already.
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
            mine, yours = training.extra.get(str(node.target)), evaluation.extra.get(str(node.target))
            if node.users and isinstance(mine, Tensor) and not _equal_constants(mine, yours):
                return f"module {_where(next(iter(node.users)), model)} reads a table of other values in eval mode"
            same[node] = held[node.op, node.target]
    active_in_eval = {node.target for node in theirs if node.op == "call_module"}
    # training node that is missing in eval mode -> its input, which replaces it there
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
        # fill in the defaults: one mode often states an argument that the other leaves out
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


def _equal_constants(mine: Tensor, yours: Any) -> bool:
    """True where two constants that the model's code made are equal: torch names them independently in each mode."""
    return mine is yours or (mine.dtype == yours.dtype and mine.shape == yours.shape and same_bits(mine, yours))


def _same_extra(mine: Any, yours: Any) -> bool:
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


# -- Makes one layer of a model that no graph can replace: its own Python runs at every step.


def whole_layer(
    model: nn.Module,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    outputs: Sequence[str] | None,
    cut_points: Sequence[str] | None,
    why: str,
) -> CapturedLayers:
    """Return the model as one layer, and the names of the tensors that enter and leave it, as a capture names them.

    example: positional and keyword arguments.
    outputs, cut_points: as in `capture_layers`.
    why: the reason why no graph can replace the model.

    Raises CapslogError: cut points, which one layer cannot have; an unknown output; a result of a class that torch does
    not know.
    """
    if cut_points:
        raise CapslogError(
            f"cut point {cut_points[0]!r} lies in the {type(model).__name__}, which runs as a whole ({why}); leave the "
            "cut points out"
        )
    arguments = bare(example[0]), {name: bare(value) for name, value in example[1].items()}
    with in_training(model):
        watch, result = try_model(model, *arguments, OpaqueCalls({}))
    _check_result(model, result)
    names = _input_names(model, arguments)
    leaves = [name for name, leaf in named_leaves(result, names)]
    tensors = [isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)]
    places = {name: at for at, (name, tensor) in enumerate(zip(leaves, tensors, strict=True)) if tensor}
    if not places:
        raise CapslogError("the model returns no tensor, so there is nothing to take a loss of")
    for name in outputs or ():
        if name not in places:
            raise CapslogError(f"outputs={list(outputs or ())} names {name!r}; the model returns {list(places)}")
    writes = tuple(places) if outputs is None else tuple(outputs)
    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    values = tuple(map(Known.of, given)) if watch.reads_values else ()
    why += f"; {_OF_EXAMPLE}" if values else ""
    module = WholeModel(model, CallShape.of(arguments, result, values), [places[name] for name in writes], why)
    named = [OutputName(name) if name in places else leaf for name, leaf in named_leaves(result, names)]
    module.meta["result"] = pytree.tree_unflatten(named, pytree.tree_structure(result))
    layers = [Layer(_NAME, module, tuple(names), writes)]
    freeze_layers(layers, model)
    return layers, tuple(names), writes


_NAME = "model"
_OF_EXAMPLE = "its costs are those for the values of the example inputs"


def _check_result(model: nn.Module, result: Any) -> None:
    """Refuse objects in a model's result in which torch finds no tensors."""
    for leaf in pytree.tree_leaves(result):
        kind = type(leaf)
        if isinstance(leaf, (Tensor, *_PLAIN)) or kind.__module__ == "torch":
            continue
        advice = "return a tuple or dict of tensors"
        if kind.__name__.endswith("Cache"):
            advice = "set use_cache=False in its config, or return tensors only"
        raise CapslogError(
            f"the {type(model).__name__} returns a {kind.__module__}.{kind.__qualname__}, in which torch finds no "
            f"tensors; {advice}"
        )


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)


def _input_names(model: nn.Module, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors that the model takes, in order, as torch's export names them."""
    positional, keywords = arguments
    parameters = inspect.signature(model.forward).parameters
    fixed = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    variadic = next(
        (name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL), "args"
    )
    named: list[tuple[str, ...]] = [(name,) for name in fixed[: len(positional)]]
    named += [(variadic, str(number)) for number in range(len(positional) - len(named))]
    trees = [*zip(named, positional, strict=True), *(((name,), value) for name, value in keywords.items())]
    names: list[str] = []
    for name, tree in trees:
        for path, leaf in paths_of(tree, name):
            if isinstance(leaf, Tensor):
                text = "_".join(re.sub(r"[^a-zA-Z0-9]", "_", part) for part in path)
                names.append(text if text not in names else f"{text}_{len(names)}")
    return names
