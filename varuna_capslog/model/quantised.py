"""Frozen linear layers whose weights are stored in 4 or 8 bits, as by bitsandbytes: for estimates of QLoRA.

`hugging_face` puts them below the adapters of peft, and `hollow` copies have them in place of bitsandbytes' own layers.
They have sizes but no values, so they cannot train. The bytes follow bitsandbytes 0.50.2, `functional.py`
(quantize_4bit) and `autograd/_functions.py`: 4 bits have a scale for each block of 64 numbers, 8 bits for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError

__all__ = ["BASES", "QuantisedLinear", "base_of"]

BASES = ("4bit", "4bit-double", "8bit")
"""Storage formats of a frozen weight: nf4 with float32 scales, nf4 with 8-bit scales (QLoRA, Sec. 3), and int8."""
_BLOCK, _SCALES_BLOCK = 64, 256
"""Count of numbers that share one scale, and of scales that share one second-level scale."""
_TABLE_BYTES, _OFFSET_BYTES = 16 * 4, 4
"""Bytes of the 16 values of nf4, and of the mean of the scales, for each layer."""


# -- Operators on tensors without values: they allocate, and keep for the backward, the bytes that bitsandbytes does.

_LIBRARY = torch.library.Library("capslog", "FRAGMENT")
_LIBRARY.define("dequantised(Tensor codes, Tensor scales, int rows, int columns, ScalarType dtype) -> Tensor")
_LIBRARY.define("rows_in_8_bits(Tensor x) -> Tensor")
_LIBRARY.define(
    "frozen_product(Tensor codes, Tensor scales, Tensor? rows_in_8_bits, Tensor x, Tensor transposed) -> Tensor"
)
_OPERATORS = torch.ops.capslog


def _dequantised(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


def _rows_in_8_bits(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def _product(codes: Tensor, scales: Tensor, rows_in_8_bits: Tensor | None, x: Tensor, transposed: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], transposed.shape[1]))


def _without_values(*arguments: Any) -> Any:
    raise CapslogError(
        "layers of bitsandbytes, whose weights are in 4 or 8 bits, can be estimated, but not measured; set "
        "profile.source=estimated"
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    codes, scales, rows_in_8_bits, x, transposed = inputs
    ctx.shape, ctx.dtype = (transposed.shape[1], transposed.shape[0]), x.dtype
    # the backward of 8 bits holds the input, although it does not read it (MatMul8bitLt.forward, ctx.tensors)
    ctx.save_for_backward(codes, scales, *([] if rows_in_8_bits is None else [x]))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales = ctx.saved_tensors[:2]
    weight = _OPERATORS.dequantised(codes, scales, *ctx.shape, ctx.dtype)
    return None, None, None, gradient @ weight, None


for _name, _fake in (
    ("dequantised", _dequantised),
    ("rows_in_8_bits", _rows_in_8_bits),
    ("frozen_product", _product),
):
    torch.library.register_fake(f"capslog::{_name}", _fake, lib=_LIBRARY)
    _LIBRARY.impl(_name, _without_values, "CompositeExplicitAutograd")
torch.library.register_autograd("capslog::frozen_product", _backward, setup_context=_keep, lib=_LIBRARY)


class QuantisedLinear(nn.Module):
    """Linear layer with a frozen weight in 4 or 8 bits, on the device of `linear`.

    base: one of `BASES`. `codes` holds the weight's numbers; `scales`, as bytes, all else that the format stores.
    """

    def __init__(self, linear: nn.Linear, base: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self._base = linear.in_features, linear.out_features, base
        numbers, device = linear.in_features * linear.out_features, linear.weight.device
        if base == "8bit":
            codes, scale_bytes = (
                torch.empty(linear.out_features, linear.in_features, dtype=torch.int8, device=device),
                4 * linear.out_features,
            )
        else:
            codes = torch.empty(-(-numbers // 2), 1, dtype=torch.uint8, device=device)
            scale_bytes = _scale_bytes(-(-numbers // _BLOCK), base == "4bit-double")
        scales = torch.empty(scale_bytes, dtype=torch.uint8, device=device)
        self.codes, self.scales = nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias: [..., out] of the dtype of x; on fake tensors only."""
        rows, in_8_bits = x.reshape(-1, self.in_features), None
        if self._base == "8bit":
            in_8_bits, transposed = _OPERATORS.rows_in_8_bits(rows.to(torch.float16)), self.codes.t()
        else:
            size = self.out_features, self.in_features
            transposed = _OPERATORS.dequantised(self.codes, self.scales, *size, x.dtype).t()
        product = _OPERATORS.frozen_product(self.codes, self.scales, in_8_bits, rows, transposed)
        product = product.reshape(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


def base_of(module: nn.Module) -> str | None:
    """Return the format in `BASES` of the weight of a linear layer of bitsandbytes; None for other modules."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.partition(".")[0] == "bitsandbytes"}
    if "Linear8bitLt" in names:
        return "8bit"
    if "Linear4bit" in names:
        return "4bit-double" if getattr(module.weight, "compress_statistics", False) else "4bit"
    return None


def _scale_bytes(blocks: int, double: bool) -> int:
    if not double:
        return 4 * blocks + _TABLE_BYTES
    return blocks + 4 * -(-blocks // _SCALES_BLOCK) + _OFFSET_BYTES + _TABLE_BYTES
