"""Chooses the device of a worker, and checks that it meets the demands of the config.

Workers call this before anything is built. A machine that is not as the config expects then gives one sentence with the
key or the variable to change, and not an error of the device's or NCCL's later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

import torch

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes

__all__ = ["check_devices", "check_nccl_variables", "check_room", "choose_device"]


def choose_device(wish: str, local_rank: int) -> torch.device:
    """The device for `device: wish`.

    Raises:
        CapslogError: a type of accelerator of which none can be used here, with torch's own reason.
    """
    kind = accelerator.auto_type() if wish == "auto" else wish
    reason = accelerator.why_unusable(kind)
    if reason is not None:
        raise CapslogError(f"device={wish}, but torch can use no such device here ({reason}); set device=cpu or auto")
    devices = accelerator.all_devices(kind)
    device = devices[local_rank % len(devices)]
    accelerator.select(device)
    return device


def check_devices(transport: str, device: torch.device, local_rank: int) -> None:
    """Checks that `pipeline.transport` can connect this worker; gloo always can.

    Args:
        local_rank: the number of this worker among those of its machine.

    Raises:
        CapslogError: nccl without a GPU for each worker, or with variables that forbid it every way.
    """
    if transport != "nccl":
        return
    count = len(accelerator.all_devices("cuda"))
    if device.type != "cuda" or local_rank >= count:
        raise CapslogError(
            f"pipeline.transport=nccl needs one GPU per rank, but worker {local_rank} of this machine runs on "
            f"{device.type}, and there are {count} GPUs; set pipeline.transport=gloo, or start fewer workers here"
        )
    check_nccl_variables(os.environ, [name for _, name in socket.if_nameindex()])


def check_nccl_variables(environment: Mapping[str, str], interfaces: Iterable[str]) -> None:
    """Checks that NCCL's variables leave it a way to the other ranks; its manual (Environment Variables) has them.

    Two GPUs of a machine reach each other directly (P2P), through shared memory (SHM), or as those of two machines do:
    through InfiniBand or sockets. Before that they meet over sockets, always.

    Args:
        interfaces: of this machine's network, by name.

    Raises:
        CapslogError: no interface is left to meet over, or no transport; the variable to change is named.
    """
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    names = sorted(interfaces)
    if wanted and not any(_matches(name, wanted) for name in names):
        raise CapslogError(
            f"NCCL_SOCKET_IFNAME={wanted} leaves none of this machine's network interfaces ({', '.join(names)}), so "
            "that NCCL cannot meet the other ranks; change or unset it, or set pipeline.transport=gloo"
        )
    network = environment.get("NCCL_NET", "")
    if network == "IB" and _is_on(environment, "NCCL_IB_DISABLE"):
        others = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if _is_on(environment, name)]
        beside = f" ({' and '.join(f'{name}=1' for name in others)} forbid the rest)" if others else ""
        raise CapslogError(
            f"NCCL_NET=IB and NCCL_IB_DISABLE=1 leave NCCL no network{beside}; unset one of the two, or set "
            "pipeline.transport=gloo"
        )


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0") not in ("", "0")


def _matches(name: str, wanted: str) -> bool:
    """True where NCCL may use an interface. wanted: prefixes, with `=` before them exact names, with `^` exclusions."""
    excluding, listed = wanted.startswith("^"), wanted.removeprefix("^")
    exact, listed = listed.startswith("="), listed.removeprefix("=")
    matches = any(name == pattern if exact else name.startswith(pattern) for pattern in listed.split(",") if pattern)
    return matches is not excluding


def check_room(device: torch.device, predicted: int | None, worker_name: str) -> None:
    """Checks that an accelerator has as much free memory as the plan predicts for this worker, before it takes any.

    Args:
        predicted: bytes of the rank's peak; None: not known, nothing is checked.
        worker_name: for the error, such as "rank 2".

    Raises:
        CapslogError: it has not: other processes fill it.
    """
    if device.type == "cpu" or predicted is None:
        return
    free, total = accelerator.memory_info(device)
    if predicted > free:
        raise CapslogError(
            f"{worker_name} needs {format_bytes(predicted)} of {device}, but only {format_bytes(free)} of its "
            f"{format_bytes(total)} are free: other processes fill it; end them, choose another device "
            "(of CUDA's with CUDA_VISIBLE_DEVICES), or plan for what is free with pipeline.capacity"
        )
