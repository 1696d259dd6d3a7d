"""Several tensors of any dtype, shape and memory format as one message between neighbouring stages.

A header of fixed size describes the tensors, so shapes may differ between microbatches; the ranks need to agree only on
the number of tensors of a cut. Small tensors travel in one frame with the header. Only the section "between processes"
uses torch.distributed; packing knows nothing of Varuna or of processes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import PeerLost, why_lost
from varuna_capslog.model.chain import TensorSpec

__all__ = ["Bundle", "Expected", "Room", "Sending", "host_tensor", "pack", "peer_errors", "send", "unpack"]

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
_MAGIC_COLUMN, _NUMBER, _COUNT, _INSIDE = range(4)
"""Columns of a header's first row: its mark, the microbatch's number, the number of tensors, and whether the payload
lies behind the header in the same frame."""
_ALIGNED = 16
_LARGEST_FRAME = 1 << 19


@dataclass(frozen=True)
class Bundle:
    """Tensors that cross a cut together, or None where a gradient is absent.

    Has the methods that Varuna calls on its single tensor. `.to(device)` copies, so that an in-place operation after a
    cut cannot change the tensors in host memory, from which the stage is recomputed.
    """

    tensors: tuple[Tensor | None, ...]
    host: Bundle | None = None

    def to(self, device: torch.device | str) -> Bundle:
        """Return copies on `device`, which keep a reference to their originals."""
        copies = tuple(None if tensor is None else tensor.to(device, copy=True) for tensor in self.tensors)
        return Bundle(copies, host=self.host or self)

    def cpu(self) -> Bundle:
        """Return the tensors on the host: the originals of this copy, else copies."""
        if self.host is not None:
            return self.host
        return Bundle(tuple(None if tensor is None else self.to_host(tensor.detach()) for tensor in self.tensors))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host."""
        return tensor.cpu()


# -- the format


Kind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and strides of a dense tensor."""


class Form(NamedTuple):
    """Layout of a message; messages whose tensors have equal kinds share one form.

    header: int64 [1 + n, 3 + 2 * MAX_DIMS], with microbatch 0 and a payload that travels apart. kinds: of the n
    tensors; None: no tensor. places: byte offset of each tensor in a frame. frame_bytes: size of header and payload.
    """

    header: np.ndarray[Any, np.dtype[np.int64]]
    kinds: tuple[Kind | None, ...]
    places: tuple[int, ...]
    frame_bytes: int

    def within(self, frame: Tensor) -> list[Tensor | None]:
        """Return the tensors as views of a frame's bytes."""
        return [
            None if kind is None else frame.view(kind[0]).as_strided(kind[1], kind[2], place // kind[0].itemsize)
            for kind, place in zip(self.kinds, self.places, strict=True)
        ]

    def empty(self) -> list[Tensor | None]:
        """Return new tensors without values, as by `host_tensor`."""
        return [None if kind is None else host_tensor(*kind) for kind in self.kinds]

    def write(self, frame: Tensor, microbatch: int, inside: bool) -> None:
        """Write the header of this microbatch's message. inside: the payload lies behind it."""
        words = _words(frame, len(self.kinds))
        words[:] = self.header
        words[0, _NUMBER], words[0, _INSIDE] = microbatch, inside


_FORMS = 256
"""Forms that a process caches; to make a form takes longer than to send a message."""


@functools.lru_cache(_FORMS)
def form_of(kinds: tuple[Kind | None, ...]) -> Form:
    """Return the form of messages with these tensors.

    Raises CapslogError for a dtype or a number of dimensions that the format does not have.
    """
    header = np.zeros((1 + len(kinds), _ROW), np.int64)
    header[0, _MAGIC_COLUMN], header[0, _COUNT] = _MAGIC, len(kinds)
    places, end = [], _aligned(header.nbytes)
    for row, kind in zip(header[1:], kinds, strict=True):
        places.append(end)
        if kind is None:
            continue
        dtype, shape, stride = kind
        dims = len(shape)
        if dtype not in _CODES or dims > MAX_DIMS:
            raise CapslogError(
                f"a tensor {list(shape)} of {dtype} cannot cross a cut; give one of at most {MAX_DIMS} dimensions and "
                "an ordinary dtype"
            )
        row[:3] = 1, _CODES[dtype], dims
        row[3 : 3 + dims], row[3 + MAX_DIMS : 3 + MAX_DIMS + dims] = shape, stride
        end = _aligned(end + math.prod(shape) * dtype.itemsize)
    return Form(header, kinds, tuple(places), end)


@functools.lru_cache(_FORMS)
def _form_of_header(content: bytes, count: int) -> Form:
    """Return the form that a received header describes. content: the header, with microbatch and payload flag 0."""
    first, *rows = np.frombuffer(content, np.int64).reshape(1 + count, _ROW).tolist()
    if first[_MAGIC_COLUMN] != _MAGIC or first[_COUNT] != count:
        raise CapslogError("a message between stages has no header of this plugin; run the same plugin on every rank")
    kinds: list[Kind | None] = []
    for there, code, dims, *sizes in rows:
        shape, stride = sizes[:dims], sizes[MAX_DIMS : MAX_DIMS + dims]
        kinds.append((_DTYPES[code], tuple(shape), tuple(stride)) if there else None)
    return form_of(tuple(kinds))


class Message(NamedTuple):
    """Tensors and bytes of a message. frame: the header, and the payload if the frame has room for it. apart: otherwise
    views of the tensors' bytes. frame_bytes: size of a frame with room for header and payload.
    """

    tensors: list[Tensor | None]
    frame: Tensor
    apart: list[Tensor]
    frame_bytes: int


def pack(tensors: Sequence[Tensor | None], microbatch: int, frame_bytes: int) -> Message:
    """Return the message of a microbatch. frame_bytes: least size of the frame.

    Raises CapslogError as `form_of`, and for tensors that are not strided.
    """
    dense = [None if tensor is None else _dense(tensor) for tensor in tensors]
    kinds = (None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride()) for tensor in dense)
    form = form_of(tuple(kinds))
    inside = form.header.nbytes < form.frame_bytes <= frame_bytes
    frame = _host_bytes(max(form.header.nbytes, frame_bytes))
    form.write(frame, microbatch, inside)
    if not inside:
        return Message(dense, frame, _bytes(dense), form.frame_bytes)
    for tensor, place in zip(dense, form.within(frame), strict=True):
        if tensor is not None and place is not None:
            place.copy_(tensor)
    return Message(dense, frame, [], form.frame_bytes)


def unpack(frame: Tensor, count: int, microbatch: int) -> Message:
    """Return the message of `count` tensors that begins with this frame; tensors that travel apart have no values yet.

    Raises CapslogError for an invalid header, or a message of another microbatch.
    """
    header = _words(frame, count).copy()
    number, inside = int(header[0, _NUMBER]), bool(header[0, _INSIDE])
    header[0, _NUMBER] = header[0, _INSIDE] = 0
    form = _form_of_header(header.tobytes(), count)
    if number != microbatch:
        raise CapslogError(
            f"a message of microbatch {number} came where microbatch {microbatch} was due; the ranks are out of step: "
            "give all of them the same batch and chunk sizes"
        )
    tensors = form.within(frame) if inside else form.empty()
    return Message(tensors, frame, [] if inside else _bytes(tensors), form.frame_bytes)


def _header_bytes(count: int) -> int:
    """Return the bytes of the header for `count` tensors."""
    return (1 + count) * _ROW * 8


def _words(frame: Tensor, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a view of a frame's header, int64 [1 + count, 3 + 2 * MAX_DIMS]."""
    return frame.numpy()[: _header_bytes(count)].view(np.int64).reshape(1 + count, _ROW)


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor of the same values without gaps in memory, and with conjugation and negation carried out."""
    if tensor.layout != torch.strided:
        raise CapslogError(
            f"a tensor {list(tensor.shape)} of {tensor.layout} cannot cross a cut; give a dense one, as by .to_dense()"
        )
    dense = tensor.detach().resolve_conj().resolve_neg()
    if not dense.is_contiguous() and TensorSpec.of(dense).stride != dense.stride():
        return dense.contiguous()
    return dense


def host_tensor(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor without values, in memory that torch does not count: on a CPU, torch would count it as device
    memory. The tensor is no view, so that code behind a cut may change it in place.
    """
    storage = _host_bytes(math.prod(shape) * dtype.itemsize).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)


def _host_bytes(count: int) -> Tensor:
    return torch.from_numpy(np.empty(count, np.uint8))


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def _bytes(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return views of the bytes of non-empty dense tensors, in memory order; one element may have any strides."""
    return [
        tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
        for tensor in tensors
        if tensor is not None and tensor.numel()
    ]


# -- between processes


class Sending:
    """Message under way, and the memory that it needs."""

    def __init__(self, works: list[Any], buffers: list[Tensor], peer: int) -> None:
        self._works, self._buffers, self._peer = works, buffers, peer

    def wait(self, timeout: datetime.timedelta) -> None:
        """Wait until the memory may be used again. Raises PeerLost."""
        with peer_errors(f"sending to rank {self._peer}", self._peer, timeout):
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
        # large tensors are better sent from their own memory than copied into a frame
        self.num_bytes = self._largest if self._largest <= _LARGEST_FRAME else 0
        self._largest = 0


def send(bundle: Bundle, microbatch: int, peer: int, gradients: bool, room: Room) -> Sending:
    """Start sending host tensors to `peer`; they must not change before `Sending.wait`. Raises PeerLost."""
    message = pack(bundle.tensors, microbatch, room.num_bytes)
    room.note(message.frame_bytes)
    tag = _GRADIENTS if gradients else _ACTIVATIONS
    buffers = [message.frame, *message.apart]
    with peer_errors(f"sending to rank {peer}", peer):
        # tensors that do not fit into the frame have another tag: receives of the next frames may be posted already
        works = [dist.isend(buffer, peer, tag=tag + _LOOSE * (buffer is not message.frame)) for buffer in buffers]
        return Sending(works, buffers, peer)


class Expected:
    """Posted receive of a frame; `take` returns the message."""

    def __init__(self, count: int, peer: int, gradients: bool, room: Room) -> None:
        self._count, self._peer, self._gradients, self._room = count, peer, gradients, room
        self._tag = _GRADIENTS if gradients else _ACTIVATIONS
        self._frame = _host_bytes(max(_header_bytes(count), room.num_bytes))
        with peer_errors(f"waiting for rank {peer}", peer):
            self._work: Any = dist.irecv(self._frame, peer, tag=self._tag)

    def take(self, microbatch: int, timeout: datetime.timedelta) -> Bundle:
        """Wait for the frame, and for tensors that did not fit into it.

        Raises PeerLost when the peer is gone or sends nothing for `timeout`, CapslogError for any other message.
        """
        content = "gradients" if self._gradients else "activations"
        doing = f"waiting for {content} of microbatch {microbatch} from rank {self._peer}"
        with peer_errors(doing, self._peer, timeout):
            self._work.wait(timeout)
            message = unpack(self._frame, self._count, microbatch)
            self._room.note(message.frame_bytes)
            works: list[Any] = [dist.irecv(part, self._peer, tag=self._tag + _LOOSE) for part in message.apart]
            for work in works:
                work.wait(timeout)
        return Bundle(tuple(message.tensors))


@contextlib.contextmanager
def peer_errors(doing: str, peer: int | None, timeout: datetime.timedelta | None = None) -> Iterator[None]:
    """Turn errors of gloo and NCCL inside the block into a PeerLost that says what this rank was doing."""
    try:
        yield
    except RuntimeError as error:
        of_torch = isinstance(error, dist.DistBackendError)
        if not of_torch and not any(word in str(error) for word in ("gloo", "onnection", "imed out", "NCCL")):
            raise
        waited = f" for {timeout.total_seconds():g} s" if timeout is not None else ""
        sentence = f"rank {dist.get_rank()} was {doing}: {why_lost(error, f'nothing came{waited}')}"
        raise PeerLost(sentence, peer) from error
