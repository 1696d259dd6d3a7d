"""Queries and settings of a device, through torch's device-neutral API: CUDA, ROCm, XPU and the like are one case here.

Only this module uses `torch.cuda` and `torch.accelerator`; other modules call its functions. On a CPU, these select,
wait for and pin nothing, so callers need not check the device type first. docs/gpu.md lists what only CUDA has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "all_devices",
    "allocated_bytes",
    "auto_type",
    "counts_memory",
    "current_stream",
    "device_name",
    "memory_info",
    "peak_bytes",
    "pins_memory",
    "random_state",
    "reset_peak",
    "seed",
    "select",
    "set_random_state",
    "synchronize",
    "total_bytes",
    "why_unusable",
]

_UNFIT = {"mps": "it has no float64, in which the norms of gradients are added"}
"""Type of accelerator -> why the engine cannot train on it."""


def auto_type() -> str:
    """Device type of `device: auto`: the type of this machine's accelerator if the engine can train on it, else cpu."""
    usable = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if usable is None or usable.type in _UNFIT else usable.type


def why_unusable(kind: str) -> str | None:
    """Reason why no device of a type can be used here, from torch; None where one can."""
    if kind in ("cpu", auto_type()):
        return None
    if kind in _UNFIT:
        return _UNFIT[kind]
    built = torch.accelerator.current_accelerator()
    if built is None or built.type != kind:
        return f"torch {torch.__version__} was built for {'the CPU alone' if built is None else built.type}"
    try:
        _call_torch(kind, "init")
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].split(". ")[0]
    return "torch sees none"


def all_devices(kind: str) -> list[torch.device]:
    """Devices of a type that can be used here: the CPU, or accelerators by number; [] where there are none."""
    if kind == "cpu":
        return [torch.device("cpu")]
    count = torch.accelerator.device_count() if kind == auto_type() else 0
    return [torch.device(kind, number) for number in range(count)]


def select(device: torch.device) -> None:
    """Make a device the default of this thread for work that names no device number."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def device_name(kind: str) -> str:
    """Manufacturer's name of the accelerator of this type; the type itself where torch does not know it."""
    return str(_call_torch(kind, "get_device_name") or kind)


# -- memory ------------------------------------------------------------------------------------------------------------


def total_bytes(device: torch.device) -> int:
    """Total bytes of an accelerator. The query allocates no memory there, since its callers run nothing on it."""
    properties = _call_torch(device.type, "get_device_properties", device.index)
    return int(getattr(properties, "total_memory", None) or memory_info(device)[1])


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator, counting all processes; opens the device."""
    return torch.accelerator.get_memory_info(device)


def counts_memory(device: torch.device) -> bool:
    """True where the bytes of tensors on a device can be counted; torch's own accelerators all count them."""
    if device.type == "cpu":
        return True
    try:
        torch.accelerator.memory_stats(device)
    except RuntimeError:
        return False
    return True


def allocated_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors on an accelerator now."""
    return torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes of this process's tensors at one time since `reset_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Restart the count of `peak_bytes`."""
    if torch.accelerator.memory_stats(device):  # torch 2.11 refuses a reset before the first tensor
        torch.accelerator.reset_peak_memory_stats(device)


@functools.cache
def pins_memory(kind: str) -> bool:
    """True where host memory can be pinned for devices of a type, so that copies to and from it are asynchronous."""
    if kind == "cpu":
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


# -- time --------------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work; returns at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> torch.Stream:
    """This thread's current stream on an accelerator."""
    return torch.accelerator.current_stream(device)


# -- random numbers ----------------------------------------------------------------------------------------------------


def seed(device: torch.device, value: int) -> None:
    """Seed the default generator of this device only; `torch.manual_seed` would seed all devices."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(value)
        return
    module: Any = torch.get_device_module(device)
    if hasattr(module, "default_generators"):
        module.default_generators[device.index or 0].manual_seed(value)
    else:
        module.manual_seed_all(value)  # the only seeding function that torch requires of every backend


def random_state(device: torch.device) -> Tensor:
    """State of a device's default generator."""
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else _call_torch(device.type, "get_rng_state", device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a `random_state` of that device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _call_torch(device.type, "set_rng_state", state, device)


def _call_torch(kind: str, function: str, *arguments: Any) -> Any:
    """Result of a function in torch's module for a type, such as `torch.xpu`; None where the module lacks it."""
    module_function = getattr(torch.get_device_module(kind), function, None)
    return None if module_function is None else module_function(*arguments)
