"""A file of weights that another program wrote: a state dict, by torch.save or as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["read_state_file"]


def read_state_file(path: Path | str) -> dict[str, Tensor]:
    """The state dict of `FILE.safetensors`, or of a torch file: `{"model": state dict, ...}` or a bare state dict.

    Raises:
        CapslogError: missing, unreadable, holds other objects than tensors and plain values, or no state dict.
    """
    if Path(path).suffix == ".safetensors":
        return _safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CapslogError(
            f"weights file {str(path)!r} cannot be read: {error.strerror or error}; check the path"
        ) from None
    except Exception as error:  # the unpickler trips over foreign bytes in many ways
        raise CapslogError(
            f"weights file {str(path)!r} is no torch file or holds more than tensors (a training checkpoint with its "
            f"options), torch says {type(error).__name__}; save only {{'model': state_dict}} and give that file"
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
        return dict(load_file(path))
    except OSError as error:
        raise CapslogError(
            f"weights file {str(path)!r} cannot be read: {error.strerror or error}; check the path"
        ) from None
    except Exception as error:
        raise CapslogError(
            f"weights file {str(path)!r} is no safetensors file, or it is cut off ({error}); write it again"
        ) from error
