"""Calls a model once on its example, and keeps the large tensors of such a step in memory or on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.machine_memory import available_bytes
from varuna_capslog.base.units import format_bytes
from varuna_capslog.model.capture.opaque import OpaqueCalls
from varuna_capslog.model.hollow import ReadNumbers, on_host, unlogged
from varuna_capslog.model.known_values import KnownValues
from varuna_capslog.model.layer import dense_gradient
from varuna_capslog.model.python_state import PythonState, RandomStates, StateChange

__all__ = [
    "KeptTensor",
    "MemoryGuard",
    "NoRoom",
    "StepMemory",
    "Watch",
    "has_weights",
    "lacks_memory",
    "same_bits",
    "try_model",
    "untouched",
    "with_room",
]


# -- Keeps the large tensors of a model's step while it is tried or compared: in memory or, if they do not fit there,
#    in files, each of which is removed with its tensor.
#
# Weights, one operator and its tensors have to fit. This is checked before each operator that may be large, so that
# the system never kills the process for lack of memory; `comparison` and `trial` report what was not done.


KeptTensor = Callable[[], Tensor]
"""Function that returns a kept tensor; a tensor in a file is read again in each call."""
_Answer = TypeVar("_Answer")

_SPARE = 8
"""Divisor of the free memory: an eighth stays free, for memory that operators take in addition to their results."""
_SPARE_DISK = 1 << 28
_SMALL = 1 << 14
"""Bytes below which a tensor stays in memory."""
_BLOWN_UP = 1 << 10
"""Factor by which an operator's result may exceed its operands before memory is checked."""

_WIDEST = 16
"""Bytes of the widest number, a complex one."""


def _in_memory(tensor: Tensor) -> KeptTensor:
    return lambda: tensor


class NoRoom(BaseException):
    """Raised where a step does not fit, with the reason. No Exception, so that no code of the model catches it."""


def lacks_memory(error: BaseException) -> bool:
    """True where an error means that memory is lacking."""
    texts = ("Cannot allocate memory", "can't allocate memory", "bad_alloc")
    named = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return named or isinstance(error, (NoRoom, MemoryError, torch.OutOfMemoryError))


def with_room(model: nn.Module, run: Callable[[StepMemory], _Answer]) -> _Answer:
    """Return the result of `run`, with all tensors in memory, else with large ones in files, else raise NoRoom."""
    memory = StepMemory(model)
    if memory.holds_weights():
        try:
            return run(memory)
        except BaseException as error:
            if not lacks_memory(error):
                raise
        gc.collect()  # frees the step's tensors
        _give_back_freed()
    with tempfile.TemporaryDirectory(prefix="capslog-step-", dir=_folder_on_disk()) as folder:
        memory = StepMemory(model, Path(folder))
        try:
            return run(memory)
        except BaseException as error:
            if "saved tensor hooks" in str(error):
                reason = "it does not fit into memory, and torch puts no tensors on disk for torch.func in its forward"
            elif lacks_memory(error):
                reason = str(error) if isinstance(error, NoRoom) else memory.shortage()
            else:
                raise
        raise NoRoom(reason)


class StepMemory:
    """Keeps the tensors of a step. folder: for files of large tensors; None: all tensors stay in memory."""

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self._model, self.folder = model, folder
        self._spare = available_bytes() // _SPARE
        self._numbers = itertools.count()

    def holds_weights(self) -> bool:
        """True where a copy of the weights and the gradients of two steps fit into memory, without other tensors."""
        weights = [parameter for parameter in self._model.parameters() if parameter.device.type == "cpu"]
        return sum(_size(weight) * (3 if weight.requires_grad else 1) for weight in weights) <= self.room()

    def room(self) -> int:
        """Return the bytes that a step may still take."""
        return available_bytes() - self._spare

    def shortage(self) -> str:
        """Return the reason why a step does not fit even with files."""
        return (
            f"its weights and its largest operator do not fit into the memory that is free "
            f"({format_bytes(available_bytes())} now), although its other large tensors were put on disk"
        )

    def keep(self, tensor: Tensor, changes: bool = False) -> KeptTensor:
        """Keep a tensor with its present values. changes: True: code may change the values later."""
        if self.folder is None or not _is_plain(tensor) or _size(tensor) < _SMALL:
            return _in_memory(tensor.clone() if changes else tensor)
        return _InFile(self.folder / str(next(self._numbers)), tensor)

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context that keeps the tensors that autograd saves for a backward, except parameters and buffers."""
        if self.folder is None:
            return contextlib.nullcontext()
        weights = [tensor for tensor in (*self._model.parameters(), *self._model.buffers()) if _is_plain(tensor)]
        held = {weight.untyped_storage()._cdata for weight in weights}

        def pack(tensor: Tensor) -> tuple[KeptTensor, Tensor, int]:
            if not _is_plain(tensor) or tensor.untyped_storage()._cdata in held:
                return _in_memory(tensor), tensor, tensor._version
            kept, counter = self.keep(tensor), tensor.detach()
            if isinstance(kept, _InFile):
                counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # its version is the tensor's
            return kept, counter, tensor._version

        def unpack(packed: tuple[KeptTensor, Tensor, int]) -> Tensor:
            kept, counter, version = packed
            if counter._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation"
                )
            return kept()

        return saved_tensors_hooks(pack, unpack)

    def gradients(
        self,
        tensors: Sequence[Tensor],
        directions: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        full_backward: bool,
    ) -> dict[str, KeptTensor | None]:
        """Return a step's gradients by the parameters' names; with files, each is written as soon as it is computed.

        tensors, directions: the outputs of the step, and their gradients.
        full_backward: compute the whole backward, not only the one for the parameters.
        """
        if self.folder is not None:
            return self._gradients_in_files(tensors, directions, parameters, full_backward)
        wanted = list(parameters.values())
        if full_backward:
            torch.autograd.backward(tensors, directions)
            made: list[Tensor | None] = [None] * len(wanted)
        else:
            made = [*torch.autograd.grad(tensors, wanted, directions, allow_unused=True)]
        gradients: dict[str, KeptTensor | None] = {}
        for (name, parameter), first in zip(parameters.items(), made, strict=True):
            # parts of a whole backward, or of a backward inside the model's code, as in reversible blocks
            parts = [dense_gradient(part) for part in (first, parameter.grad) if part is not None]
            gradients[name] = _in_memory(functools.reduce(torch.add, parts)) if parts else None
        return gradients

    def _gradients_in_files(
        self,
        tensors: Sequence[Tensor],
        directions: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        full_backward: bool,
    ) -> dict[str, KeptTensor | None]:
        """Do as `gradients`, with files; the user's post-accumulate hooks on parameters do not run."""
        parts: dict[str, list[KeptTensor]] = {name: [] for name in parameters}
        silent = [
            (hooks, dict(hooks))
            for parameter in parameters.values()
            if (hooks := parameter._post_accumulate_grad_hooks)
        ]

        def take(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            parts[name].append(self.keep(dense_gradient(parameter.grad)))
            parameter.grad = None

        for name, parameter in parameters.items():
            if parameter.grad is not None:  # from a backward inside the model's forward
                take(name, parameter)
        for hooks, _ in silent:
            hooks.clear()
        takes = [(parameter, functools.partial(take, name)) for name, parameter in parameters.items()]
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in takes]
        try:
            torch.autograd.backward(tensors, directions, inputs=None if full_backward else list(parameters.values()))
        finally:
            for handle in handles:
                handle.remove()
            for hooks, before in silent:
                hooks.update(before)
        return {
            name: functools.partial(_sum, gradient_parts) if gradient_parts else None
            for name, gradient_parts in parts.items()
        }


def _sum(parts: Sequence[KeptTensor]) -> Tensor:
    return functools.reduce(torch.add, (part() for part in parts))


class _InFile:
    """Tensor in a file, which is removed with this object."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if _span(tensor) > tensor.numel():
            tensor = tensor.clone()  # a slice of a few columns, say
        self._path, self._span = path, _span(tensor)
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        size, free = self._span * tensor.itemsize, shutil.disk_usage(path.parent).free
        if size > free - _SPARE_DISK:
            raise NoRoom(f"the {format_bytes(free)} free in {path.parent.parent} do not hold its large tensors")
        try:
            tensor.as_strided((self._span,), (1,)).cpu().view(torch.uint8).numpy().tofile(path)
        except OSError as error:
            raise NoRoom(f"its large tensors cannot be written to {path.parent.parent} ({error})") from error

    def __call__(self) -> Tensor:
        flat = torch.from_file(str(self._path), size=self._span, dtype=self._dtype)
        return flat.as_strided(self._shape, self._strides).to(self._device)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self._path.unlink()


class MemoryGuard(TorchDispatchMode):
    """Mode in which a step ends with NoRoom before an operator for which there is no memory."""

    def __init__(self, memory: StepMemory) -> None:
        super().__init__()
        self._memory, self._room, self._made = memory, memory.room(), 0
        self._fake: FakeTensorMode | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (_size(args) * _BLOWN_UP or _bytes_from_numbers(args)) > self._room:
            self._foresee(func, args, kwargs)
        made = func(*args, **kwargs)
        self._made += _size(made)
        if self._made > self._room // 2:
            self._look(0)
        return made

    def _foresee(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run an operator on tensors without values, for the bytes of its result."""
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return
        if self._fake is None:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)  # making it takes a millisecond
        try:
            args, kwargs = pytree.tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs))  # real ones would run
            with self._fake:
                size = _size(func(*args, **kwargs))
        except Exception:  # it reads values, or has no fake implementation
            return
        if size > self._room - self._made:
            self._look(size)

    def _look(self, size: int) -> None:
        self._room, self._made = self._memory.room(), 0
        if self._room < size:
            _give_back_freed()
            self._room = self._memory.room()
        if self._room < size:
            raise NoRoom(self._memory.shortage())


def _give_back_freed() -> None:
    """Make the C library return freed memory to the system; libraries other than GNU's keep little."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of those in a list or tuple."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.itemsize
    return sum(map(_size, tensors)) if isinstance(tensors, (list, tuple)) else 0


def _bytes_from_numbers(args: Any) -> int:
    """Return the most bytes of a tensor that an operator may make from number arguments alone, such as sizes."""
    numbers = [
        math.prod(argument) if isinstance(argument, (list, tuple)) else argument**2
        for argument in args
        if _is_number(argument)
    ]
    return _WIDEST * max(numbers, default=0)


def _is_number(argument: Any) -> bool:
    return all(isinstance(number, int) for number in (argument if isinstance(argument, (list, tuple)) else (argument,)))


def _span(tensor: Tensor) -> int:
    """Return the number of elements in memory from a tensor's first to its last element."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_plain(tensor: Tensor) -> bool:
    """True for a strided tensor or parameter with values, of no other subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _folder_on_disk() -> str:
    """Return the folder for temporary files, or /var/tmp where that folder lies in memory. Raises NoRoom."""
    folders = [tempfile.gettempdir(), "/var/tmp"]
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK) and _file_system(os.path.realpath(folder)) not in ("tmpfs", "ramfs"):
            return folder
    raise NoRoom(f"its large tensors have no place on a disk: {' and '.join(folders)} lie in memory; set TMPDIR")


def _file_system(folder: str) -> str:
    """Return the kind of the file system that a folder lies in; empty where it is unknown."""
    with contextlib.suppress(OSError):
        mounts: Iterator[Sequence[str]] = (
            line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()
        )
        above = [(mount[1], mount[2]) for mount in mounts if f"{folder}/".startswith(f"{mount[1].rstrip('/')}/")]
        return max(reversed(above), key=lambda mount: len(mount[0]), default=("", ""))[1]
    return ""


# -- Calls a model once on its example.
#
# Where the model's weights have values, it is a real call; a model without memory for its weights is called on
# tensors without values.


def has_weights(model: nn.Module) -> bool:
    """True where all parameters and buffers of a model have values."""
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def untouched(model: nn.Module, memory: StepMemory) -> Iterator[dict[str, KeptTensor]]:
    """Restore parameters, buffers and random states at the end. Yields the parameters' initial values by name."""
    values = {
        name: memory.keep(parameter.detach(), changes=True)
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }
    kept = [(buffer, memory.keep(buffer.detach(), changes=True)) for buffer in model.buffers() if not buffer.is_meta]
    devices = {torch.device("cpu"), *(tensor.device for tensor in model.parameters() if not tensor.is_meta)}
    states = {device: accelerator.random_state(device) for device in devices}
    try:
        yield values
    finally:
        for device, state in states.items():
            accelerator.set_random_state(device, state)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value())
            for name, value in values.items():
                parameter, before = model.get_parameter(name), value()
                if not same_bits(parameter, before):
                    parameter.data.copy_(before)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """True where two tensors hold equal numbers; NaN equals NaN."""
    return torch.equal(first.detach(), second) or bool(
        torch.isclose(first.detach(), second, 0.0, 0.0, equal_nan=True).all()
    )


def try_model(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], calls: OpaqueCalls
) -> tuple[Watch, Any]:
    """Call the model; return the observations, and the model's result. `calls` records the calls of its modules.

    A model without weights whose code does not run without values is called again with those that derive from its
    inputs alone.

    Raises CapslogError where its weights and one operator do not fit into memory.
    """
    if not has_weights(model):
        try:
            return _try(model, arguments, keywords, calls, StepMemory(model))
        except Exception as error:
            calls.made.clear()
            with contextlib.suppress(Exception):
                return _try(model, arguments, keywords, calls, StepMemory(model), keeps_values=True)
            raise error
    try:
        return with_room(model, functools.partial(_try, model, arguments, keywords, calls))
    except NoRoom as error:
        raise CapslogError(
            f"the {type(model).__name__} cannot be run on its example: {error}; capture it where more is free"
        ) from error


def _try(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    calls: OpaqueCalls,
    memory: StepMemory,
    keeps_values: bool = False,
) -> tuple[Watch, Any]:
    watch, values = Watch(model), KnownValues() if keeps_values or has_weights(model) else None
    with ExitStack() as stack:
        stack.enter_context(untouched(model, memory))
        if has_weights(model):
            stack.enter_context(memory.saving())
            stack.enter_context(MemoryGuard(memory))
            take: Any = Tensor.clone
        else:
            stack.enter_context(on_host(model))
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(ReadNumbers())
            stack.enter_context(unlogged())
            take = mode.from_tensor
        given = arguments, dict(keywords)
        taken = pytree.tree_map_only(Tensor, take, given)
        if values is not None:
            for tensor, value in zip(pytree.tree_leaves(taken), pytree.tree_leaves(given), strict=True):
                if isinstance(tensor, Tensor):
                    values.add(tensor, value if isinstance(tensor, FakeTensor) else None)
            stack.enter_context(values)
            stack.enter_context(values.learning())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(calls.open(values))
        stack.enter_context(watch.open())
        result = model(*taken[0], **taken[1])
        watch.reads_values = values is not None and values.used
    return watch, result


class Watch:
    """Observes one call of a model.

    Args:
        by_module: find also which modules draw random numbers.
        keeps: let the model return a pair: its own result, and the values that its code leaves on its modules.

    Attributes:
        running: (qualified name, class) of the modules that run now, or ran when an error was raised.
        changes: changes of attributes, buffers and other state by the model's code.
        drawn: names of the generators that its code has drawn from.
        drawers: module's qualified name -> the generators that its own code draws from.
        reads_values: True where its code decides by values that derive from its inputs alone.
    """

    def __init__(self, model: nn.Module, by_module: bool = False, keeps: bool = False) -> None:
        self._model, self._by_module, self.keeps = model, by_module, keeps
        self._calls: dict[int, bool] = {}
        self._state: PythonState | None = None
        self._apart: list[object] = [self]
        self._hooks: list[tuple[dict[int, Any], set[int]]] = []
        self._draws: RandomStates | None = None
        self.running: list[tuple[str, str]] = []
        self.changes: list[StateChange] = []
        self.drawn: list[str] = []
        self.drawers: dict[str, set[str]] = {}
        self.reads_values = False
        self.generators: dict[str, Any] = {}

    @property
    def unary(self) -> set[int]:
        """Ids of the modules that were only ever called as `module(one tensor)` and returned one tensor."""
        return {key for key, unary in self._calls.items() if unary}

    @contextmanager
    def open(self, apart: Sequence[object] = ()) -> Iterator[None]:
        """Observe the model in the block. apart: tables of its modules that are left out."""
        self._apart = [self, *apart]
        state = self._now()  # an export replaces lists and other containers by copies
        handles = [self._model.register_forward_pre_hook(self._begin, prepend=True)]
        for path, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(path, module)))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        handles.append(self._model.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            state.put_back()

    def _now(self) -> PythonState:
        return PythonState(dict(self._model.named_modules()), files=True, apart=self._apart)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._state = self._now()
        self._hooks = [(hooks, set(hooks)) for hooks in map(_forward_hooks_of, self._model.modules())]
        self.generators = self._state.generators
        self._draws = RandomStates(self.generators)
        self._last = self._draws

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._state is None or self._draws is None:
            return None  # a hook of the user's failed before
        self.changes += self._state.changes()
        self.drawn += self._draws.drawn()
        self._state.put_back()
        for hooks, before in self._hooks:
            for added in hooks.keys() - before:
                del hooks[added]  # the code's record of the hook is undone, so the code would add it again
        self._draws.put_back()
        self._state = None
        return (output, [change.after for change in self.changes]) if self.keeps else None

    def _entering(self, path: str, module: nn.Module) -> Any:
        named = path, type(module).__name__

        def enter(_: nn.Module, args: Any) -> None:
            self._count_draws()
            self.running.append(named)

        return enter

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._count_draws()
        self.running.pop()
        unary = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs and isinstance(output, Tensor)
        self._calls[id(module)] = self._calls.get(id(module), True) and unary

    def _count_draws(self) -> None:
        if not self._by_module or self._state is None:
            return
        drawn = self._last.drawn()
        if drawn:
            path = self.running[-1][0] if self.running else ""
            self.drawers.setdefault(path, set()).update(drawn)
            self._last = RandomStates(self.generators)


def _forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    hooks: dict[int, Any] = module._forward_hooks
    return hooks
