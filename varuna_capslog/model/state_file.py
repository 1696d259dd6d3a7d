"""Reads files of tensors that may come from untrusted sources: torch.save's, and state dicts of other programs.

No code of a file runs, and no file takes more memory than it has bytes on the disk.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes

__all__ = ["load_tensors", "read_state_file"]


def load_tensors(path: Path | str, mapped: bool = False) -> Any:
    """Load a file that torch.save wrote, tensors and plain values only, on the CPU.

    mapped: leave the tensors in the file until they are read.

    Raises:
        OSError: the file cannot be read.
        CapslogError: torch.save did not write it, it holds other objects, or it is larger unpacked than on the disk.
    """
    size = _size_of(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            # torch does not compress: if members exceed the file, they are compressed or listed twice
            if unpacked > size:
                raise CapslogError(
                    f"it unpacks to {format_bytes(unpacked)} from {format_bytes(size)}, but torch.save does "
                    "not compress"
                )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, CapslogError):
        raise
    except Exception as error:  # the unpickler raises many kinds of errors on foreign bytes
        text = str(error).partition("\n")[0]
        raise CapslogError(f"torch cannot read it, {type(error).__name__}{f': {text}' if text else ''}") from error


def read_state_file(path: Path | str) -> dict[str, Tensor]:
    """Return the state dict of `FILE.safetensors` or of a torch file: `{"model": state dict, ...}` or a bare state
    dict. Raises CapslogError: missing, unreadable, holds other objects than tensors and plain values, or no state dict.
    """
    if Path(path).suffix == ".safetensors":
        return _safetensors(path)
    try:
        content = load_tensors(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except CapslogError as error:
        raise CapslogError(
            f"weights file {str(path)!r} is no torch file or holds more than tensors (a training checkpoint with its "
            f"options): {error}; save only {{'model': state_dict}} and give that file"
        ) from error
    state = content.get("model", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CapslogError(f"weights file {str(path)!r} holds no state dict; expected {{'model': {{name: tensor}}}}")
    return dict(state)


def _safetensors(path: Path | str) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise CapslogError(
            f"weights file {str(path)!r} needs the package safetensors; install it, or give a torch file"
        ) from None
    try:
        _size_of(path)
        return dict(load_file(path))
    except OSError as error:
        raise _unreadable(path, error) from None
    except Exception as error:
        raise CapslogError(
            f"weights file {str(path)!r} is no safetensors file, or it is cut off ({error}); write it again"
        ) from error


def _size_of(path: Path | str) -> int:
    """Return a file's bytes. Raises OSError; CapslogError for a device, or a pipe, which would block the reader."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise CapslogError("it is no file")
    return about.st_size


def _unreadable(path: Path | str, error: OSError) -> CapslogError:
    return CapslogError(f"weights file {str(path)!r} cannot be read: {error.strerror or error}; check the path")
