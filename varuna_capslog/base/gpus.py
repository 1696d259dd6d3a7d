"""Kinds of GPUs that a plan may be for without one being here: their memory and what their data sheets promise.

`profile.device: cuda:KIND` names one. `Gpu.memory_bytes` is the capacity of a plan that says none; estimates take their
seconds from the rates (`profiling.estimation.roofline`). Nothing here asks a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError

__all__ = ["GPUS", "Gpu", "gpu_of", "parse_device", "parse_device_type"]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: what torch calls its total memory, in GiB, rounded down: 1 to 2 % less than it is sold with.
        float32_flops: of the data sheet, per second, without tensor cores.
        tensor_flops: in TF32, dense, per second; 0 where there is none.
        bytes_per_second: of its memory, by the data sheet.
        hopper: of the architecture Hopper or a later one, for which torch gives cuBLAS larger workspaces.
    """

    memory_gib: float
    float32_flops: float
    tensor_flops: float
    bytes_per_second: float
    hopper: bool = False

    @property
    def memory_bytes(self) -> int:
        """The same in bytes."""
        return int(self.memory_gib * 2**30)


GPUS = {
    "t4": Gpu(14.5, 8.1e12, 0, 300e9),
    "v100-16gb": Gpu(15.7, 15.7e12, 0, 900e9),
    "v100-32gb": Gpu(31.7, 15.7e12, 0, 900e9),
    "a4000": Gpu(15.7, 19.2e12, 38.3e12, 448e9),
    "a6000": Gpu(47.4, 38.7e12, 77.4e12, 768e9),
    "a10": Gpu(22.0, 31.2e12, 62.5e12, 600e9),
    "a100-40gb": Gpu(39.3, 19.5e12, 156e12, 1555e9),
    "a100-80gb": Gpu(79.1, 19.5e12, 156e12, 2039e9),
    "l4": Gpu(22.0, 30.3e12, 60e12, 300e9),
    "l40s": Gpu(44.3, 91.6e12, 183e12, 864e9),
    "rtx3090": Gpu(23.6, 35.6e12, 35.6e12, 936e9),
    "rtx4090": Gpu(23.6, 82.6e12, 82.6e12, 1008e9),
    "h100-80gb": Gpu(79.1, 67e12, 494e12, 3350e9, True),
    "h200": Gpu(139.7, 67e12, 494e12, 4800e9, True),
}
"""By name, from the makers' data sheets (SXM modules where there are several)."""


def gpu_of(device: str) -> Gpu | None:
    """The kind that a device such as cuda:a100-80gb names; None for a type of device alone."""
    return GPUS.get(device.partition(":")[2])


def parse_device(text: str) -> str:
    """A device that a profile may be for: a type that torch may know, or cuda:KIND with a kind of `GPUS`.

    Raises:
        CapslogError: it is none of these; the known kinds are named.
    """
    device, colon, kind = text.partition(":")
    if device == "cuda" and colon:
        if kind not in GPUS:
            raise CapslogError(f"the kind of GPU {kind!r} is not in the table; known: {', '.join(GPUS)}")
    elif text == "auto" or not _is_type(text):
        raise CapslogError(
            f"the device {text!r} is unknown; choose cpu, cuda, another accelerator of torch such as xpu, or "
            "cuda:KIND, such as cuda:a100-80gb"
        )
    return text


def parse_device_type(text: str) -> str:
    """A type of device that a run may ask for: auto, cpu, or one that torch may know. Only torch knows which are here.

    Raises:
        CapslogError: it is no such name, such as one with a number.
    """
    if not _is_type(text):
        raise CapslogError(
            f"device={text} is no type of device; choose auto, cpu, cuda or another accelerator of torch such as xpu, "
            "without a number: workers take the devices of a machine in turn"
        )
    return text


def _is_type(text: str) -> bool:
    """Whether torch, or a backend of somebody else's, may have this type; `gpu`, which people write, nobody has."""
    return text != "gpu" and re.fullmatch(r"[a-z][a-z0-9_]*", text) is not None
