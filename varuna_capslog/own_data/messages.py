"""Any picklable value through a pipe; the bytes of its tensors and arrays go beside the pickle, uncopied."""

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
_SIZE = struct.Struct("<Q")


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
    """Writes one value. Raises what pickling it or a closed pipe raises; nothing was written in the first case."""
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _TensorPickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [buffer.raw() for buffer in buffers]
    stream.write(_HEAD.pack(text.tell(), len(parts)) + b"".join(_SIZE.pack(part.nbytes) for part in parts))
    stream.write(text.getvalue())
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Reads one value. Raises EOFError where the pipe was closed."""
    length, count = _HEAD.unpack(_whole(stream, _HEAD.size))
    sizes = [_SIZE.unpack(_whole(stream, _SIZE.size))[0] for _ in range(count)]
    text = _whole(stream, length)
    return pickle.loads(text, buffers=[_whole(stream, size) for size in sizes])


def _whole(stream: BinaryIO, size: int) -> Any:
    # torch's memory is aligned as that of a tensor that was made here; some CPU kernels round by alignment
    data: Any = torch.empty(size, dtype=torch.uint8).numpy()
    done, view = 0, memoryview(data)
    while done < size:
        got = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        done += got
    return data
