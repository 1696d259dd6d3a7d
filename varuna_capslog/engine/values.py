"""Converts values to bytes and back, for messages between ranks beside the tensors of a step.

`Communicator.gather` uses it. The sockets of gloo know no secret, so nothing that they carry is unpickled: only plain
values can be sent, and reading them runs no code that arrived.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["pack", "unpack"]


_LENGTH = struct.Struct("!Q")
_ROWS: dict[str, tuple[type[Collection[Any]], Callable[[Iterable[Any]], Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
}


def pack(value: Any) -> bytes:
    """A value of None, booleans, numbers, text, bytes, tensors, NumPy's arrays and scalars, and of lists, tuples, sets
    and dicts of these.

    Raises:
        CapslogError: another type is in it.
    """
    blobs: list[bytes] = []
    text = json.dumps([_told(value, blobs), [len(blob) for blob in blobs]]).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def unpack(data: bytes) -> Any:
    """The value from which `pack` made these bytes; tensors are on the CPU. Raises CapslogError for other bytes."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + size
        told, sizes = json.loads(data[_LENGTH.size : at])
        blobs = []
        for length in sizes:
            blobs.append(data[at : at + length])
            at += length
        return _value(told, blobs)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CapslogError(f"a rank sent {len(data)} bytes that are no value: {error}; start anew") from error


def _told(value: Any, blobs: list[bytes]) -> Any:
    """The value as JSON: plain values as they are, all others as [tag, ...]. Bytes go into `blobs`."""
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str, _kept(value.tobytes(), blobs)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", _kept(bytes(value), blobs)]
    if isinstance(value, dict):
        return ["dict", [[_told(key, blobs), _told(member, blobs)] for key, member in value.items()]]
    for name, (kind, _) in _ROWS.items():
        if isinstance(value, kind):
            return [name, [_told(member, blobs) for member in value]]
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), _kept(data, blobs)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return ["array", value.dtype.str, list(value.shape), _kept(value.tobytes(), blobs)]
    raise CapslogError(
        f"ranks cannot tell each other a {type(value).__name__}; use numbers, text, bytes, tensors, arrays, and lists, "
        "tuples, sets and dicts of these"
    )


def _kept(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _value(told: Any, blobs: list[bytes]) -> Any:
    if not isinstance(told, list):
        return told
    tag, *fields = told
    if tag == "bytes":
        return blobs[fields[0]]
    if tag == "dict":
        return {_value(key, blobs): _value(member, blobs) for key, member in fields[0]}
    if tag == "scalar":
        return np.frombuffer(blobs[fields[1]], _dtype(fields[0]))[0]
    if tag == "array":
        return np.frombuffer(blobs[fields[2]], _dtype(fields[0])).reshape(fields[1]).copy()
    if tag == "tensor":
        kind = getattr(torch, fields[0])
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{fields[0]!r} is no dtype")
        data = bytearray(blobs[fields[2]])
        flat = torch.frombuffer(data, dtype=torch.uint8).view(kind) if data else torch.empty(0, dtype=kind)
        return flat.reshape(fields[1])
    return _ROWS[tag][1](_value(member, blobs) for member in fields[0])


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise ValueError(f"arrays of {text!r} are not sent")
    return dtype
