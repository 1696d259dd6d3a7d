"""Several tensors of any dtype, shape and memory format as one message between neighbouring stages.

A header of fixed size describes the tensors, so microbatches may differ, and the ranks agree only on the number of
tensors of a cut. Small tensors travel in one frame with it. Only `send` and `Expected` use torch.distributed; packing
knows nothing of Varuna or of processes.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import PeerLost, why_lost
from varuna_capslog.model.chain import TensorSpec

__all__ = ["Bundle", "Expected", "Room", "Sending", "named_loss", "pack", "send", "unpack"]

MAX_DIMS = 8
"""Most dimensions of a tensor on the wire."""

_MAGIC = 0x5643_0001
_ROW = 3 + 2 * MAX_DIMS
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ACTIVATIONS, _GRADIENTS, _LOOSE = 11, 12, 2
_INSIDE = 3
"""Column of a header's first row: whether the payload lies behind it in the same frame."""
_ALIGNED = 16
_LARGEST_FRAME = 1 << 19


@dataclass(frozen=True)
class Bundle:
    """The tensors that cross a cut together, or None where a gradient is absent.

    Has the three methods that Varuna calls on its single tensor. `.to(device)` copies, so that an in-place operation
    after a cut cannot spoil a recomputation from the tensors that wait in host memory.
    """

    tensors: tuple[Tensor | None, ...]
    host: Bundle | None = None

    def to(self, device: torch.device | str) -> Bundle:
        """Return copies on `device`, which keep a reference to their originals."""
        copies = tuple(None if tensor is None else tensor.to(device, copy=True) for tensor in self.tensors)
        return Bundle(copies, host=self.host or self)

    def cpu(self) -> Bundle:
        """Return the host's tensors: the originals of this copy, else copies on the host."""
        if self.host is not None:
            return self.host
        return Bundle(tuple(None if tensor is None else self.to_host(tensor.detach()) for tensor in self.tensors))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host."""
        return tensor.cpu()


# -- the format


def pack(tensors: Sequence[Tensor | None], microbatch: int) -> tuple[Tensor, list[Tensor]]:
    """Header, int64 [1 + n, 3 + 2 * MAX_DIMS], and the bytes of every tensor that has any.

    Raises CapslogError for a dtype or a number of dimensions that the format does not have.
    """
    rows = [[_MAGIC, microbatch, len(tensors)] + [0] * (_ROW - 3)]
    payload = []
    for tensor in tensors:
        if tensor is None:
            rows.append([0] * _ROW)
            continue
        kind, dims = _CODES.get(tensor.dtype), tensor.dim()
        if kind is None or dims > MAX_DIMS or tensor.layout != torch.strided:
            raise CapslogError(
                f"a tensor {list(tensor.shape)} of {tensor.dtype} ({tensor.layout}) cannot cross a cut; give one of at "
                f"most {MAX_DIMS} dimensions and an ordinary dtype"
            )
        dense = tensor.detach()
        if not dense.is_contiguous() and TensorSpec.of(dense).stride != dense.stride():
            dense = dense.contiguous()
        padding = [0] * (MAX_DIMS - dims)
        rows.append([1, kind, dims, *dense.shape, *padding, *dense.stride(), *padding])
        if dense.numel():
            payload.append(_bytes(dense))
    header = torch.tensor(rows, dtype=torch.int64)
    return header, payload


def unpack(header: Tensor, microbatch: int, frame: Tensor | None = None) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return tensors to be filled, as `header` describes them, and their bytes in the order of `pack`'s payload.

    frame: bytes with the payload behind the header; the tensors are then views of it. Raises CapslogError where the
    header is invalid, or is of another microbatch than the one that is due.
    """
    (magic, number, count, *_), *rows = header.tolist()
    if magic != _MAGIC or count != len(rows):
        raise CapslogError("a message between stages has no header of this plugin; run the same plugin on every rank")
    if number != microbatch:
        raise CapslogError(
            f"a message of microbatch {number} came where microbatch {microbatch} was due; the ranks are out of step: "
            "give all of them the same batch and chunk sizes"
        )
    tensors: list[Tensor | None] = []
    payload = []
    place = _aligned(header.nbytes)
    for row in rows:
        if not row[0]:
            tensors.append(None)
            continue
        dims = row[2]
        shape, stride = row[3 : 3 + dims], row[3 + MAX_DIMS : 3 + MAX_DIMS + dims]
        dtype, size = _DTYPES[row[1]], math.prod(shape)
        if frame is None or not size:
            tensor = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            part = frame[place : place + size * dtype.itemsize]
            tensor = part.view(dtype).as_strided(shape, stride)
            place = _aligned(place + part.numel())
        tensors.append(tensor)
        if size:
            payload.append(_bytes(tensor))
    return tensors, payload


def _places(header: Tensor, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of a payload's parts in a frame, and their end."""
    places, end = [], _aligned(header.nbytes)
    for size in sizes:
        places.append(end)
        end = _aligned(end + size)
    return places, end


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def _bytes(tensor: Tensor) -> Tensor:
    """View of a dense tensor's bytes in memory order; a single number may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


# -- between processes


class Sending:
    """Messages under way and the memory that they need."""

    def __init__(self, works: list[Any], buffers: list[Tensor], peer: int) -> None:
        self._works, self._buffers, self._peer = works, buffers, peer

    def wait(self, timeout: datetime.timedelta) -> None:
        """Wait until the memory may be used again. Raises PeerLost."""
        with named_loss(f"sending to rank {self._peer}", self._peer, timeout):
            for work in self._works:
                work.wait(timeout)


class Room:
    """Size of the frames of one direction across a cut: the last step's largest message, so that a message needs one
    frame. Both ends see the same messages, so both know the size.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._largest = 0

    def note(self, message_bytes: int) -> None:
        """Record the size of a message of the step under way."""
        self._largest = max(self._largest, message_bytes)

    def end_step(self) -> None:
        """Set the frame size; called when both ends have noted every message of a step."""
        # large tensors are better sent from where they lie than copied into a frame
        self.num_bytes = self._largest if self._largest <= _LARGEST_FRAME else 0
        self._largest = 0


def send(bundle: Bundle, microbatch: int, peer: int, gradients: bool, room: Room) -> Sending:
    """Start sending host tensors to `peer`; they must not change before `Sending.wait`. Raises PeerLost."""
    header, payload = pack(bundle.tensors, microbatch)
    tag = _GRADIENTS if gradients else _ACTIVATIONS
    places, end = _places(header, [part.numel() for part in payload])
    frame = header.view(-1).view(torch.uint8)
    room.note(end)
    if room.num_bytes > frame.numel():
        frame = torch.empty(room.num_bytes, dtype=torch.uint8)
        if end <= room.num_bytes:
            header[0, _INSIDE] = 1
            for place, part in zip(places, payload, strict=True):
                frame[place : place + part.numel()] = part
            payload = []
        frame[: header.nbytes] = header.view(-1).view(torch.uint8)
    buffers = [frame, *payload]
    with named_loss(f"sending to rank {peer}", peer):
        # tensors that do not fit into the frame have another tag: the next frames may be awaited already
        works = [dist.isend(buffer, peer, tag=tag + _LOOSE * (buffer is not frame)) for buffer in buffers]
        return Sending(works, buffers, peer)


class Expected:
    """A frame that is awaited; `take` returns the message."""

    def __init__(self, count: int, peer: int, gradients: bool, room: Room) -> None:
        self._count, self._peer, self._gradients, self._room = count, peer, gradients, room
        self._tag = _GRADIENTS if gradients else _ACTIVATIONS
        size = (1 + count) * _ROW * 8
        self._frame = torch.empty(max(size, room.num_bytes), dtype=torch.uint8)
        with named_loss(f"waiting for rank {peer}", peer):
            self._work: Any = dist.irecv(self._frame, peer, tag=self._tag)

    def take(self, microbatch: int, timeout: datetime.timedelta) -> Bundle:
        """Wait for the frame, and for tensors that did not fit into it.

        Raises PeerLost when the peer is gone or sends nothing for `timeout`, CapslogError for any other message.
        """
        content = "gradients" if self._gradients else "activations"
        doing = f"waiting for {content} of microbatch {microbatch} from rank {self._peer}"
        with named_loss(doing, self._peer, timeout):
            self._work.wait(timeout)
            header = self._frame[: (1 + self._count) * _ROW * 8].view(torch.int64).view(1 + self._count, _ROW)
            inside = self._frame if int(header[0, _INSIDE]) else None
            tensors, payload = unpack(header, microbatch, inside)
            self._room.note(_places(header, [part.numel() for part in payload])[1])
            if inside is None:
                works: list[Any] = [dist.irecv(buffer, self._peer, tag=self._tag + _LOOSE) for buffer in payload]
                for work in works:
                    work.wait(timeout)
        return Bundle(tuple(tensors))


@contextlib.contextmanager
def named_loss(doing: str, peer: int | None, timeout: datetime.timedelta | None = None) -> Iterator[None]:
    """Turn gloo's errors inside the block into a PeerLost that says what this rank was doing."""
    try:
        yield
    except RuntimeError as error:
        of_torch = isinstance(error, dist.DistBackendError)
        if not of_torch and not any(word in str(error) for word in ("gloo", "onnection", "imed out", "NCCL")):
            raise
        waited = f" for {timeout.total_seconds():g} s" if timeout is not None else ""
        sentence = f"rank {dist.get_rank()} was {doing}: {why_lost(error, f'nothing came{waited}')}"
        raise PeerLost(sentence, peer) from error
