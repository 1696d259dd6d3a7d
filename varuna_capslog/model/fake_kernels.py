"""Shapes of operators that torch's kernels run and its fake tensors refuse; importing this module makes them known.

`torch._grouped_mm`, the product of experts, runs in float32 on processors and on CUDA devices, one product per expert;
its shape function takes 16-bit matrices only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

_ROW_BYTES = 16  # every row of the product begins at a multiple


def _grouped_mm(mode: FakeTensorMode, operator: Any, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the product of float32 matrices as the kernel lays it out; leave other types to torch's own function."""
    groups: Any = args[0] if args else kwargs.get("offs")
    if first.dtype != torch.float32 or second.dtype != torch.float32:
        return NotImplemented
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim():  # of all groups one matrix: the gradient of weights, or a batch
        batch = groups.shape[0] if first.dim() == 2 else first.shape[0]
        sizes = [batch, rows, columns]
    else:
        sizes = [rows, columns]
    step = _ROW_BYTES // first.element_size()
    padded = -(-columns // step) * step
    strides = [rows * padded, padded, 1][-len(sizes) :]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=torch.float32, device=first.device)


if torch.ops.aten._grouped_mm.default not in op_implementations_dict:  # a later torch may bring its own
    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)
