"""What parts of split layers are often made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from varuna_capslog.model.splitting.splitter import Splitter, share_of

__all__ = ["JoinedPositions", "PartsSum", "SumAndNorm", "linear_columns", "linear_rows"]


class PartsSum(nn.Module):
    """The sum of what the parts gave, first part first, and the bias that they left out."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, *parts: Tensor) -> Tensor:
        return _total(parts, self.bias)


class SumAndNorm(nn.Module):
    """x + dropout(sum of the parts + bias), normalised: where the parts of one operation meet again.

    Called with x and what each part gave, all of one shape; the first part counts first, whatever ranks they run on.

    Args:
        bias: of the operation, which the parts leave out.
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
    """The positions of all parts, first part first, along one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


def linear_rows(splitter: Splitter, whole: nn.Linear, part: int) -> nn.Linear:
    """An equal share of a linear map's outputs, with their biases."""
    ranges = [share_of(whole.out_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = whole.in_features, ranges[0][1] - ranges[0][0]
    share.weight = splitter.cut(whole.weight, 0, ranges)
    share.bias = None if whole.bias is None else splitter.cut(whole.bias, 0, ranges)
    return share


def linear_columns(splitter: Splitter, whole: nn.Linear, part: int) -> nn.Linear:
    """A linear map of an equal share of the inputs, without its bias, which counts once for all shares."""
    ranges = [share_of(whole.in_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = ranges[0][1] - ranges[0][0], whole.out_features
    share.weight = splitter.cut(whole.weight, 1, ranges)
    return share
