"""A second torch device on the CPU's memory, which torch takes for the accelerator of the process that installs it.

It is torch's private backend, made in Python. A tensor of it has its own storage on memory that a CPU tensor holds, and
every operator runs the CPU's kernel on that memory. So a computation has the bits of the CPU, and yet an operator
refuses tensors of two devices as CUDA's do. Random numbers come from the device's own generator. Torch cannot uninstall
the device: install it only in processes that a test starts.
"""

from __future__ import annotations

import functools
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DEVICE", "NAME", "copies_to_host", "install"]

NAME = "apart"
DEVICE = "apart:0"
MEMORY_BYTES = 8 << 30

_ATEN = torch.ops.aten
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = _ATEN.set_.source_Storage_storage_offset
_OF_SIZES_ALONE = {
    _ATEN.as_strided.default,
    _ATEN.view.default,
    _ATEN._reshape_alias.default,
    _ATEN.unfold.default,
    _ATEN.set_.source_Storage,
    _SET,
}
"""They read and write no number, so that the CPU's take tensors of any device."""
_MAY_INDEX = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
"""Their indices may lie on the CPU, as on CUDA."""
_COPIES = {"aten::copy_": (1, 0), "aten::_copy_from": (0, 1)}
"""Their tensors may lie on two devices: which argument is read, and which is written."""
_STANDS_FOR = {
    "aten::_copy_from": lambda source, target, non_blocking=False: target.copy_(source),
    "aten::convolution_overrideable": _ATEN.convolution.default,
    "aten::convolution_backward_overrideable": lambda gradient, x, weight, *rest: _ATEN.convolution_backward.default(
        gradient, x, weight, [gradient.shape[1]], *rest
    ),
}
"""What torch calls on a private backend alone -> what it calls on the CPU."""


class _Memory:
    """The memory of the device: the CPU storages that hold it, by the identity of the device's own."""

    def __init__(self) -> None:
        self.held: dict[int, torch.UntypedStorage] = {}
        self.bytes = self.peak_bytes = 0

    def take(self, host: Tensor) -> torch.UntypedStorage:
        """Return a device storage on the memory of a CPU tensor's storage, which lives as long as the device's."""
        host_storage = host.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(
            host_storage.data_ptr(), _device(), host_storage.nbytes()
        )
        self.held[storage._cdata] = host_storage
        self.bytes += host_storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._give_back, storage._cdata)
        return storage

    def _give_back(self, key: int) -> None:
        self.bytes -= self.held.pop(key).nbytes()

    def statistics(self, device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.bytes, "allocated_bytes.all.peak": self.peak_bytes}

    def reset(self, device: Any = None) -> None:
        self.peak_bytes = self.bytes


_memory, _generator = _Memory(), torch.Generator()
_library: list[torch.library.Library] = []
copies_to_host: list[int] = []
"""Elements of each copy from the device to the host, numbers that were read included."""


def _device() -> torch.device:
    return torch.device(DEVICE)


def _laid_out(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor of the device on one of its storages, with the form of another tensor."""
    tensor = torch._C._acc.create_empty_tensor((0,), like.dtype)
    _SET.redispatch(_ON_CPU, tensor, storage, like.storage_offset(), like.shape, like.stride())
    return tensor


def _on_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Crossing:
    """The tensors of one call of an operator, on their way to the CPU's kernel and back."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._of_storage: dict[int, Tensor] = {}
        self._of_tensor: dict[int, Tensor] = {}
        self._unfilled: list[tuple[Tensor, Tensor]] = []

    def enter(self, value: Any, may_be_elsewhere: bool = False) -> Any:
        """Convert an argument of an operator for the CPU kernel.

        Raises:
            RuntimeError: the argument is a CPU tensor; same message as CUDA's. Tensors of one number may be anywhere.
        """
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not isinstance(value, Tensor):
            return value
        host = value
        if value.device.type == NAME:
            host = _on_host(value)
            if not value.numel():  # an operator may give it a size
                host = torch.empty_like(host)
                self._unfilled.append((value, host))
            self._of_storage[host.untyped_storage()._cdata] = value
        elif value.dim() and not may_be_elsewhere:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self._operator} got one on {value.device} and "
                f"{DEVICE}"
            )
        self._of_tensor[id(host)] = value
        return host

    def leave(self, value: Any) -> Any:
        """Convert a kernel's output for the caller: one of its arguments, a view of one, or a new device tensor."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._of_tensor:
            return self._of_tensor[id(value)]
        home = self._of_storage.get(value.untyped_storage()._cdata)
        return _laid_out(_memory.take(value) if home is None else home.untyped_storage(), value)

    def fill(self) -> None:
        """Gives arguments without elements the size and the numbers that they got."""
        for tensor, host in self._unfilled:
            if host.shape != tensor.shape:
                _SET.redispatch(_ON_CPU, tensor, _memory.take(host), host.storage_offset(), host.shape, host.stride())


def _run(operator: Any, *arguments: Any, **options: Any) -> Any:
    """Run an operator that has a tensor on the device, or whose result belongs there."""
    if operator in _OF_SIZES_ALONE:
        return operator.redispatch(_ON_CPU, *arguments, **options)
    name, crossing = operator._schema.name, _Crossing(operator)
    entered = []
    for place, (value, parameter) in enumerate(zip(arguments, operator._schema.arguments, strict=False)):
        if isinstance(value, (int, float)) and isinstance(parameter.type, torch.TensorType):
            value = torch.tensor(value)  # torch hands on a number that stands for a tensor as a number
        free = name in _COPIES or (name in _MAY_INDEX and place == 1)
        entered.append(pytree.tree_map(functools.partial(crossing.enter, may_be_elsewhere=free), value))
    options = pytree.tree_map(crossing.enter, options)
    if name in _COPIES:
        source, target = (arguments[place] for place in _COPIES[name])
        if source.device.type == NAME != target.device.type:
            copies_to_host.append(source.numel())
    if name == "aten::_local_scalar_dense":
        copies_to_host.append(1)
    if torch.Tag.nondeterministic_seeded in operator.tags:
        result = _drawn(operator, entered, options)
    else:
        result = _STANDS_FOR.get(name, operator)(*entered, **options)
    crossing.fill()
    return pytree.tree_map(crossing.leave, result)


def _drawn(operator: Any, arguments: Any, options: Any) -> Any:
    """Run an operator with the random numbers of the device's generator; the CPU's generator keeps its state."""
    present = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        return operator(*arguments, **options)
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(present)


class _Event:
    """Event with the host's time: the device finishes every operation at once."""

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert device == _device()
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.seconds - self.seconds)


def _module() -> types.SimpleNamespace:
    """Return the module `torch.apart`, with the functions that torch requires of every backend."""
    return types.SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        is_available=lambda: True,
        is_initialized=lambda: False,  # its memory survives a fork
        device_count=lambda: 1,
        current_device=lambda: 0,
        manual_seed_all=_generator.manual_seed,
        get_rng_state=lambda device: _generator.get_state(),
        set_rng_state=lambda state, device: _generator.set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        get_device_name=lambda: "a second device on the CPU",
    )


def install() -> None:
    """Install the device in this process and its later forks; a second call does nothing."""
    if _library:
        return
    _setup_privateuseone_for_python_backend(NAME, _module())
    fallback, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    for name in _with_kernels():
        kernels.impl(name.removeprefix("aten::"), functools.partial(_run, _operator(name)), "PrivateUse1")
    _library.extend((fallback, kernels))
    # torch has counts and clocks of backends in C++ alone
    torch.accelerator.memory_stats = torch.accelerator.memory.memory_stats = _memory.statistics  # type: ignore
    torch.accelerator.reset_peak_memory_stats = _memory.reset
    torch.accelerator.synchronize = lambda device=None: None
    torch.accelerator.get_memory_info = lambda device=None: (MEMORY_BYTES - _memory.bytes, MEMORY_BYTES)
    torch.Event = _Event  # type: ignore


def _with_kernels() -> Iterator[str]:
    """Operators that torch would put together of others on this device, but not on the CPU, with other bits."""
    composite = [key for key in torch._C.DispatchKey.__members__ if key.startswith("Composite")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if (
            name.startswith("aten::")
            and (name in _STANDS_FOR or has(name, "CPU"))
            and any(has(name, key) for key in composite)
        ):
            yield name


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")
