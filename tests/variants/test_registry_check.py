"""Differences between a rewritten layer and the original, in its outputs and in each of its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.variants.registry import Difference, difference


class _Layer(nn.Module):
    """Two linear layers with dropout; `wrong` names the fault to make."""

    def __init__(self, wrong: str = "", rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.drop, self.wrong = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(rate), wrong

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(self.first(x).relu())
        if self.wrong == "gradient of a parameter":
            weight = self.second.weight
            out = nn.functional.linear(hidden, weight.detach() + 1.001 * (weight - weight.detach()), self.second.bias)
        else:
            out = self.second(hidden)
        if self.wrong == "gradient of an input":
            out = out + 1e-4 * (x - x.detach())
        if self.wrong == "no gradient":
            out = out.detach() + 0 * self.second.bias
        if self.wrong == "output":
            out = out * (1 + 1e-4)
        if self.wrong == "not a number":
            out = out / 0
        return x * 1, torch.where(seen, out, 0.0)


def compared(wrong: str, rate: float = 0.0) -> Difference:
    torch.manual_seed(0)
    plain = _Layer(rate=rate)
    rewritten = copy.deepcopy(plain)
    rewritten.wrong = wrong
    return difference(
        plain, rewritten, [torch.randn(3, 4, requires_grad=True), torch.tensor([True, True, False, True])]
    )


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_equal_layers_do_not_differ_with_dropout_either(rate: float) -> None:
    assert compared("", rate).part == 0


@pytest.mark.parametrize(
    ("wrong", "what", "least", "most"),
    [
        ("output", "output 1", 0.9e-4, 1.1e-4),
        ("gradient of a parameter", "the gradient of second.weight", 0.9e-3, 1.1e-3),
        ("gradient of an input", "the gradient of input 0", 1e-6, 1e-3),
        ("no gradient", "the gradient of first.weight", 0.9, float("inf")),
        ("not a number", "output 1", float("inf"), float("inf")),
    ],
)
def test_what_differs_is_named_with_its_part_of_the_largest_value(
    wrong: str, what: str, least: float, most: float
) -> None:
    deviation = compared(wrong)
    assert least <= deviation.part <= most
    assert deviation.what == what


def test_a_layer_whose_output_lies_otherwise_in_memory_is_the_same() -> None:
    """Output gradients were drawn in the memory order of each output, so correct layers were refused."""

    class Turned(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).contiguous(memory_format=torch.channels_last)

    plain = nn.Conv2d(3, 4, 3)
    turned = Turned(3, 4, 3)
    turned.load_state_dict(plain.state_dict())
    assert difference(plain, turned, [torch.randn(2, 3, 8, 8, requires_grad=True)]).part == 0
