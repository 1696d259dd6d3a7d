"""Reads samples of a data set, collates batches, and sends them from a loader process to its rank."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.functions import call_function, import_function
from varuna_capslog.base.seeds import mix
from varuna_capslog.own_data.handed import handed

__all__ = ["SampleReader", "named_or_handed", "receive", "seeded", "send"]


# -- Random numbers of a sample depend only on its seed, in any process; other random numbers do not change.


_SAMPLE = 0x5341


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the CPU generator of torch, `random` and numpy's global generator from these numbers, and restore their
    states at the end. Only one thread of a process may be inside the block.
    """
    seed = mix(_SAMPLE, *numbers)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (users draw from it)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


# -- Reads samples of a data set and collates batches


def named_or_handed(keys: Mapping[str, Any], name: str) -> Any:
    """Return the function that a key of the `data` section names, else the object passed under that name, else None."""
    if keys[name] is not None:
        return import_function(keys[name], f"data.{name}={keys[name]!r}")
    return None if keys["given"] is None else handed(Path(keys["given"]), name)


class SampleReader:
    """Reader of a data set's batches, which are equal in every process.

    Args:
        keys: the config's `data` section as plain values.
        seed: seed of the run; with the epoch and the sample's number it seeds a sample's random numbers.
    """

    def __init__(self, keys: Mapping[str, Any], seed: int) -> None:
        self._keys, self._seed = keys, seed
        self._sets: dict[str, Any] = {}
        self._collate: Any = None

    def dataset(self, split: str) -> Any:
        """Return the data set of a split, "dataset" or "val"; None without validation data. Raises CapslogError where
        its function fails, or where it is not map-style.
        """
        if split not in self._sets:
            self._sets[split] = self._opened(split)
        return self._sets[split]

    def read(self, split: str, epoch: int, samples: Sequence[int]) -> Any:
        """Return the batch of these samples. Raises CapslogError, which names the samples, where they cannot be read or
        collated.
        """
        dataset, loaded = self.dataset(split), []
        for sample in samples:
            with seeded(self._seed, epoch, sample):
                try:
                    loaded.append(dataset[sample])
                except CapslogError:
                    raise
                except Exception as error:
                    raise CapslogError(
                        f"sample {sample} of {_called(split)} cannot be read ({_cause(error)}); mend or remove it"
                    ) from error
        if self._collate is None:
            self._collate = named_or_handed(self._keys, "collate") or default_collate
        with seeded(self._seed, epoch, *samples):
            try:
                return self._collate(loaded)
            except CapslogError:
                raise
            except Exception as error:
                raise CapslogError(
                    f"the samples {list(samples)} of {_called(split)} do not collate ({_cause(error)}); make all "
                    "samples alike, or give a collate function that pads them to one size (data.collate)"
                ) from error

    def _opened(self, split: str) -> Any:
        name, arguments = self._keys[split], "arguments" if split == "dataset" else f"{split}_arguments"
        if name is not None:
            dataset = call_function(name, f"data.{split}={name!r}", **self._keys[arguments])
        else:
            dataset = named_or_handed(self._keys, split)
        if dataset is None and split == "val":
            return None
        if isinstance(dataset, (DataLoader, IterableDataset)):
            raise CapslogError(
                f"data.{split} is a {type(dataset).__name__}, whose order is its own; give a map-style dataset (one "
                "with __getitem__ and __len__), since the run decides which samples make which step"
            )
        if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise CapslogError(
                f"data.{split} is a {type(dataset).__name__}; give a map-style dataset, with __getitem__ and __len__"
            )
        return dataset


def _called(split: str) -> str:
    return "the data set" if split == "dataset" else "the validation data"


def _cause(error: Exception) -> str:
    """Return the error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# -- Sends any picklable value through a pipe; the bytes of tensors and arrays follow the pickle, uncopied.
#
# Small tensors of a message, such as labels and boxes of many images, share one block of memory. Each large tensor has
# memory of its own, so that a program that keeps some labels does not keep the images.


_HEAD = struct.Struct("<QQ")
_ALIGNMENT = 64
"""Alignment of each tensor in the block, in bytes, as in torch's own memory: some CPU kernels round by alignment."""
_LARGE = 1 << 16
"""Smallest size, in bytes, of a tensor that has memory of its own."""


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
    """Write one value. Raises the errors of pickling, before anything is written, and those of a closed pipe."""
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
    """Read one value. Raises EOFError where the pipe was closed."""
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
    """Return the bytes that a small tensor takes in the block."""
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
