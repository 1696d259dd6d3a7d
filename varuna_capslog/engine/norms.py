"""The norm of one gradient, as one operator of any size: on fake tensors it is one step, not one for every piece."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm_in_pieces", "norm_of", "piece_of"]

_ONE_PIECE = 1 << 20
_PIECE = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 22
"""Elements. Larger gradients are taken in pieces, since torch first copies what it takes to float64 in fresh memory. On
a CPU, that costs five times as much as the norm; a GPU takes larger pieces, of 32 MiB in float64."""


def norm_of(gradient: Tensor) -> Tensor:
    """Norm in float64, added in one order for each shape; of a complex gradient, over both parts."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.numel() <= _ONE_PIECE:
        return torch.linalg.vector_norm(gradient, dtype=torch.float64)
    norm: Tensor = norm_in_pieces(gradient.reshape(-1))
    return norm


def piece_of(device_type: str) -> int:
    """Return the elements of one piece of a large gradient on such a device."""
    return _PIECE.get(device_type, _LARGE_PIECE)


@torch.library.custom_op("capslog::norm_in_pieces", mutates_args=())
def norm_in_pieces(gradient: Tensor) -> Tensor:
    """Norm of the norms of a flat gradient's pieces, in float64."""
    pieces = gradient.split(piece_of(gradient.device.type))
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


@norm_in_pieces.register_fake
def _(gradient: Tensor) -> Tensor:
    return gradient.new_empty((), dtype=torch.float64)
