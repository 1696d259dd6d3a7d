"""Data sheets of GPUs, so that a plan may be for a kind that this machine lacks. No function here queries a device.

`profile.device`, `--device` and Python's `device=` name a kind as cuda:KIND (`parse_device`); `parse_devices` reads a
plan's devices. A plan without a capacity takes `Gpu.memory_bytes`; `profiling.estimation` uses the other facts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["GPUS", "Gpu", "NamedDevices", "gpu_named", "gpu_of", "parse_device", "parse_device_type", "parse_devices"]


@dataclass(frozen=True)
class Gpu:
    """Kind of GPU, by its data sheet. Rates are per second; matrix units take dense operands, with float32 sums.

    Attributes:
        architecture: group of kinds whose kernels reach similar fractions of their rates.
        memory_gib: total memory as torch reports it, in GiB, rounded down: 1 to 2 % less than the advertised size.
        bytes_per_second: memory bandwidth.
        float32_flops: without matrix units. half_flops: in float16 and, where the kind has it, bfloat16.
        processors: number of streaming multiprocessors (NVIDIA) or compute units (AMD).
        clock_hertz: boost clock of the processors.
        tensor_flops: in TF32; 0 where the kind lacks TF32.
        threads_per_processor: most resident threads.
        has_bfloat16: True where the matrix units take bfloat16.
    """

    architecture: str
    memory_gib: float
    bytes_per_second: float
    float32_flops: float
    half_flops: float
    processors: int
    clock_hertz: float
    tensor_flops: float = 0
    threads_per_processor: int = 2048
    has_bfloat16: bool = True

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.memory_gib * 2**30)

    @property
    def pace(self) -> float:
        """Relative speed by data sheets alone: geometric mean of arithmetic and memory rates.

        Arithmetic bounds matrix products, memory all else. The arithmetic rate is the geometric mean of float32 and
        16-bit types, since a plan may be for either. Measured ratios are better.
        """
        return float(((self.float32_flops * self.half_flops) ** 0.5 * self.bytes_per_second) ** 0.5)

    @property
    def hopper_or_later(self) -> bool:
        """True where torch gives cuBLAS the larger workspaces: NVIDIA's compute capability 9 and above."""
        return self.architecture in ("hopper", "blackwell", "blackwell-rtx")

    @property
    def prefers_cudnn(self) -> bool:
        """True where torch takes cuDNN's fused attention first: NVIDIA's compute capabilities 9 and 10."""
        return self.architecture in ("hopper", "blackwell")


def _volta(memory_gib: float) -> Gpu:
    return Gpu("volta", memory_gib, 900e9, 15.7e12, 125e12, 80, 1.53e9, has_bfloat16=False)


def _turing(memory_gib: float, memory: float, float32: float, half: float, processors: int, clock: float) -> Gpu:
    return Gpu("turing", memory_gib, memory, float32, half, processors, clock, 0, 1024, has_bfloat16=False)


def _a100(memory_gib: float, memory: float) -> Gpu:
    return Gpu("ampere", memory_gib, memory, 19.5e12, 312e12, 108, 1.41e9, 156e12)


def _ampere(
    memory_gib: float, memory: float, float32: float, half: float, processors: int, clock: float, tensor: float
) -> Gpu:
    return Gpu("ampere-rtx", memory_gib, memory, float32, half, processors, clock, tensor, 1536)


def _hopper(memory_gib: float, memory: float) -> Gpu:
    return Gpu("hopper", memory_gib, memory, 67e12, 989e12, 132, 1.98e9, 494e12)


def _blackwell(memory_gib: float, half: float) -> Gpu:
    return Gpu("blackwell", memory_gib, 8000e9, 80e12, half, 148, 1.965e9, half / 2)


def _mi300(memory_gib: float, memory: float) -> Gpu:
    return Gpu("cdna3", memory_gib, memory, 163.4e12, 1307.4e12, 304, 2.1e9, 653.7e12)


GPUS = {
    "v100-16gb": _volta(15.7),
    "v100-32gb": _volta(31.7),
    "t4": _turing(14.5, 320e9, 8.1e12, 65e12, 40, 1.59e9),
    "rtx2080": _turing(7.7, 448e9, 10.1e12, 40.3e12, 46, 1.71e9),
    "titan-rtx": _turing(23.6, 672e9, 16.3e12, 130e12, 72, 1.77e9),
    "a100-40gb": _a100(39.3, 1555e9),
    "a100-80gb": _a100(79.1, 2039e9),
    "a10": _ampere(22.0, 600e9, 31.2e12, 125e12, 72, 1.695e9, 62.5e12),
    "a4000": _ampere(15.7, 448e9, 19.2e12, 76.7e12, 48, 1.56e9, 38.3e12),
    "a6000": _ampere(47.4, 768e9, 38.7e12, 154.8e12, 84, 1.80e9, 77.4e12),
    "rtx3080ti-laptop": _ampere(15.7, 512e9, 20.2e12, 40.4e12, 58, 1.36e9, 20.2e12),
    "rtx3090": _ampere(23.6, 936e9, 35.6e12, 71e12, 82, 1.695e9, 35.6e12),
    "l4": Gpu("ada", 22.0, 300e9, 30.3e12, 121e12, 58, 2.04e9, 60e12, 1536),
    "l40s": Gpu("ada", 44.3, 864e9, 91.6e12, 362e12, 142, 2.52e9, 183e12, 1536),
    "rtx4090": Gpu("ada", 23.6, 1008e9, 82.6e12, 165.2e12, 128, 2.52e9, 82.6e12, 1536),
    "h20": Gpu("hopper", 95.0, 4000e9, 44e12, 148e12, 78, 1.98e9, 74e12),
    "h100-80gb": _hopper(79.1, 3350e9),
    "h100-96gb": _hopper(94.5, 2400e9),
    "gh200-96gb": _hopper(94.5, 4000e9),
    "gh200-144gb": _hopper(141.0, 4900e9),
    "h200": _hopper(139.7, 4800e9),
    "b200": _blackwell(178.3, 2250e12),
    "gb200": _blackwell(184.0, 2500e12),
    "gb300": _blackwell(277.0, 2500e12),
    "rtx5090": Gpu("blackwell-rtx", 31.3, 1792e9, 104.8e12, 209.5e12, 170, 2.407e9, 104.8e12, 1536),
    "rtx-pro-6000": Gpu("blackwell-rtx", 94.9, 1792e9, 125e12, 503.8e12, 188, 2.6e9, 251.9e12, 1536),
    "mi300x": _mi300(191.9, 5300e9),
    "mi325x": _mi300(255.9, 6000e9),
    "mi355x": Gpu("cdna4", 287.9, 8000e9, 157.3e12, 2516.6e12, 256, 2.4e9),
}
"""Kinds by name, from the manufacturers' data sheets: the SXM module where there are several forms, for a laptop the
middle of its clock range. The total memory of `h200` was read on a device."""

_SHORT = {"h100": "h10080gb"}
"""The kind that is usually meant by a name without a memory size."""


def gpu_named(text: str) -> str:
    """Return the name in `GPUS` of a kind written as `H100`, `4090`, `A100 80GB` or torch's `NVIDIA A100-SXM4-80GB`.
    Raises CapslogError: no such kind (the nearest are named), or it has several memory sizes (all are named).
    """
    plain = re.sub(r"[\s_-]|nvidia|amd|instinct|geforce|tesla|sxm\d|pcie|hbm\d?e?", "", text.lower())
    spelled = {name.replace("-", ""): name for name in GPUS}
    for word in (_SHORT.get(plain, plain), f"rtx{plain}", f"titan{plain}", plain.removeprefix("rtx")):
        if word in spelled:
            return spelled[word]
    memories = [name for name in GPUS if name.rpartition("-")[0].replace("-", "") == plain != ""]
    if len(memories) > 1:
        raise CapslogError(f"the GPU {text!r} is sold with several memories; choose {' or '.join(memories)}")
    near = difflib.get_close_matches(plain, spelled, n=3, cutoff=0.0)
    nearest = ", ".join(spelled[word] for word in near)
    raise CapslogError(f"the kind of GPU {text!r} is not in the table; the nearest are {nearest}")


@dataclass(frozen=True)
class NamedDevices:
    """Devices of a plan.

    Attributes:
        count: number of devices, at least 1.
        kinds: a name of `GPUS` for each device, in the order of the stages; empty: only the number is known.
    """

    count: int
    kinds: tuple[str, ...] = ()

    @property
    def fastest(self) -> str | None:
        """The fastest kind, for which the plan's costs are estimated; None where no kind is known."""
        return max(self.kinds, key=lambda kind: GPUS[kind].pace, default=None)

    def refuse_beside(self, others: Mapping[str, Any], name: str, number: str) -> None:
        """Raise CapslogError where kinds are named together with an option whose value follows from the kinds.

        Args:
            others: such options by the caller's names, with their values; None: not given.
            name, number: the caller's option for the devices, and the option for their number alone.
        """
        for option, value in others.items() if self.kinds else ():
            if value is not None:
                raise CapslogError(
                    f"{name} names kinds, from which device and memory follow, but {option} is given too; leave "
                    f"{option} out, or give the number of devices, {number}"
                )

    @property
    def pipeline_keys(self) -> dict[str, Any]:
        """Keys of a config's section `pipeline`: `devices`; with kinds also `capacity` (bytes, a single number where
        all are equal) and `speeds` (`Gpu.pace` relative to the fastest kind; None where all are equal).
        """
        keys: dict[str, Any] = {"devices": self.count}
        if self.fastest is not None:
            sizes = [GPUS[kind].memory_bytes for kind in self.kinds]
            keys["capacity"] = sizes[0] if len(set(sizes)) == 1 else sizes
            fastest_pace = GPUS[self.fastest].pace
            speeds = [max(0.001, round(GPUS[kind].pace / fastest_pace, 3)) for kind in self.kinds]
            keys["speeds"] = speeds if min(speeds) < 1 else None
        return keys


def parse_devices(devices: int | str, name: str = "devices") -> NamedDevices:
    """Return the devices for a number (`4`) or a list of kinds (`2x a100-80gb, rtx4090`, as `gpu_named` reads them).

    Raises CapslogError, which begins with `name`, for anything else, such as an unknown kind (the nearest are named) or
    a number not in 1 to `fields.MOST_RANKS`.
    """
    rule = f"write a number from 1 to {fields.MOST_RANKS}, or kinds such as 2x a100-80gb or 2x rtx4090, rtx3090"
    wrong = CapslogError(f"{name} is {devices!r}; {rule}")
    text, kinds, count = str(devices).strip(), list[str](), 0
    if re.fullmatch(r"[0-9]{1,6}", text):
        count = int(text)
    else:
        for part in text.split(","):
            match = re.fullmatch(r"(?:([0-9]{1,6})\s*[x*]\s*(?=\S))?(.*)", part.strip())
            if match is None or (match[1] is None and not re.search("[a-wyz]", part.lower())):
                raise wrong
            number, kind = int(match[1] or 1), match[2]
            kinds += [fields.within(name, lambda kind=kind: gpu_named(kind.removeprefix("cuda:")))] * number  # type: ignore[misc]
            count += number if number else fields.MOST_RANKS + 1
    if not 0 < count <= fields.MOST_RANKS:
        raise wrong
    return NamedDevices(count, tuple(kinds))


def gpu_of(device: str) -> Gpu | None:
    """Return the kind that a device such as cuda:a100-80gb names; None for a device type alone."""
    return GPUS.get(device.partition(":")[2])


def parse_device(text: str) -> str:
    """Return the device of a profile: a type that torch may know, or cuda:KIND with a name of `GPUS`.

    text: a type such as cpu, cuda:KIND, or KIND as `gpu_named` reads it. Raises CapslogError for other text, with the
    nearest kinds or the allowed forms.
    """
    device, colon, kind = text.partition(":")
    if device == "cuda" and colon:
        return f"cuda:{gpu_named(kind)}"
    if text != "auto" and _is_type(text):
        return text
    try:
        return f"cuda:{gpu_named(text)}"
    except CapslogError as error:
        if text.isalpha() or colon:
            raise CapslogError(
                f"the device {text!r} is unknown; choose cpu, cuda, another accelerator of torch such as xpu, or "
                "cuda:KIND, such as cuda:a100-80gb"
            ) from None
        raise error


def parse_device_type(text: str) -> str:
    """Return the device type that a run may ask for: auto, cpu, or a name that torch may know (only torch knows which
    exist here). Raises CapslogError for other text, such as a type with a number.
    """
    if not _is_type(text):
        raise CapslogError(
            f"device={text} is no type of device; choose auto, cpu, cuda or another accelerator of torch such as xpu, "
            "without a number: workers take the devices of a machine in turn"
        )
    return text


def _is_type(text: str) -> bool:
    """True where a torch backend may have this name: letters only, unlike kinds. The frequent `gpu` is no type."""
    return text != "gpu" and re.fullmatch(r"[a-z_]+", text) is not None
