"""Plain functions of captured layers: a layer that has run often needs no autograd.

Autograd makes a node for every operator of a layer, and a hook of Python gives gradients between layers their layout.
When layers that look alike have run `CALLS` times, one is traced for the sizes of these calls, forward and backward
together, without decompositions. The trace is split into a forward and a backward function, whose saved tensors are
values between them. Both are Python code that calls the same operators in the same order as autograd, so every number
keeps its bits; they are taken only after outputs and gradients of one call were equal to autograd's. Operators that
only look at a tensor in another way are left out where nothing needs them. Layers share functions, with weights as
arguments, where one call of each runs the same operators on the same arguments, which alone decide the trace. A layer
takes no more memory than with autograd, but that the gradients of several outputs stay until its backward ends, and
once for that call.

Captured layers alone have functions, since the code of others may do something else in a later call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from varuna_capslog.engine.offload import laid_out
from varuna_capslog.model.capture.repeats import is_view
from varuna_capslog.model.capture.runtime import CapturedGraph
from varuna_capslog.model.capture.trial import same_bits
from varuna_capslog.model.chain import TensorSpec

if TYPE_CHECKING:
    from varuna_capslog.engine.layers import EngineLayer

__all__ = ["CALLS", "BoundFunctions", "LayerFunctions", "SharedFunctions"]

_log = logging.getLogger(__name__)

CALLS = 1000
"""Calls at one size of layers that look alike before these are traced: functions save as much time in so many calls."""
_MOST_SIZES = 8
"""Number of different sizes after which a layer is never traced."""
_aten = torch.ops.aten
_SAME = (_aten.alias.default, _aten.detach.default)
"""Operators that return the same tensor; autograd needs them, functions without it do not."""


@dataclass
class SharedFunctions:
    """Functions that equal layers of an engine share.

    calls: by what layers look like: sizes of parameters, buffers and inputs. traced: by all operators of a call; None
    where no functions can be made of them.
    """

    calls: Counter[object] = field(default_factory=Counter)
    traced: dict[str, _Traced | None] = field(default_factory=dict)

    def of(self, module: nn.Module, tensors: Sequence[Tensor]) -> BoundFunctions:
        """Return the functions of a module for inputs of these sizes. Raises _NotTraceable, or torch's errors."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=()):
            operators = _text_of(_joint_graph(module, state, tensors)[0])
            key = "\n".join([*map(str, map(_looks, (*state.values(), *tensors))), operators])
            if key not in self.traced:
                self.traced[key] = None
                self.traced[key] = _Traced.of(module, state, tensors, operators)
        traced = self.traced[key]
        if traced is None:
            raise _NotTraceable("an equal layer has no functions")
        return BoundFunctions(traced, list(state.values()), tensors[0].device)


class LayerFunctions:
    """Functions of one layer, by the sizes of its inputs; made when layers like it have run often enough."""

    def __init__(self, module: nn.Module, shared: SharedFunctions) -> None:
        self._module = module  # not the layer: a cycle would keep its tensors until garbage collection
        self._shared = shared
        self._looks = tuple(map(_looks, (*module.parameters(), *module.buffers())))
        self._sizes: set[object] = set()
        self._made: dict[object, BoundFunctions] = {}
        self._ended = not _is_traceable(module)
        """True once no further call is counted: the layer has too many sizes, or could not be traced."""

    def instead(
        self, layer: EngineLayer, reads: Mapping[str, Tensor], reached: Callable[[str], bool]
    ) -> BoundFunctions | None:
        """Return what runs in place of the layer's module with the tensors that it reads; None: the module itself.

        reached: whether the loss depends on the output of this name. Counts the call.
        """
        if self._ended:
            return None
        tensors = [reads[name] for name in layer.layer.reads]
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
        if (made := self._made.get(key)) is not None:
            return made
        kind = self._looks, key
        self._shared.calls[kind] += 1
        if self._shared.calls[kind] <= CALLS or key not in self._sizes:  # the first call shows what a layer does
            self._sizes.add(key)
            self._ended = len(self._sizes) > _MOST_SIZES
            return None
        made = self._of_layer(layer, tensors, reached)
        self._ended = made is None
        if made is not None:
            self._made[key] = made
        return made

    def _of_layer(
        self, layer: EngineLayer, tensors: Sequence[Tensor], reached: Callable[[str], bool]
    ) -> BoundFunctions | None:
        """Return the functions for these sizes; None where they cannot be made, or give other bits."""
        if not layer.plain or any(type(tensor) is not Tensor for tensor in tensors):
            return None
        try:
            made = self._shared.of(self._module, tensors)
            carried = zip(layer.layer.writes, made.traced.carries, strict=True)
            if not all(reached(name) for name, carries in carried if carries):
                raise _NotTraceable("the loss does not depend on every output")
            if not _have_equal_bits(self._module, made, tensors):
                raise _NotTraceable("its functions give other bits")
        except Exception as error:  # of torch, for any operator that it cannot trace
            _log.debug("layer %s has no functions (%s: %s)", layer.name, type(error).__name__, error)
            return None
        return made


def _looks(tensor: Tensor) -> object:
    """Return all properties of a parameter, buffer or input on which a trace depends."""
    kind = type(tensor), tensor.dtype, tensor.device, tensor.requires_grad
    return *kind, tuple(tensor.shape), tensor.stride()


def _is_traceable(module: nn.Module) -> bool:
    """Return True for a captured layer without hooks whose parameters are ordinary tensors."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        isinstance(module, CapturedGraph)
        and not any(getattr(part, name) for part in module.modules() for name in hooks)
        and all(type(parameter) is nn.Parameter and not parameter._backward_hooks for parameter in module.parameters())
        and not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())
        and all(type(buffer) is Tensor for buffer in module.buffers())
    )


def _have_equal_bits(module: nn.Module, functions: BoundFunctions, tensors: Sequence[Tensor]) -> bool:
    """Run a layer by autograd and by its functions, with the same random numbers; return True where outputs and all
    gradients are equal to the bit, for a first microbatch and for a second one, those of the outputs afterwards, too:
    others may read these. Gradients that are there stay as they are.
    """
    trained = functions.trained
    sums, state = [parameter.grad for parameter in trained], torch.get_rng_state()
    rows: list[list[Tensor | None]] = []
    try:
        for run in (functools.partial(_by_autograd, module), functools.partial(_by_functions, functions)):
            row: list[Tensor | None] = []
            for parameter in trained:
                parameter.grad = None
            for _ in range(2):
                torch.set_rng_state(state)
                leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
                outputs, differentiate = run(leaves)
                carried = zip(outputs, functions.traced.carries, strict=True)
                gradients = [torch.randn_like(output) if carries else None for output, carries in carried]
                results = differentiate([*gradients])
                row += [*(output.detach() for output in outputs), *gradients, *results]
            rows.append([*row, *(parameter.grad for parameter in trained)])
    finally:
        torch.set_rng_state(state)
        for parameter, gradient in zip(trained, sums, strict=True):
            parameter.grad = gradient
    return all(_is_equal(*pair) for pair in zip(*rows, strict=True))


Backward = Callable[[list[Tensor | None]], list[Tensor | None]]
"""Maps the gradients of a layer's outputs to those of its wanted inputs."""


def _by_autograd(module: nn.Module, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Backward]:
    """Return a module's outputs and its backward by autograd."""
    with torch.enable_grad():
        written = module(*leaves)
    outputs = [written] if isinstance(written, Tensor) else list(written)

    def backward(gradients: list[Tensor | None]) -> list[Tensor | None]:
        ends = [output for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        torch.autograd.backward(ends, [gradient for gradient in gradients if gradient is not None])
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    return outputs, backward


def _by_functions(functions: BoundFunctions, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Backward]:
    """Return a layer's outputs and its backward by its functions."""
    outputs, saved = functions.forward(tensors)
    return outputs, functools.partial(functions.backward, saved)


def _is_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return _has_layout(first, second.stride()) and same_bits(first, second)


def _has_layout(tensor: Tensor, stride: Sequence[int]) -> bool:
    """Return True for a tensor with these strides; strides of dimensions of size 1 do not count, as in autograd."""
    layouts = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return tensor.stride() == stride or all(one == other for size, one, other in layouts if size > 1)


class _NotTraceable(Exception):
    """Raised for a trace that functions cannot be made of."""


# -- the trace, and the two functions


@dataclass
class _Part:
    """Nodes of one function. reads: its first arguments. state: parameters and buffers that it reads. returns: results,
    None for those that do not exist.
    """

    nodes: list[fx.Node]
    reads: list[fx.Node]
    state: list[fx.Node]
    returns: list[fx.Node | None]


@dataclass
class _Traced:
    """Functions of equal layers for one size of their inputs.

    Attributes:
        trained: parameters that get a gradient, by their numbers among parameters and buffers.
        wanted: for each input, whether it gets a gradient. carries: for each output, whether it has one.
        gradient_specs: of the outputs' gradients. input_strides: layout of the wanted inputs.
        draws: whether it draws random numbers.
        forward: inputs -> outputs, then saved tensors. first, later: saved tensors and gradients of the outputs ->
            gradients of the inputs, after those of the parameters (first) or with those added to their sums (later).
        forward_state, backward_state: parameters and buffers that are the functions' last arguments, by number.
        sums: places in `trained` of the parameters whose sums are arguments of later, before those.
    """

    trained: list[int]
    wanted: list[bool]
    carries: list[bool]
    gradient_specs: list[TensorSpec]
    input_strides: list[tuple[int, ...]]
    draws: bool
    forward: Callable[..., list[Any]]
    first: Callable[..., list[Any]]
    later: Callable[..., list[Any]]
    forward_state: list[int]
    backward_state: list[int]
    sums: list[int]

    @classmethod
    def of(cls, module: nn.Module, state: Mapping[str, Tensor], inputs: Sequence[Tensor], operators: str) -> _Traced:
        """Trace a module on fake tensors, since only code that reads no values runs on them. operators: text of the
        graph of a real call, which the trace must have. Raises _NotTraceable, or torch's errors.
        """
        values = list(state.values())
        trained = [
            number for number, value in enumerate(values) if isinstance(value, nn.Parameter) and value.requires_grad
        ]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {name: mode.from_tensor(value) for name, value in state.items()}
            graph, carries = _joint_graph(module, fakes, [mode.from_tensor(tensor) for tensor in inputs])
        if _text_of(graph) != operators:
            raise _NotTraceable("its code runs other operators on tensors without values")
        _check(graph, len(state) + len(inputs))
        _prune(graph)
        draws = any(_draws(node) for node in graph.nodes)
        forward, backward, strides = _split(graph, len(state), len(inputs), len(carries))
        _sum_in_place(backward)
        gradient_specs = [TensorSpec.of(_value(node)) for node in backward.reads[len(backward.reads) - len(strides) :]]
        numbers = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
        first, later, sums = _with_sums(backward, [values[number] for number in trained])
        functions = _code(forward, 0), _code(first, len(first.reads)), _code(later, len(backward.reads))
        forward_state, backward_state = ([numbers[node] for node in part.state] for part in (forward, backward))
        wanted = [tensor.requires_grad for tensor in inputs]
        input_strides = [TensorSpec.of(tensor).stride for tensor in inputs if tensor.requires_grad]
        return cls(
            trained,
            wanted,
            carries,
            gradient_specs,
            input_strides,
            draws,
            *functions,
            forward_state,
            backward_state,
            sums,
        )


class BoundFunctions:
    """Functions of one layer. state: its parameters and buffers."""

    def __init__(self, traced: _Traced, state: Sequence[Tensor], device: torch.device) -> None:
        self.traced, self._device = traced, device
        self.trained = [state[number] for number in traced.trained]
        self._forward_state = [state[number] for number in traced.forward_state]
        self._backward_state = [state[number] for number in traced.backward_state]
        self._summed = [self.trained[place] for place in traced.sums]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Return the outputs and the saved tensors; no output has requires_grad."""
        with torch.no_grad():
            results = self.traced.forward(*tensors, *self._forward_state)
        count = len(self.traced.carries)
        outputs = [output.detach() if output.requires_grad else output for output in results[:count]]
        return outputs, results[count:]

    def backward(self, saved: list[Any], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the wanted inputs, in the layout of these; add those of the parameters to their
        `.grad`, each as soon as it is there. Empties both lists. gradients: of the outputs; None: zeros.
        """
        traced, trained = self.traced, self.trained
        carried = [gradient for gradient, carries in zip(gradients, traced.carries, strict=True) if carries]
        gradients.clear()
        for spec, gradient in zip(traced.gradient_specs, carried, strict=True):
            saved.append(spec.zeros(self._device) if gradient is None else laid_out(gradient, spec.stride))
        del carried, gradient
        with torch.no_grad():
            sums = [parameter.grad for parameter in self._summed]
            if all(total is not None for total in sums):
                results = traced.later(saved, *sums, *self._backward_state)
            else:
                results = traced.first(saved, *self._backward_state)
                for parameter, gradient in zip(trained, results, strict=False):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                del results[: len(trained)]
            return [
                gradient if gradient is None or _has_layout(gradient, stride) else laid_out(gradient, stride)
                for gradient, stride in zip(results, traced.input_strides, strict=True)
            ]


def _joint_graph(
    module: nn.Module, state: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> tuple[fx.Graph, list[bool]]:
    """Run forward and backward; return the graph of all operators, and which outputs have a gradient.

    The graph's arguments are the state, the inputs and the gradients of the outputs that have one; its results are the
    outputs, the gradients of trained parameters, and those of inputs that want one. Nodes hold their values as "val"
    where these are fake tensors.
    """
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    recorder = _Recorder()
    for tensor in (*state.values(), *leaves):
        recorder.keep(tensor, recorder.graph.placeholder("argument"))
    with recorder:
        written = functional_call(module, dict(state), tuple(leaves))
    outputs = [written] if isinstance(written, Tensor) else list(written)
    ends = [output for output in outputs if output.requires_grad]
    gradients = [torch.zeros_like(output) for output in ends]
    for gradient in gradients:
        recorder.keep(gradient, recorder.graph.placeholder("argument"))
    with recorder:
        sources = [tensor for tensor in (*state.values(), *leaves) if tensor.requires_grad]
        results = torch.autograd.grad(ends, sources, gradients, allow_unused=True)
    recorder.graph.output([None if tensor is None else recorder.node(tensor) for tensor in (*outputs, *results)])
    return recorder.graph, [output.requires_grad for output in outputs]


class _Recorder(TorchDispatchMode):
    """Mode that adds a node to `graph` for each operator that is called and returns or changes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes = WeakTensorKeyDictionary()

    def keep(self, value: Tensor, node: fx.Node) -> None:
        """Record that a node makes this tensor."""
        self._nodes[value] = node
        if isinstance(value, FakeTensor):
            node.meta["val"] = value

    def node(self, value: Tensor) -> fx.Node:
        """Return the node that made a tensor. Raises _NotTraceable for a constant of the code."""
        node: fx.Node | None = self._nodes.get(value)
        if node is None:
            raise _NotTraceable("it has a tensor that is neither a parameter nor a buffer")
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = pytree.tree_map_only(Tensor, self.node, (args, kwargs or {}))
        if torch.Tag.inplace_view in func.tags and "val" in arguments[0][0].meta:
            arguments[0][0].meta["val"] = args[0].detach()  # as it is before the change
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.keep(result, self.graph.call_function(func, *arguments))
        elif isinstance(result, (tuple, list)) or func._schema.is_mutable:
            node = self.graph.call_function(func, *arguments)
            for place, part in enumerate(result or ()):
                if isinstance(part, Tensor):
                    self.keep(part, self.graph.call_function(operator.getitem, (node, place)))
        return result


def _text_of(graph: fx.Graph) -> str:
    """Return a graph's operators with all arguments as text, alike for equal graphs only."""
    rows = ((node.name, node.target, _text(node.args), _text([*node.kwargs.items()])) for node in graph.nodes)
    return "\n".join(" ".join(map(str, row)) for row in rows)


def _check(graph: fx.Graph, count: int) -> None:
    """Raise _NotTraceable for calls other than torch's operators, and for a graph that changes one of its first `count`
    arguments.
    """
    arguments = graph.find_nodes(op="placeholder")[:count]
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _NotTraceable(f"it calls {node.target}")
        if _is_mutable(node) and _root(node.args[0]) in arguments:
            raise _NotTraceable(f"{node.target} changes an argument")


def _root(node: Any) -> Any:
    """Return the node whose memory a node looks at, through views and changes in place."""
    while isinstance(node, fx.Node) and node.op == "call_function" and (_is_view(node) or _is_mutable(node)):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    """Return True for a call that computes nothing: its results are views of its first argument."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return _is_view(source)
    return node.target is _aten._unsafe_view.default or is_view(node.target)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _prune(graph: fx.Graph) -> None:
    """Leave out operators that return the same tensor, views of views, and transposes of transposes."""
    for node in graph.nodes:
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
        elif node.target is _aten.t.default and node.args[0].target is _aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is _aten.view.default:
            _shorten(node)
    graph.eliminate_dead_code(is_impure_node=_has_effect)


def _shorten(view: fx.Node) -> None:
    """Let a view look at the tensor behind other views of contiguous memory; leave it out where it changes nothing."""
    source: Any = view.args[0]
    while source.target in (_aten.view.default, _aten._unsafe_view.default) and _value(source.args[0]).is_contiguous():
        source = source.args[0]
    if _value(source).shape == _value(view).shape and _value(source).stride() == _value(view).stride():
        view.replace_all_uses_with(source)
    else:
        view.args = (source, view.args[1])


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _has_effect(node: fx.Node) -> bool:
    """Return True for arguments and results, and operators that change a tensor or draw random numbers."""
    return node.op in ("placeholder", "output") or _draws(node) or _is_mutable(node)


def _draws(node: fx.Node) -> bool:
    """Return True for an operator that draws random numbers."""
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _split(
    graph: fx.Graph, num_state: int, num_inputs: int, num_outputs: int
) -> tuple[_Part, _Part, list[tuple[int, ...]]]:
    """Return forward, backward and the layouts of gradients. A view that only the backward needs is made there."""
    arguments = graph.find_nodes(op="placeholder")
    state, inputs = arguments[:num_state], arguments[num_state:][:num_inputs]
    gradients = arguments[num_state + num_inputs :]
    returned: Any = graph.output_node().args[0]
    results: list[Any] = list(returned)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    behind = set(gradients)
    for node in calls:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    before = [node for node in calls if node not in behind]
    needed = _sources([*results[:num_outputs], *(node for node in before if not _is_view(node))])
    first = [node for node in before if node in needed]
    done = {*first, *state}
    second = [node for node in calls if node not in done]
    there = {*second, *state, *gradients}
    saved = dict.fromkeys(node for call in second for node in call.all_input_nodes if node not in there)
    forward = _Part(first, inputs, _read_by(first, state), [*results[:num_outputs], *saved])
    backward = _Part(second, [*saved, *gradients], _read_by(second, state), results[num_outputs:])
    return forward, backward, [_value(node).stride() for node in gradients]


def _sum_in_place(part: _Part) -> None:
    """Add to the first of two gradients in place where nothing else reads it, as autograd does."""
    for node in part.nodes:
        total: Any = node.args[0] if node.target is _aten.add.Tensor and not node.kwargs else None
        if total not in part.nodes or len(total.users) > 1 or _root(total) is not total:
            continue
        before, after = _value(total), _value(node)
        if (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype):
            node.target = _aten.add_.Tensor


def _sources(ends: Iterable[Any]) -> set[fx.Node]:
    """Return the nodes from which these are computed, with themselves."""
    reached, stack = set[fx.Node](), [node for node in ends if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    return reached


def _read_by(calls: Collection[fx.Node], state: Sequence[fx.Node]) -> list[fx.Node]:
    readers = set(calls)
    return [node for node in state if not readers.isdisjoint(node.users)]


def _with_sums(part: _Part, trained: Sequence[Tensor]) -> tuple[_Part, _Part, list[int]]:
    """Return the backward of the first microbatch, that of later ones, and the numbers of the trained parameters to
    whose sums the later ones add, each as soon as its gradient is there.

    The first one returns gradients that nothing else holds, in the layout of their parameters, as autograd keeps them.
    """
    of_parameters, of_inputs = part.returns[: len(trained)], part.returns[len(trained) :]
    roots = [_root(node) for node in part.returns]
    first, later = list(part.nodes), list(part.nodes)
    returned: list[fx.Node | None] = []
    totals: dict[int, fx.Node] = {}
    for number, (node, root, parameter) in enumerate(zip(of_parameters, roots, trained, strict=False)):
        if node is None:
            returned.append(None)
            continue
        graph, value = node.graph, _value(node)
        owned = root in part.nodes and roots.count(root) == 1 and value.stride() == parameter.stride()
        if owned:
            returned.append(node)
        else:
            sizes = list(parameter.shape), list(parameter.stride())
            empty = _insert(graph, node, _aten.new_empty_strided.default, (node, *sizes), value)
            filled = _insert(graph, empty, _aten.copy_.default, (empty, node), value)
            _place_after(first, node, [empty, filled])
            returned.append(filled)
        with graph.inserting_before(next(iter(graph.nodes))):
            total = graph.placeholder(f"sum_{number}")
        total.meta["val"] = value
        _place_after(later, node, [_insert(graph, node, _aten.add_.Tensor, (total, node), value)])
        totals[number] = total
    return (
        _Part(first, part.reads, part.state, [*returned, *of_inputs]),
        _Part(later, [*part.reads, *totals.values()], part.state, of_inputs),
        list(totals),
    )


def _insert(graph: fx.Graph, place: fx.Node, target: Any, arguments: tuple[Any, ...], value: Tensor) -> fx.Node:
    with graph.inserting_after(place):
        node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def _place_after(nodes: list[fx.Node], place: fx.Node, more: Sequence[fx.Node]) -> None:
    position = nodes.index(place) + 1 if place in nodes else 0
    nodes[position:position] = more


# -- the code of a function


def _code(part: _Part, taken: int) -> Callable[..., list[Any]]:
    """Return a part as Python code. Its first `taken` arguments come in a list, which it empties, so that each is freed
    after its last use; `taken` 0: there is no list.

    It calls torch's own functions and methods, such as `torch.mm(a, b)` and `a.view([2, 3])`, where these call exactly
    the operator, since that takes half the time of a call by name.
    """
    scope: dict[str, Any] = {"torch": torch}
    last = {source: node for node in part.nodes for source in node.all_input_nodes}
    stays = {*part.state, *part.returns}
    lines = [f"{_text(node)} = saved.pop()" for node in reversed(part.reads[:taken])]
    for node in part.nodes:
        read = [source for source in dict.fromkeys(node.all_input_nodes) if last[source] is node]
        dropped = [source for source in (*read, node) if source not in stays and last.get(source, node) is node]
        freed = "".join(f"; {_text(source)} = None" for source in dropped)
        lines.append(f"{_text(node)} = {_call(node, scope)}{freed}")
    names = [_text(node) for node in (*part.reads[taken:], *part.state)]
    head = f"def function({', '.join(['saved', *names] if taken else names)}):"
    exec("\n    ".join([head, *lines, f"return {_text(part.returns)}"]), scope)
    function: Callable[..., list[Any]] = scope["function"]
    return function


def _call(node: fx.Node, scope: dict[str, Any]) -> str:
    """Return the text of a node's call; adds what it names to `scope`."""
    if node.target is operator.getitem:
        return f"{_text(node.args[0])}[{node.args[1]}]"
    named = [f"{key}={_text(argument)}" for key, argument in node.kwargs.items()]
    arguments = [_text(argument) for argument in node.args] + named
    if "binding" not in node.meta:  # both backwards have the same nodes
        node.meta["binding"] = _binding(node)
    name: str | None = node.meta["binding"]
    if name is None:
        target: Any = node.target
        name = f"{target._opname}_{target._overloadname}"
        scope[name] = target._op
    elif name.startswith("."):
        return f"{arguments[0]}{name}({', '.join(arguments[1:])})"
    return f"{name}({', '.join(arguments)})"


def _text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"{argument.name}_"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_text(element) for element in argument)}]"
    if isinstance(argument, torch.device):
        return f'torch.device("{argument}")'
    if isinstance(argument, float) and not -float("inf") < argument < float("inf"):
        return f'float("{argument}")'
    return str(argument) if isinstance(argument, (torch.dtype, torch.memory_format, torch.layout)) else repr(argument)


def _binding(node: fx.Node) -> str | None:
    """Return the name of a method or function of torch that calls exactly this operator: `.view`, `torch.mm`."""
    target: Any = node.target
    values = fx.map_arg(node.args, _value)
    named = fx.map_arg(node.kwargs, _value)
    found: dict[str, Any] = {}
    if values and isinstance(values[0], Tensor) and target._schema.arguments[0].name == "self":
        found[f".{target._opname}"] = getattr(Tensor, target._opname, None)
    for name, holder in (("torch", torch), ("torch._C._nn", torch._C._nn)):
        found[f"{name}.{target._opname}"] = getattr(holder, target._opname, None)
    modes = {source.meta["val"].fake_mode for source in node.all_input_nodes}
    for name, function in found.items():
        if function is None:
            continue
        seen = _SeenCalls()
        with torch.no_grad(), contextlib.ExitStack() as stack, contextlib.suppress(TypeError, RuntimeError):
            for mode in (*modes, seen):
                stack.enter_context(mode)
            function(*values, **named)
        if seen.calls == [(target, _all_arguments(target, values, named))]:
            return name
    return None


class _SeenCalls(TorchDispatchMode):
    """Mode that keeps the operators that are called, each with all its arguments, tensors by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.calls.append((func, _all_arguments(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _all_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all arguments of a call, defaults among them, with the identities of tensors."""
    schema = target._schema.arguments
    by_name = dict(zip([argument.name for argument in schema], args, strict=False)) | dict(kwargs)
    values = [by_name.get(argument.name, argument.default_value) for argument in schema]
    return [pytree.tree_map_only(Tensor, id, list(value) if isinstance(value, tuple) else value) for value in values]
