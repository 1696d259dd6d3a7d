"""The gradients of one layer as one flat tensor, of which each rank that holds the layer adds one slice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.host.offload import laid_out

__all__ = ["Slices", "gradient_type"]


def gradient_type(parameter: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient: the parameter's, or float32 for one of 16 bits that has a master."""
    return parameter.grad_dtype or parameter.dtype


class Slices:
    """Cuts the gradients of these parameters into slices.

    Args:
        parameters: by name; those that want a gradient.
        count: of the slices, which are equally long; the last ones may end in padding.

    A slice of a block travels as a row: its elements, and behind them, per parameter, 1 if the block has its gradient,
    else 0.

    Raises:
        CapslogError: gradients of several dtypes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], count: int) -> None:
        dtypes = {str(gradient_type(parameter)) for parameter in parameters.values()}
        if len(dtypes) > 1:
            raise CapslogError(
                f"several ranks hold a layer whose parameters are {' and '.join(sorted(dtypes))}; give all parameters "
                "of a layer one dtype, or set pipeline.replicas=1"
            )
        self._parameters, self._count = dict(parameters), count
        self._dtype = gradient_type(next(iter(parameters.values())))
        self._size = sum(parameter.numel() for parameter in parameters.values())
        self._width = math.ceil(self._size / count)

    def pack(self, blocks: dict[int, dict[str, Tensor]]) -> Tensor:
        """[slices, blocks, row], of blocks in rising order; empties `blocks`."""
        first = next(iter(self._parameters.values()))
        rows = first.new_empty(self._count, len(blocks), self._width + len(self._parameters), dtype=self._dtype)
        for place, block in enumerate(sorted(blocks)):
            gradients = blocks.pop(block)
            flat = self._flat(gradients)
            rows[:, place, : self._width] = flat.view(self._count, self._width)
            rows[:, place, self._width :] = flat.new_tensor([float(name in gradients) for name in self._parameters])
        return rows

    def add(self, rows: Sequence[Tensor], place: int) -> tuple[Tensor, list[str]]:
        """The sum of one slice over all blocks, in their order, and the names of the parameters that have a gradient.

        A gradient that a block lacks is not added as zeros: -0.0 would become 0.0.
        """
        flags = torch.stack([row[self._width :] for row in rows]).bool().tolist()
        present = [name for name, *row_flags in zip(self._parameters, *flags, strict=True) if any(row_flags)]
        if all(row_flags == flags[0] for row_flags in flags):
            total = rows[0][: self._width].clone()
            for row in rows[1:]:
                total.add_(row[: self._width])
            return total, present
        total = torch.zeros_like(rows[0][: self._width])
        end = 0
        for number, parameter in enumerate(self._parameters.values()):
            begin, end = end, end + parameter.numel()
            low, high = (min(max(at - place * self._width, 0), self._width) for at in (begin, end))
            parts = [row[low:high] for row, there in zip(rows, flags, strict=True) if there[number]]
            for position, part in enumerate(parts):
                total[low:high] = part if position == 0 else total[low:high] + part
        return total, present

    def unpack(self, flat: Tensor, present: Sequence[str]) -> dict[str, Tensor]:
        """The gradients by name, each in the layout of its parameter: parts of `flat`, which is all slices together."""
        gradients, at = {}, 0
        for name, parameter in self._parameters.items():
            if name in present:
                gradients[name] = flat.as_strided(parameter.shape, _dense(parameter), at)
            at += parameter.numel()
        return gradients

    def _flat(self, gradients: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, parameter in self._parameters.items():
            if name in gradients:
                gradient = laid_out(gradients[name], _dense(parameter))
                parts.append(gradient.as_strided((gradient.numel(),), (1,)))
            else:
                parts.append(parameter.new_zeros(parameter.numel(), dtype=self._dtype))
        parts.append(parts[0].new_zeros(self._count * self._width - self._size))
        return torch.cat(parts)


def _dense(parameter: nn.Parameter) -> tuple[int, ...]:
    """The strides of a gradient of this parameter: its own, or those without the gaps that it leaves in its memory."""
    return torch.empty_like(parameter, device="meta").stride()
