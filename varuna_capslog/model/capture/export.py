"""Exports a module's forward to one flat graph by `torch.export`, and replaces torch's private constructs by ours.

The graph has one node per tensor operation, with the modules that it ran in; parameters and buffers are `get_attr`
nodes with their own qualified names.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.causality import attend_causally
from varuna_capslog.model.capture.fixed_sizes import fix_sizes
from varuna_capslog.model.capture.kernels import kernels_stay_calls
from varuna_capslog.model.capture.opaque import Calls, NeedsPython, OpaqueCalls, put_in_calls
from varuna_capslog.model.capture.repeats import EqualBlocks, NotEqual, is_view, storage_key
from varuna_capslog.model.capture.runtime import CapturedGraph, FixedSize, Region, Varying, names_of
from varuna_capslog.model.capture.trial import Watch
from varuna_capslog.model.hollow import on_host
from varuna_capslog.model.sources import failing_line, line_of

__all__ = [
    "LEFT",
    "Captured",
    "NotCaptured",
    "OutputName",
    "export_model",
    "follow_device",
    "input_tensors",
    "is_open",
    "module_calls",
    "module_path",
    "named_leaves",
    "nodes_by_storage",
    "paths_of",
    "same_storage",
]


# -- Names tensors in a model's arguments and result by their places there, and modules in slices of lists.


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
    """Return every leaf of a model's result, named by its place: `logits`, `loss`, `0.1`; a bare tensor is `output`. No
    leaf gets a name in `taken`.
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

    For a class that was registered without key paths, such as those of diffusers, the names of its entries or
    attributes are used.
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


# -- exporting a module's forward to one flat graph


@dataclass
class Captured:
    """A model's forward as one graph.

    graph: placeholders (the model's tensor inputs), `get_attr` nodes, operations; no output node.
    inputs: name and node of every tensor input, in order.
    outputs: name and node of every tensor that the model returns.
    extra: modules and tensors that the graph refers to and the model lacks, by attribute name.
    unary: ids of the modules that were only ever called as `module(one tensor)` and returned one tensor.
    bounds: least and greatest value of every size that may change, by its name in torch's shapes.
    conditions: comparisons of these sizes, by name, that the model's code requires.
    result: the model's result, with names in the places of its tensors.
    left_behind: for each of the watch's changes, what the code leaves on a module, with names in the places of tensors.
    watch: observations of the model's code.
    whole: why a module is kept whole, by its qualified name.
    """

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    extra: dict[str, Any]
    unary: set[int]
    bounds: dict[str, tuple[int, int | None]]
    conditions: tuple[str, ...] = ()
    result: Any = None
    left_behind: Any = None
    watch: Watch | None = None
    whole: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Captured:
        """Return a copy with a graph of its own."""
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        inputs = {name: made[node] for name, node in self.inputs.items()}
        outputs = {name: made[node] for name, node in self.outputs.items()}
        return replace(self, graph=graph, inputs=inputs, outputs=outputs, extra=dict(self.extra), unary=set(self.unary))


LEFT = "left behind: "
"""Prefix of the names of those outputs that the model's code leaves on its modules."""


class OutputName(str):
    """Replaces the tensor of that name in a model's result."""


class NotCaptured(CapslogError):
    """torch cannot capture a model. path: qualified name of the module that was running. why: the reason in short."""

    def __init__(self, path: str, why: str, sentence: str) -> None:
        super().__init__(sentence)
        self.path, self.why = path, why


def export_model(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    opaque: OpaqueCalls | None = None,
    by_module: bool = False,
    keeps: bool = False,
    once: bool = True,
    hides: bool = True,
) -> Captured:
    """Capture `model` in its present mode on these arguments' shapes; `Varying` arguments leave some sizes open.

    State that the model's code changes is restored. opaque: holds the modules that are kept whole; None: no modules.
    by_module, keeps: as in `Watch`. once: export only one of equal blocks, if the model has no weights. hides: as in
    `EqualBlocks`.

    Raises NotCaptured, which names the module that was running and torch's reason.
    """
    varies, as_given = {}, (arguments, keywords)
    if any(isinstance(argument, Varying) for argument in [*arguments, *keywords.values()]):
        varies = inspect.signature(model.forward).bind(*arguments, **keywords).arguments
        varies = {name: _open_sizes(value) for name, value in varies.items()}
        bare = lambda value: value.tensor if isinstance(value, Varying) else value  # noqa: E731
        arguments, keywords = tuple(map(bare, arguments)), {name: bare(value) for name, value in keywords.items()}
    # torch would make one input of a tensor that is passed under two names, so every input is cloned
    arguments, keywords = pytree.tree_map_only(Tensor, lambda tensor: tensor.clone(), (arguments, dict(keywords)))
    watch, opaque = Watch(model, by_module, keeps), opaque or OpaqueCalls({})
    plainly = not (by_module or keeps or opaque.keeps_modules)
    blocks = EqualBlocks(model, hides) if once and plainly and _is_hollow(model) else None
    with (
        on_host(model),
        opaque.open(),
        blocks.open() if blocks else nullcontext(()) as hidden,
        watch.open(hidden),
        _quiet(),
        _answering("is_exporting"),
        kernels_stay_calls(model),
    ):
        try:
            program = torch.export.export(model, arguments, keywords, dynamic_shapes=varies or None, strict=False)
        except FixedSize:
            raise
        except Exception as error:
            if blocks is None:
                raise _explained(model, watch.running, error) from error
            program = None  # code may read what a skipped block would have left behind
    if blocks is not None and blocks.hidden_are_needed:
        return export_model(model, *as_given, hides=False)
    if program is None:
        return export_model(model, *as_given, once=False)
    if _maps(program.graph_module) and torch.compiler.is_compiling.__module__ != __name__:
        with _answering("is_compiling"):
            return export_model(model, *as_given, opaque, by_module, keeps, once, hides)
    _check_open(program, varies)
    name_slices(model, program.graph_module)
    _check_functions(model, program.graph_module)
    names = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    graph, extra = fx.Graph(), {}
    env: dict[fx.Node, fx.Node] = {}
    inputs: dict[str, fx.Node] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    if blocks is not None:
        known = {str(names[node.name].target): node for node in placeholders if _is_parameter(names[node.name])}
        for target, meta in blocks.with_hidden(known):
            made = graph.create_node("get_attr", target)
            made.meta |= meta
            if target in known:
                env[known[target]] = made
    for node in placeholders:
        if node in env:
            continue
        spec = names[node.name]
        if spec.kind == InputKind.USER_INPUT:
            if isinstance(spec.arg, TensorArgument):
                env[node] = inputs[node.name] = graph.placeholder(node.name)
                env[node].meta["val"] = node.meta["val"]
            continue
        target = spec.target
        if spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ):
            target = "constant_" + str(spec.target).replace(".", "_")
            extra[target] = program.constants[spec.target]
        env[node] = graph.create_node("get_attr", target)
        env[node].meta["val"] = node.meta.get("val")
    _copy_operations(program.graph_module, graph, env, extra, opaque.calls)
    unary = watch.unary
    if blocks is not None:
        try:
            if blocks.calls and (watch.changes or watch.drawn or opaque.calls):
                raise NotEqual
            copies, unary = blocks.copy_parts(graph, extra), blocks.with_equals(unary)
        except NotEqual:
            return export_model(model, *as_given, once=False)
        env = {node: copies.get(value, value) for node, value in env.items()}
    bounds = {
        str(name): (int(limits.lower), _finite(limits.upper))
        for name, limits in program.range_constraints.items()
        if limits.lower > -(2**62)  # else it is an unbounded number, such as from `item`
    }
    captured = Captured(graph, inputs, {}, extra, unary, bounds, watch=watch)
    captured.conditions = _conditions(program, inputs) if bounds else ()
    _name_outputs(captured, program, env, keeps)
    _bypass_copies_of_nothing(captured)
    for part in (graph, *(held.body.graph for held in extra.values() if isinstance(held, Region))):
        _reshape_attention(part)
    fix_sizes(graph)
    attend_causally(graph, captured.outputs.values())
    return captured


def _is_parameter(spec: Any) -> bool:
    return bool(spec.kind == InputKind.PARAMETER)


def _is_hollow(model: nn.Module) -> bool:
    return any(True for _ in model.parameters()) and all(parameter.is_meta for parameter in model.parameters())


def _open_sizes(value: Any) -> Any:
    """Return torch's dynamic-shape specification that leaves an argument's varying sizes open where possible."""
    return dict.fromkeys(value.dimensions, torch.export.Dim.AUTO) if isinstance(value, Varying) else None


def _check_open(program: Any, varies: Mapping[str, Any]) -> None:
    """Raise CapslogError where the model fixes a size that was to stay open."""
    for node in program.graph.find_nodes(op="placeholder"):
        for dimension in varies.get(node.name) or ():
            size = node.meta["val"].shape[dimension]
            if not is_open(size) or not str(size).isidentifier():
                raise FixedSize(
                    f"size {dimension} of the input {node.name!r} cannot change: the model's code, or an example of "
                    f"size 1, fixes it to {size}; give an example of at least 2 there, or one size only"
                )


def _check_functions(model: nn.Module, root: fx.GraphModule) -> None:
    """Raise NotCaptured where the code calls a function of torch that the graph holds as an object, since it has no
    operator, such as indexing under `torch.vmap`.
    """
    for node in root.graph.find_nodes(op="get_attr"):
        if not node.users or isinstance(getattr(root, str(node.target), None), (Tensor, nn.Module, type(None))):
            continue
        path = module_path(node)
        kind = type(model.get_submodule(path))
        why = f"its code calls a function under torch.vmap that no operator stands for{line_of(kind, r'def forward')}"
        raise NotCaptured(path, why, f"module {path or kind.__name__!r} ({kind.__name__}) cannot be captured: {why}")


def _conditions(program: Any, inputs: Mapping[str, fx.Node]) -> tuple[str, ...]:
    """Return the comparisons of open sizes that the model's code made, in the names of the sizes. Raises CapslogError
    for a comparison that is not one of whole numbers.
    """

    def named(match: re.Match[str]) -> str:
        return str(inputs[match[1]].meta["val"].shape[int(match[2])])

    texts = []
    for guard in program._guards_code:
        text = _SIZE.sub(named, guard)
        first, _, second = text.partition(" == ")
        try:
            names = names_of(text)
        except (SyntaxError, ValueError) as error:
            raise FixedSize(
                f"the sizes of the inputs cannot change: the model's code asks whether {text}; give one size only"
            ) from error
        if names and first != second:
            texts.append(text)
    return tuple(texts)


_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")


def is_open(size: Any) -> bool:
    """True where torch left a size open; a size that the model's code fixes is a number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _finite(bound: Any) -> int | None:
    return None if bound > 2**62 else int(bound)


def module_calls(node: fx.Node) -> dict[str, str]:
    """Return the calls that a node ran in, outermost first: call key -> qualified name, without the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return {key: entry[0] for key, entry in stack.items() if entry[0]}


def module_path(node: fx.Node) -> str:
    """Return the qualified name of the innermost module that a node ran in; "" for the model itself."""
    calls = module_calls(node)
    return list(calls.values())[-1] if calls else ""


def same_storage(a: fx.Node, b: fx.Node) -> bool:
    """True where two nodes are one value, or tensors that share memory."""
    return storage_key(a) == storage_key(b)


def nodes_by_storage(nodes: Iterable[fx.Node]) -> dict[int | fx.Node, list[fx.Node]]:
    """Return the nodes by `storage_key`, in their order."""
    groups: dict[int | fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(storage_key(node), []).append(node)
    return groups


def _name_outputs(captured: Captured, program: Any, env: Mapping[fx.Node, fx.Node], keeps: bool) -> None:
    result = program.graph.output_node().args[0]
    tree = pytree.tree_unflatten(list(range(len(result))), program.call_spec.out_spec)
    captured.result = _named(captured, tree[0] if keeps else tree, result, env, "")
    if keeps:
        captured.left_behind = _named(captured, tree[1], result, env, LEFT)
    if not captured.outputs:
        raise CapslogError("the model returns no tensor, so there is nothing to take a loss of")


def _named(captured: Captured, tree: Any, result: Sequence[Any], env: Mapping[fx.Node, fx.Node], before: str) -> Any:
    """Return a part of the model's result with names in the places of its tensors, which become outputs. tree: this
    part, with each leaf's index in `result`.
    """
    names: dict[int, Any] = {}
    for place, index in named_leaves(tree, captured.inputs):
        names[index] = result[index]
        if isinstance(result[index], fx.Node):
            names[index] = OutputName(before + place)
            captured.outputs[before + place] = env[result[index]]
    return pytree.tree_map(lambda index: names[index], tree)


def _bypass_copies_of_nothing(captured: Captured) -> None:
    """Let readers in other modules read the value itself where a module's `x.to(x.dtype)` returned it unchanged.

    The tracer identifies a tensor by the last operation that returned it, so a residual connection seems to begin
    inside the norm behind it. Inside the module the conversion stays: autocast may need it.
    """
    for node in list(captured.graph.nodes):
        if node.op != "call_function" or not str(node.target).startswith(
            ("aten.to.", "aten.alias.", "aten.contiguous.")
        ):
            continue
        source, before, after = node.args[0], node.args[0].meta.get("val"), node.meta.get("val")
        if before is None or before.dtype != after.dtype or not same_storage(source, node):
            continue
        calls = module_calls(node).keys()
        for user in list(node.users):
            if str(node.target).startswith("aten.alias.") or not calls <= module_calls(user).keys():
                user.replace_input_with(node, source)
        for name, output in captured.outputs.items():
            if output is node:
                captured.outputs[name] = source


def _reshape_attention(graph: fx.Graph) -> None:
    """Let views of what fused attention returns be reshapes: they copy where a device's kernel returns another layout.

    The module's own code copies there by `.contiguous()`, which an export leaves out where it finds nothing to copy.
    """
    found = [node for node in graph.nodes if node.target is torch.ops.aten.scaled_dot_product_attention.default]
    for node in found:  # grows
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        found += [user for user in node.users if is_view(user.target)]


_UNTRACED = "do_not_emit_stack_traces"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export, which logs and prints whole graphs before it raises; our own error says what a user needs.

    Where torch can (not 2.11), also stop it from recording each operation's Python line, a sixth of its time.
    """
    before, traced = logging.root.manager.disable, getattr(fx.config, _UNTRACED, None)
    logging.disable(logging.CRITICAL)
    if traced is not None:
        setattr(fx.config, _UNTRACED, True)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if traced is not None:
            setattr(fx.config, _UNTRACED, traced)


@contextmanager
def _answering(question: str) -> Iterator[None]:
    """Let a function of `torch.compiler` return True to torch alone, so that a model's code takes the branch of an
    ordinary run. Its other branch makes graphs for all sizes or other systems, with masks of sequence x sequence
    instead of `is_causal`, or loops instead of a solver. Our graphs refuse other sizes.
    """
    answer = getattr(torch.compiler, question)

    def of_torch() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return answer() and asking.partition(".")[0] == "torch"

    setattr(torch.compiler, question, of_torch)
    try:
        yield
    finally:
        setattr(torch.compiler, question, answer)


def _maps(root: fx.GraphModule) -> bool:
    """True where code for compilers ran a scan or a map, for which the graph holds functions that are no operators."""
    return any(getattr(node.target, "__name__", "") == "_add_batch_dim" for node in root.graph.nodes)


def _explained(model: nn.Module, running: Sequence[tuple[str, str]], error: Exception) -> NotCaptured:
    path, kind = running[-1] if running else ("", type(model).__name__)
    where = f"module {path or kind!r} ({kind})"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = failing_line(error, map(type, model.modules()))
    advice = "mend the example inputs or the module, or write this model as a Chain by hand"
    if isinstance(error, NeedsPython):
        why = reason
    elif "data-dependent" in reason or "DataDependent" in type(error).__name__ or "but got FakeTensor" in reason:
        why = "its Python code branches on, or sizes something by, the values of a tensor"
        advice = "use torch.where there, or write this model as a Chain by hand"
        if _in_distributions(error):
            why = "torch.distributions checks the values of its arguments, so pass validate_args=False to divide it"
            advice = "or write this model as a Chain by hand"
    elif "not a known type" in reason:
        value = reason.partition("<class '")[2].partition("'")[0]
        why = f"it takes or returns a {value}, which is no tensor, list, tuple or dict"
        advice = "make it return tensors"
    else:
        why = f"{type(error).__name__}: {reason[:300]}"
    return NotCaptured(path, f"{why}{line}", f"{where} cannot be captured: {why}{line}; {advice}")


def _in_distributions(error: BaseException) -> bool:
    """True where an error was raised while the constructor of a distribution checked its arguments."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is Distribution.__init__.__code__ for frame, _ in frames)


def _is_check(node: fx.Node) -> bool:
    # the export's own assertions fix device and dtype, which autocast and .to(device) may rightly change; sizes are
    # checked by each layer's `Guard`
    if node.op == "call_module":
        return str(node.target) == "_guards_fn"
    return node.op == "call_function" and any(name in str(node.target) for name in _CHECKS)


_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range")


def _copy_operations(
    root: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, fx.Node], extra: dict[str, Any], calls: Calls
) -> None:
    """Copy torch's operations from `root` into our graph. A region under its own gradient or autocast mode becomes a
    `Region`; a call that the export did not follow (`calls`) becomes a module.

    env: torch's node -> our copy; holds the inputs already. extra: receives the regions by attribute name.
    """
    for node in root.graph.nodes:
        # a get_attr is the body of a region, fetched where it is used
        if node.op in ("placeholder", "get_attr", "output") or _is_check(node):
            continue
        region = _region(node, root, calls)
        if region is None:
            env[node] = graph.node_copy(node, lambda old: env[old])
            made_by = env[node].args[0] if node.target is operator.getitem else None
            if isinstance(made_by, fx.Node) and "inner_stacks" in made_by.meta:
                env[node].meta["nn_module_stack"] = made_by.meta["nn_module_stack"]
            continue
        path = f"region_{sum(key.startswith('region_') for key in extra)}"
        extra[path] = region
        passed = [env[source] for source in node.args if isinstance(source, fx.Node) and source.op != "get_attr"]
        env[node] = graph.call_module(path, tuple(passed))
        env[node].meta = {
            "val": node.meta.get("val"),
            "nn_module_stack": _common_stack(region),
            "inner_stacks": [inner.meta.get("nn_module_stack") or {} for inner in region.body.graph.nodes],
        }
    replaced = put_in_calls(graph, calls, extra)
    for node, value in env.items():
        while value in replaced:
            value = env[node] = replaced[value]


def _region(node: fx.Node, root: fx.GraphModule, calls: Calls) -> Region | None:
    kind = getattr(node.target, "__name__", "")
    if kind == "wrap_with_set_grad_enabled":
        return Region(_cleaned_body(root, node.args[1], calls), torch.set_grad_enabled, node.args[:1])
    if kind == "wrap_with_autocast":
        # by default a trace records that autocast caches no copies of weights; when the model runs, it caches them
        return Region(_cleaned_body(root, node.args[4], calls), torch.autocast, (*node.args[:3], True))
    return None


def _cleaned_body(root: fx.GraphModule, attribute: Any, calls: Calls) -> fx.GraphModule:
    body = root.get_submodule(attribute.target)
    assert isinstance(body, fx.GraphModule)
    graph = fx.Graph()
    extra: dict[str, Any] = {}
    inputs = body.graph.find_nodes(op="placeholder")
    env = {node: graph.node_copy(node) for node in inputs}
    _copy_operations(body, graph, env, extra, calls)
    graph.node_copy(body.graph.output_node(), lambda old: env[old])
    follow_device(graph, env[inputs[0]] if inputs else None)
    return CapturedGraph(nn.ModuleDict(extra), graph)


def follow_device(graph: fx.Graph, tensor: fx.Node | None) -> None:
    """Replace every fixed device in the graph by the device of `tensor`, so that a layer can be moved."""
    users = [
        node
        for node in graph.nodes
        if any(isinstance(leaf, torch.device) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    ]
    if not users or tensor is None:
        return
    if tensor.op == "get_attr" and (first := next(iter(graph.nodes))) is not tensor:
        first.prepend(tensor)  # a layer that reads nothing may name a device before it reads its buffer
    last_input = [node for node in graph.nodes if node.op == "placeholder"] or [tensor]
    with graph.inserting_after(max(tensor, last_input[-1])):
        device = graph.call_function(getattr, (tensor, "device"))
    for node in users:
        swap = lambda leaf: device if isinstance(leaf, torch.device) else leaf  # noqa: E731
        node.args = pytree.tree_map(swap, node.args)
        node.kwargs = pytree.tree_map(swap, node.kwargs)


def _common_stack(region: Region) -> dict[str, Any]:
    stacks = [
        inner.meta.get("nn_module_stack") or {}
        for inner in region.body.graph.nodes
        if inner.op in ("call_function", "call_module") and inner.target is not getattr
    ]
    if not stacks:
        return {}
    shared = set.intersection(*(set(stack) for stack in stacks))
    return {key: value for key, value in stacks[0].items() if key in shared}
