"""Layers in another memory format or data type, or with other kernels: close to the plain layers, same interface."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.model.chain import Layer
from varuna_capslog.variants.registry import TOLERANCES, difference, known_variants
from varuna_capslog.variants.wrapped import drop_conversions


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x).sigmoid() * scale
        self.seen.append(x.detach())
        return x, self.out(x.mean((2, 3)))


@pytest.mark.parametrize("name", ["channels-last", "bfloat16", "onednn-off"])
def test_it_is_near_the_plain_layer(name: str) -> None:
    torch.manual_seed(0)
    plain = _Layer()
    rewritten = copy.deepcopy(plain)
    assert known_variants()[name].rewrite(rewritten) == 1
    assert known_variants()[name].rewrite(rewritten) == 0
    assert list(rewritten.state_dict()) == list(plain.state_dict())
    inputs = [torch.rand(2, 8, 9, 7, requires_grad=True), torch.tensor(2.0)]
    deviation = difference(plain, rewritten, inputs)
    assert 0 < deviation.part <= TOLERANCES[known_variants()[name].numerics]
    for ours, expected in zip(copy.deepcopy(rewritten)(*inputs), plain(*inputs), strict=True):
        assert (ours.stride(), ours.dtype) == (expected.stride(), expected.dtype)
    if name == "bfloat16":
        assert (rewritten.conv.weight.dtype, rewritten(*inputs)[0].bfloat16().float().equal(rewritten(*inputs)[0])) == (
            torch.float32,
            True,
        )
    elif name == "channels-last":
        assert rewritten.seen[-1].is_contiguous(memory_format=torch.channels_last)
        assert not plain.seen[-1].is_contiguous(memory_format=torch.channels_last)


def test_layers_without_a_place_for_it_stay() -> None:
    assert known_variants()["channels-last"].rewrite(nn.Linear(2, 2)) is None
    assert known_variants()["bfloat16"].rewrite(nn.LayerNorm(2)) is None
    assert known_variants()["onednn-off"].rewrite(nn.LayerNorm(2)) is None
    # the statistics of BatchNorm are collected by hooks
    assert known_variants()["compiled"].rewrite(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None


class _Switch(torch.autograd.Function):
    """Identity that notes whether oneDNN is enabled in its forward and its backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, notes: list[bool]) -> Tensor:
        context.notes = notes
        notes.append(torch.backends.mkldnn.enabled)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        context.notes.append(torch.backends.mkldnn.enabled)
        return gradient, None


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.notes = nn.Linear(2, 2), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        return _Switch.apply(self.linear(_Switch.apply(x, self.notes)), self.notes)


def test_onednn_is_off_while_the_layer_works_and_on_for_its_neighbours() -> None:
    """Three layers of one graph. oneDNN is enabled again after the layer, also if the layer raises."""
    layers = [_Noting() for _ in range(3)]
    known_variants()["onednn-off"].rewrite(layers[1])
    nn.Sequential(*layers)(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert [layer.notes for layer in layers] == [[True] * 4, [False] * 4, [True] * 4]
    with pytest.raises(RuntimeError):
        layers[1](torch.ones(1, 3))
    assert torch.backends.mkldnn.enabled


class _Failing(torch.autograd.Function):
    """Identity whose backward raises, like an operator that runs out of memory."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("no memory")


class _Unlucky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Failing.apply(super().forward(x))


def test_onednn_is_on_again_when_the_engine_drops_a_step_that_broke_off_in_the_layers_backward() -> None:
    layer = _Unlucky(2, 2)
    known_variants()["onednn-off"].rewrite(layer)
    engine_layer = EngineLayer(0, Layer("unlucky", layer), torch.device("cpu"), "float32", {})
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            layer(torch.ones(1, 2)).sum().backward()
        assert not torch.backends.mkldnn.enabled
        engine_layer.reset()
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def test_between_neighbours_with_channels_last_nothing_is_converted() -> None:
    """Each layer reads x and writes x and a second tensor; the loss also reads the second layer's x."""
    torch.manual_seed(0)
    apart = [_Layer() for _ in range(3)]
    for layer in apart:
        known_variants()["channels-last"].rewrite(layer)
    together = copy.deepcopy(apart)
    writes = [("x", "y")] * 3
    readers = {("x", 0): (1,), ("x", 1): (2, 3), ("x", 2): (3,), ("y", 2): (3,)}
    drop_conversions(together, writes, readers)
    runs = []
    for layers in (apart, together):
        x, formats = torch.rand(2, 8, 9, 7, generator=torch.Generator().manual_seed(1)), []
        for layer in layers:
            x, y = layer(x, torch.tensor(2.0))
            formats.append(x.is_contiguous(memory_format=torch.channels_last))
        runs.append((formats, x, y))
    assert [formats for formats, _, _ in runs] == [[False] * 3, [True, False, False]]
    assert torch.equal(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][2], runs[1][2])
    # a reader without channels-last gets a contiguous tensor, as before
    drop_conversions([together[0], nn.Identity(), together[2]], writes, readers)
    assert together[0](torch.rand(2, 8, 9, 7), torch.tensor(2.0))[0].is_contiguous()
