"""Layers in another memory format or type: near the plain ones, with the same parameters, strides and types outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.variants.check import difference
from varuna_capslog.variants.registry import TOLERANCES, known_variants


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x).sigmoid() * scale
        self.seen.append(x.detach())
        return x, self.out(x.mean((2, 3)))


@pytest.mark.parametrize("name", ["channels-last", "bfloat16"])
def test_it_is_near_the_plain_layer(name: str) -> None:
    torch.manual_seed(0)
    plain = _Layer()
    other = copy.deepcopy(plain)
    assert known_variants()[name].rewrite(other) == 1
    assert known_variants()[name].rewrite(other) == 0
    assert list(other.state_dict()) == list(plain.state_dict())
    given = [torch.rand(2, 8, 9, 7, requires_grad=True), torch.tensor(2.0)]
    found = difference(plain, other, given)
    assert 0 < found.part <= TOLERANCES[known_variants()[name].numerics]
    for ours, expected in zip(copy.deepcopy(other)(*given), plain(*given), strict=True):
        assert (ours.stride(), ours.dtype) == (expected.stride(), expected.dtype)
    if name == "bfloat16":
        assert (other.conv.weight.dtype, other(*given)[0].bfloat16().float().equal(other(*given)[0])) == (
            torch.float32,
            True,
        )
    else:
        assert other.seen[-1].is_contiguous(memory_format=torch.channels_last)
        assert not plain.seen[-1].is_contiguous(memory_format=torch.channels_last)


def test_layers_without_a_place_for_it_stay() -> None:
    assert known_variants()["channels-last"].rewrite(nn.Linear(2, 2)) is None
    assert known_variants()["bfloat16"].rewrite(nn.LayerNorm(2)) is None
