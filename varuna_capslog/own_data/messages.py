"""Any picklable value through a pipe; the bytes of its tensors and arrays go beside the pickle, uncopied.

Small tensors of a message, such as labels and boxes of many images, share one block of memory; a large one has its
own, so that a program that keeps some labels does not keep the images.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

__all__ = ["receive", "send"]

_HEAD = struct.Struct("<QQ")
_ALIGNMENT = 64
"""Bytes; each tensor in the block is aligned as torch's own memory is: some CPU kernels round by alignment."""
_LARGE = 1 << 16
"""Bytes from which on a tensor has memory of its own."""


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else None
            data = pickle.PickleBuffer(b"" if flat is None else memoryview(flat.numpy()))  # type: ignore[arg-type]
            return _tensor, (data, value.dtype, tuple(value.shape))
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(data)).view(dtype).reshape(shape)


def send(stream: BinaryIO, value: Any) -> None:
    """Writes one value. Raises the errors of pickling, before anything is written, and those of a closed pipe."""
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _TensorPickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
    stream.write(_HEAD.pack(text.tell(), len(parts)) + sizes + text.getvalue())
    for part in sorted(parts, key=lambda part: part.nbytes >= _LARGE):
        stream.write(part)
        if part.nbytes < _LARGE:
            stream.write(bytes(_room(part.nbytes) - part.nbytes))
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Reads one value. Raises EOFError where the pipe was closed."""
    length, count = _HEAD.unpack(_whole(stream, _HEAD.size))
    sizes = struct.unpack(f"<{count}Q", _whole(stream, 8 * count))
    text = _whole(stream, length)
    block, at, parts = _whole(stream, sum(_room(size) for size in sizes if size < _LARGE)), 0, []
    for size in sizes:
        if size < _LARGE:
            parts.append(block[at : at + size])
            at += _room(size)
        else:
            parts.append(_whole(stream, size))
    return pickle.loads(text, buffers=parts)


def _room(size: int) -> int:
    """Bytes that a small tensor takes in the block."""
    return size + -size % _ALIGNMENT


def _whole(stream: BinaryIO, size: int) -> Any:
    # torch's memory, for its alignment
    data: Any = torch.empty(size, dtype=torch.uint8).numpy()
    done, view = 0, memoryview(data)
    while done < size:
        got = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        done += got
    return data
