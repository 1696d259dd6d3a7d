"""The operator of captured graphs for fused attention under a band around the diagonal, such as a sliding window.

Such a mask follows from two numbers, so it is made where it is read, and made again for the backward. It is never
saved, sent or part of a graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend_in_band"]

_LIBRARY = torch.library.Library("capslog", "FRAGMENT")
_LIBRARY.define(
    "attend_in_band(Tensor query, Tensor key, Tensor value, int before, int after, *, float dropout_p=0.0, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)
_ALIGNMENT = 16
"""Rows of a mask begin at multiples of this; CUDA kernels would copy other masks (aligned_tensor, attention.cpp)."""


class _Form(NamedTuple):
    """Place of a saved tensor in the memory of the mask."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: int,
    after: int,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` of queries that each read the keys from `before` positions before their own
    to `after` positions behind it, by the kernels and with the bits of that function under such a mask.

    While the kernel runs, the mask takes sequence x sequence numbers of the query's type; what is saved grows linearly.
    """
    device = query.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else query.dtype
    sizes = query.shape[-2], key.shape[-2], before, after
    mask = _mask(*sizes, dtype, device)
    of_mask = mask.untyped_storage()._cdata
    # torch calls only the innermost of nested hooks, so ours call the next (offload, meters) for other tensors
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata == of_mask:
            return _Form(tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor.detach() if around is None else around[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Form):
            return _mask(*sizes, dtype, device).as_strided(*packed)
        tensor: Tensor = packed if around is None else around[1](packed)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)


def _mask(queries: int, keys: int, before: int, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to the products of queries and keys: 0 within the band, else minus infinity."""
    width = -(-keys // _ALIGNMENT) * _ALIGNMENT
    band = torch.ones(queries, width, dtype=torch.bool, device=device).triu_(-before).tril_(after)
    return torch.full((queries, width), float("-inf"), dtype=dtype, device=device).masked_fill_(band, 0.0)[:, :keys]


_LIBRARY.impl("attend_in_band", _attend, "CompositeImplicitAutograd")
attend_in_band = torch.ops.capslog.attend_in_band.default
