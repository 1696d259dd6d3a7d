"""Turns calls that must stay Python into single operations of an exported graph, with their real backward.

torch's export follows the forward of an autograd Function, and loses its backward and the hooks that code gives a
tensor; and it makes constants of Python's random decisions. Here the export does not follow calls of Functions, hooks,
and calls of chosen modules: each is an operation of our own in the graph, which later becomes a module that makes the
call (`python_calls`).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.python_calls import CallShape, FunctionCall, Hooked, PythonCall, Whole
from varuna_capslog.model.known_values import KnownValues

__all__ = ["Calls", "MadeCall", "NeedsPython", "OpaqueCalls", "put_in_calls"]


# -- Captures models that ask whether a tensor is finite, as Hugging Face's DETR family does in training.
#
# `if not torch.isfinite(x).all(): x = torch.clamp(x, ...)` is a branch on values, which a graph cannot hold. `export`
# captures such a model on the path of finite values. Any other branch on values is refused.


_ANSWERS = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
"""Function that tests values -> its result for finite values."""
_PRESERVING = ("all", "any", "logical_or", "logical_and", "__or__", "__and__")
"""Operations that keep the result of a test, if it is the same for all tensors that they read."""
_READERS = ("__bool__", "item")


class FiniteValues(TorchFunctionMode):
    """Mode in which code that tests whether values are finite finds that they are.

    The engine refuses a step whose loss or gradients are not finite, so a model that would have clamped an infinite
    value gets this refusal.
    """

    def __init__(self) -> None:
        super().__init__()
        # also holds the tensors, so that no other tensor gets an id
        self._known: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READERS and (answered := self._known.get(id(args[0]))) is not None:
            return answered[1]
        result = func(*args, **(kwargs or {}))
        answer = _ANSWERS.get(name)
        if answer is None and name in _PRESERVING:
            answers = {
                self._known.get(id(argument), (None, None))[1] for argument in args if isinstance(argument, Tensor)
            }
            answer = answers.pop() if len(answers) == 1 else None
        if answer is not None and isinstance(result, Tensor):
            self._known[id(result)] = result, answer
        return result


# -- calls that must stay Python, as single operations of an exported graph


_LIBRARY = torch.library.Library("capslog", "DEF")
_LIBRARY.define("python_call(Tensor[] given, str made, int number) -> Tensor[]")
_LIBRARY.define("hooked(Tensor x, int number) -> ()")
_LIBRARY.impl("hooked", lambda x, number: None, "CompositeExplicitAutograd")


def _made(given: list[Tensor], made: str, number: int) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype, device in json.loads(made)
    ]


torch.library.register_fake("capslog::python_call", _made, lib=_LIBRARY)
_CALL = torch.ops.capslog.python_call.default
_HOOKED = torch.ops.capslog.hooked.default


class NeedsPython(CapslogError):
    """Raised where a module's code does what no graph can do; the text says what, without the module."""


class MadeCall(NamedTuple):
    """Call of Python code that was made once.

    changes: True if it writes into a tensor among its arguments.
    beyond: other effects on its caller, for which a graph has no operation; None: no effects.
    """

    call: PythonCall
    changes: bool
    beyond: str | None


Calls = Sequence["MadeCall | Hooked"]
"""Calls that our operations in an exported graph replace, by number."""


class OpaqueCalls(FiniteValues):
    """Mode for an export of the model's code or, with `records`, for a plain run.

    Args:
        modules: the modules that are kept whole, by qualified name.
        made: calls of these modules in a plain run, in order, which the export does not make again.
        records: record the calls of `modules` in `made` instead.

    Attributes:
        calls: the call that each operation of ours replaces, by its number.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        made: Mapping[str, list[MadeCall]] | None = None,
        records: bool = False,
    ) -> None:
        super().__init__()
        self._whole, self._records = dict(modules), records
        self.made: dict[str, list[MadeCall]] = {path: list(rows) for path, rows in (made or {}).items()}
        self.calls: list[MadeCall | Hooked] = []
        self._hooks: dict[str, dict[str, Any]] = {}
        self._busy = False
        self._values: KnownValues | None = None

    @property
    def keeps_modules(self) -> bool:
        """True where some modules are kept whole."""
        return bool(self._whole)

    @contextlib.contextmanager
    def open(self, values: KnownValues | None = None) -> Iterator[None]:
        """Open the mode for the code that this thread runs. values: open, too; calls that read some keep them."""
        self._values = values
        kinds = [(kind, vars(kind).get("forward"), kind.forward) for kind in _functions()]
        old: Any = CheckpointFunction
        try:
            old.apply = self._checkpointed(old.apply)
            for kind, _, forward in kinds:
                kind.forward = staticmethod(self._function(kind, forward))
            for path, module in self._whole.items():
                self._hooks[path] = {name: vars(module)[name] for name in _HOOKS}
                self._stand_in(path)
            with self, _seeded():
                yield
        finally:
            del old.apply
            for kind, own_forward, _ in kinds:
                if own_forward is None:
                    del kind.forward
                else:
                    kind.forward = own_forward
            for path in self._hooks:
                self._step_back(path)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _WATCHED and self._follows():
            if func is not Tensor.register_hook:
                raise NeedsPython("it differentiates in its forward (torch.autograd)")
            self._hook(*args, **(kwargs or {}))
        if torch.default_generator.initial_seed() != _UNLIKELY_SEED and self._follows():
            raise NeedsPython(f"its code {_SEEDS}")
        return super().__torch_function__(func, types, args, kwargs)

    def _follows(self) -> bool:
        """True where the code that runs now is being exported."""
        key = torch._C._TorchDispatchModeKey.PROXY
        return not self._busy and _get_dispatch_mode_pre_dispatch(key) is not None

    # -- modules -------------------------------------------------------------------------------------------------------

    def _stand_in(self, path: str) -> None:
        module = self._whole[path]
        for name in _HOOKS:  # the hooks run inside the call
            hooks = self._hooks[path][name]
            vars(module)[name] = type(hooks)() if hooks is not None else None
        vars(module)["forward"] = functools.update_wrapper(functools.partial(self._called, path), module.forward)

    def _step_back(self, path: str) -> None:
        vars(self._whole[path]).pop("forward", None)
        vars(self._whole[path]).update(self._hooks[path])

    def _called(self, path: str, *args: Any, **kwargs: Any) -> Any:
        module, rows = self._whole[path], self.made.setdefault(path, [])
        watching = {name: vars(module)[name] for name in _HOOKS}

        def plain() -> Any:
            self._step_back(path)
            try:
                return module(*args, **kwargs)
            finally:
                self._stand_in(path)
                vars(module).update(watching)

        values = self._values if self._records and not self._busy else None
        of_arguments = values.of((args, kwargs)) if values else ()
        if values:
            values.used = False

        def call_of(result: Any) -> PythonCall:
            read = of_arguments if values and values.used else ()
            return Whole(module, path, CallShape.of((args, kwargs), result, read))

        if self._follows():
            made = rows.pop(0) if rows else self._make((args, kwargs), plain, call_of)[0]
            if made.beyond:
                raise NeedsPython(f"it calls {path!r}, which stays Python and {made.beyond}")
            return self._put(made, (args, kwargs))
        if not self._records or self._busy:
            return plain()
        made, result = self._make((args, kwargs), plain, call_of)
        rows.append(made)
        return result

    # -- autograd Functions --------------------------------------------------------------------------------------------

    def _function(self, kind: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 0 if _sets_context(kind) else 1

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._follows():
                return forward(*args, **kwargs)
            arguments, run = (args[skipped:], kwargs), functools.partial(forward, *args, **kwargs)
            made, _ = self._make(arguments, run, lambda result: FunctionCall(kind, CallShape.of(arguments, result)))
            return self._put(made, arguments)

        return called

    def _checkpointed(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Let an export follow code under torch's old checkpointing (`use_reentrant=True`), which would be traced
        without gradients. The run, not the graph, decides what is recomputed.
        """

        def called(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return run(*args) if self._follows() else apply(run, preserve, *args)

        return called

    # -- calls of modules and Functions --------------------------------------------------------------------------------

    def _make(
        self, arguments: Any, run: Callable[[], Any], call_of: Callable[[Any], PythonCall]
    ) -> tuple[MadeCall, Any]:
        """Make a call that an export does not follow; return the call and its result."""
        tensors, (leaves, spec) = _tensors(arguments), pytree.tree_flatten(arguments)
        versions = [tensor._version for tensor in tensors]
        exports, self._busy = self._follows(), True
        try:
            with _unfollowed() if exports else contextlib.nullcontext():
                result = run()
        finally:
            self._busy = False
        changes = any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True))
        after, new_spec = pytree.tree_flatten(arguments)
        beyond = None
        if spec != new_spec or any(leaf is not old for leaf, old in zip(after, leaves, strict=True)):
            beyond = "writes into a list or dict of its caller"
        elif torch.default_generator.initial_seed() != _UNLIKELY_SEED:
            beyond = _SEEDS
        return MadeCall(call_of(result), changes, beyond), result

    def _put(self, made: MadeCall, arguments: Any) -> Any:
        """Put a call into the graph; return its result, with tensors that the graph knows."""
        tensors = _tensors(arguments)
        self.calls.append(made)
        shapes = json.dumps(
            [(tensor.shape, tensor.stride, _name_of(tensor.dtype), tensor.device) for tensor in made.call.shape.tensors]
        )
        results = torch.ops.capslog.python_call(tensors, shapes, len(self.calls) - 1)
        return made.call.shape.rebuilt(results)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _hook(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        if x.is_leaf:
            raise NeedsPython("it gives a parameter or an input a hook in its forward")
        if any(isinstance(value, Tensor) for value in _kept_by(hook)):
            raise NeedsPython("it gives a tensor a hook that uses another tensor of the forward")
        self.calls.append(Hooked(hook))
        torch.ops.capslog.hooked(x, len(self.calls) - 1)


_HOOKS = (
    *(name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)
"""Attributes of a module that hold its hooks."""
_WATCHED = (Tensor.register_hook, Tensor.backward, torch.autograd.grad, torch.autograd.backward)


def _functions() -> list[Any]:
    """Return all autograd Functions except torch's own."""
    functions: list[Any] = []
    waiting = list(torch.autograd.Function.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.partition(".")[0] != "torch" and kind not in functions:
            functions.append(kind)
    return functions


def _sets_context(kind: Any) -> bool:
    """True where a Function's forward takes no context, since `setup_context` sets it."""
    return kind.setup_context is not torch.autograd.Function.setup_context


_UNLIKELY_SEED = 0x5EED0F0CA957106
_SEEDS = "seeds torch's generator (torch.manual_seed)"


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Give torch's generator a seed that no code gives it, so that code that seeds it is noticed."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(_UNLIKELY_SEED)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@contextlib.contextmanager
def _unfollowed() -> Iterator[None]:
    """Run operators on the tensors of an export without adding them to its graph."""
    core = torch._C
    included = core._dispatch_tls_local_include_set().remove(core.DispatchKey.PreDispatch)
    excluded = core._dispatch_tls_local_exclude_set() | core.DispatchKeySet(core.DispatchKey.PreDispatch)
    with core._ForceDispatchKeyGuard(included, excluded), core.DisableTorchFunction():
        yield


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _kept_by(hook: Any) -> Iterator[Any]:
    """Yield the values that a function holds: bound arguments, defaults and closure variables."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values(), *_kept_by(hook.func))
    yield from getattr(hook, "__defaults__", None) or ()
    for cell in getattr(hook, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield from pytree.tree_leaves(cell.cell_contents)


def put_in_calls(graph: fx.Graph, calls: Calls, extra: dict[str, Any]) -> dict[fx.Node, fx.Node]:
    """Replace our operations in an exported graph by modules, which are added to `extra` by attribute name. Return old
    node -> the node that replaces it. calls: `OpaqueCalls.calls`.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.nodes)):  # so that a tensor's first hook gets the gradient first
        if node.target not in (_CALL, _HOOKED):
            continue
        number = node.args[-1]
        call = calls[number]
        source: Any = node.args[0]
        if isinstance(call, Hooked):
            extra[f"hook_{number}"] = call
            with graph.inserting_after(source):
                new = graph.call_module(f"hook_{number}", (source,))
            new.meta = {"val": source.meta.get("val"), "nn_module_stack": node.meta.get("nn_module_stack")}
            source.replace_all_uses_with(new, delete_user_cb=functools.partial(_is_another, new))
            replaced[source] = replaced.get(source, new)
        else:
            extra[f"python_{number}"] = call.call
            with graph.inserting_before(node):
                new = graph.call_module(f"python_{number}", tuple(source))
            new.meta = {key: node.meta.get(key) for key in ("val", "nn_module_stack")}
            new.meta["mutates"] = call.changes
            for result_place, argument_place in call.call.shape.passed:  # both share memory
                for user in node.users:
                    if user.args[1] == result_place:
                        user.meta["val"] = source[argument_place].meta.get("val")
            node.replace_all_uses_with(new)
        graph.erase_node(node)
    return replaced


def _is_another(node: fx.Node, user: fx.Node) -> bool:
    return user is not node
