"""Modules that parts of split layers often consist of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from varuna_capslog.model.splitting.splitter import Splitter, share_of

__all__ = ["JoinedPositions", "PartsSum", "SumAndNorm", "linear_columns", "linear_rows"]


class PartsSum(nn.Module):
    """Sum of the parts' results, first part first, and of the bias that they leave out."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, *parts: Tensor) -> Tensor:
        return _total(parts, self.bias)


class SumAndNorm(nn.Module):
    """x + dropout(sum of the parts + bias), normalised: joins the parts of one operation.

    Called with x and the result of each part, of one shape; the first part is added first, whatever ranks they run on.

    Args:
        bias: of the operation; the parts leave it out.
        norm: None: the sum is returned as it is.
    """

    def __init__(self, bias: nn.Parameter | None, dropout: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.bias, self.dropout, self.norm = bias, dropout, norm

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        x = x + self.dropout(_total(parts, self.bias))
        return x if self.norm is None else self.norm(x)


def _total(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if bias is None else total + bias


class JoinedPositions(nn.Module):
    """Positions of all parts, first part first, along one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


def linear_rows(splitter: Splitter, linear: nn.Linear, part: int) -> nn.Linear:
    """Return a linear map with an equal share of the outputs, with their biases."""
    ranges = [share_of(linear.out_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = linear.in_features, ranges[0][1] - ranges[0][0]
    share.weight = splitter.cut(linear.weight, 0, ranges)
    share.bias = None if linear.bias is None else splitter.cut(linear.bias, 0, ranges)
    return share


def linear_columns(splitter: Splitter, linear: nn.Linear, part: int) -> nn.Linear:
    """Return a linear map of an equal share of the inputs, without the bias, which counts once for all shares."""
    ranges = [share_of(linear.in_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = ranges[0][1] - ranges[0][0], linear.out_features
    share.weight = splitter.cut(linear.weight, 1, ranges)
    return share
