"""The parts of captured layers are found by what their operations do, whatever their modules are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import OneOf
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.layer_parts import parts_of_layer

WIDTH = 8


def captured(block: nn.Module, example: Any = None) -> Layer:
    """Return a layer with this block, behind a layer of another one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), block])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.blocks:
                x = part(x)
            return x

    example = {"x": torch.zeros(2, 4, WIDTH)} if example is None else example
    return Chain.from_module(Model(), None, example, evaluates=False).layers[1]


def operations(layer: Layer, part: str) -> list[list[str]]:
    """Return the names of the operations and modules of each run of a part."""
    runs = []
    for found in parts_of_layer(layer, [part])[1]:
        called = [node for node in found.body.graph.nodes if node.op.startswith("call")]
        runs.append([str(getattr(node.target, "__name__", node.target)).removeprefix("blocks.1.") for node in called])
    return runs


class Misnamed(nn.Module):
    """Block whose modules are called by others' names, with queries that others must not move across its dropout."""

    def __init__(self, order: str = "") -> None:
        super().__init__()
        self.order = order
        self.mlp, self.norm = RootMeanSquare(), nn.Linear(WIDTH, 3 * WIDTH)
        self.gate, self.up, self.attention = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.softmax, self.dropout = nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.mlp(x))
        query, key, value = (made[..., at * WIDTH : (at + 1) * WIDTH] for at in range(3))
        scores = query @ key.transpose(-2, -1)
        if self.order == "draws between":
            value = self.dropout(value)
        y = self.softmax(x + self.dropout(torch.softmax(scores, -1)) @ value)
        if self.order == "changes in place":
            y += value
        return y + self.attention(F.silu(self.gate(y)) * self.up(y))


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_parts_are_what_operations_do_and_not_their_names() -> None:
    layer = captured(Misnamed())
    assert operations(layer, "norms") == [["mlp"]]
    assert operations(layer, "mlp") == [["gate", "silu", "up", "mul", "attention"]]
    assert operations(layer, "attention") == [["matmul", "softmax", "dropout", "matmul"]]
    module, found = parts_of_layer(layer, ["attention", "mlp", "norms"])
    assert [(part.part, part.draws) for part in found] == [("attention", True), ("mlp", False), ("norms", False)]
    x = torch.randn(2, 4, WIDTH)
    torch.manual_seed(1)
    expected = layer.module(x)
    torch.manual_seed(1)
    for part in found:
        setattr(module, part.target, part.body)
    assert torch.equal(module(x), expected)


class Changing(nn.Module):
    """Attention that changes its values in place behind their product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        query, value = self.query(x), self.value(x)
        made = torch.softmax(query @ query.transpose(-2, -1), -1) @ value
        return made + value.mul_(scale)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Changing()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks[1](self.blocks[0](x), 0.5)
        return result


def test_what_cannot_be_moved_together_is_refused() -> None:
    """Another order of draws would give other random numbers; a changed tensor, another second run."""
    with pytest.raises(CapslogError, match=r"attention of layer 'blocks.1' is no single run .*, between them, draws"):
        parts_of_layer(captured(Misnamed("draws between")), ["attention"])
    chain = Chain.from_module(Scaled(), None, {"x": torch.zeros(2, 4, WIDTH)}, evaluates=False)
    with pytest.raises(CapslogError, match=r"is no single run of operations \('mul_' changes, behind them, what ent"):
        parts_of_layer(chain.layers[1], ["attention"])


def test_running_statistics_do_not_count_twice() -> None:
    """A second run in the backward would have changed the buffers of the batch norm."""
    wide = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CapslogError, match=r"\('blocks.1' keeps running statistics, which would count twice\)"):
        parts_of_layer(captured(wide), ["mlp"])


def test_modules_are_followed_only_where_their_operators_stay_the_same() -> None:
    """A trace takes `y += value` for `y = y + value`, which another name of the tensor would not see."""
    message = r"module 'blocks.1' \(Misnamed\), which cannot be divided \(a trace of its code runs other operators\)"
    with pytest.raises(CapslogError, match=message):
        parts_of_layer(captured(Misnamed("changes in place")), ["attention"])


class Experts(nn.Module):
    """Experts side by side; the softmax of their router stands between no two products of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)
        self.first, self.second = (nn.Parameter(torch.randn(2, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        flat = rows.flatten(0, 1)
        made = torch.bmm(torch.bmm(flat.expand(2, -1, -1), self.first).relu(), self.second)
        shares = self.router(flat).softmax(-1).t().unsqueeze(-1)
        return x + (made * shares).sum(0).view_as(x)


def test_products_of_experts_and_what_is_missing() -> None:
    layer = captured(Experts())
    assert operations(layer, "experts") == [["bmm", "relu", "bmm"]]
    with pytest.raises(CapslogError, match=r"layer 'blocks.1' has no attention: no softmax stands between two"):
        parts_of_layer(layer, ["attention"])
    with pytest.raises(CapslogError, match=r"has no mlp: no two linear maps .*; take 'mlp' out for this layer"):
        parts_of_layer(layer, ["norms", "mlp"])


class Hidden(nn.Module):
    """Block whose code does something else in eval mode, so that its norm is not seen alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.line(self.norm(x)), 0.1, training=self.training)


def test_layers_that_do_not_show_their_parts_are_refused() -> None:
    with pytest.raises(CapslogError, match=r"has its norms beside other work in module 'blocks.1' \(Hidden\)"):
        parts_of_layer(captured(Hidden()), ["norms"])
    with pytest.raises(CapslogError, match=r"layer 'blocks.1' shows no mlp outside module 'blocks.1' \(Hidden\)"):
        parts_of_layer(captured(Hidden()), ["mlp"])
    with pytest.raises(CapslogError, match=r"layer 'mine' is a LayerNorm, and only a captured layer shows its par"):
        parts_of_layer(Layer("mine", nn.LayerNorm(WIDTH)), ["norms"])
    sizes = OneOf([{"x": torch.zeros(rows, 4, WIDTH)} for rows in (2, 3)])
    with pytest.raises(CapslogError, match=r"layer 'blocks.1' has a graph for each of several sizes"):
        parts_of_layer(captured(Experts(), sizes), ["norms"])
