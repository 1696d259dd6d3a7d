"""Models that test whether their values are finite are captured on the branch for finite ones, as RT-DETR's encoder."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.model.chain import Chain


class Clamping(nn.Module):
    """Block that clamps values that are not finite; `question` is its test of them."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.linear, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.question == "finite" and self.training and not torch.isfinite(x).all():
            x = torch.clamp(x, -1, 1)
        if self.question == "inf or nan" and (x.isinf().any() or torch.isnan(x).any().item()):
            x = torch.clamp(x, -2, 2)
        if self.question == "either" and (torch.isinf(x) | torch.isnan(x)).any():
            x = torch.clamp(x, -2, 2)
        if self.question == "positive" and (x > 0).all():
            x = x + 1
        return x


class Stack(nn.Module):
    def __init__(self, question: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Clamping(question) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("question", ["finite", "inf or nan", "either"])
def test_values_are_taken_for_finite(question: str) -> None:
    """Values beyond the clamp's bounds pass unclamped, too; the tests themselves are not in the layers."""
    stack, x = Stack(question), 10 * torch.randn(2, 4)
    chain = Chain.from_module(stack, None, example_inputs={"x": x})
    assert len(chain) == 2
    assert torch.equal(chain.run({"x": x})["output"], stack(x))
    targets = [str(node.target) for layer in chain.layers for node in layer.module.graph.nodes]
    assert not any(name in target for target in targets for name in ("isfinite", "isinf", "isnan"))


def test_other_branches_on_values_stay_python() -> None:
    """Both sides of the branch are taken, by the values of each call."""
    stack = Stack("positive")
    with torch.no_grad():
        stack.blocks[0].linear.weight.copy_(torch.eye(4))
    chain = Chain.from_module(stack, None, example_inputs={"x": torch.randn(2, 4)})
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        assert torch.equal(chain.run({"x": x})["output"], stack(x))
    assert torch.equal(stack.blocks[0](torch.ones(2, 4)), stack.blocks[0].linear(torch.ones(2, 4)) + 1)


def test_copies_of_a_captured_layer_share_its_graph_and_not_its_parameters() -> None:
    """Estimates rely on it: the copy computes with its own weights."""
    x = torch.randn(2, 4)
    layer = Chain.from_module(Stack("finite"), None, example_inputs={"x": x}).layers[0].module
    copied = copy.deepcopy(layer)
    assert copied.graph is layer.graph
    before = layer(x)
    assert torch.equal(copied(x), before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), before)
    assert copied(x).abs().max() == 0
