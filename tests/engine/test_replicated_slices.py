"""Sums of slices of a layer's gradients are those of one rank that has all blocks, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.replicated import Slices

SHAPES = {"weight": (3, 4), "scale": (), "conv": (2, 3, 2, 5), "bias": (7,), "unused": (4,)}


def parameters_of() -> dict[str, nn.Parameter]:
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    parameters["conv"].data = parameters["conv"].data.to(memory_format=torch.channels_last)
    return parameters


def blocks_of(parameters: dict[str, nn.Parameter], missing: bool) -> list[dict[str, Tensor]]:
    """Gradients of six blocks, in autograd's layouts; `missing`: some blocks lack some gradients."""
    blocks = []
    for number in range(6):
        block = {
            name: torch.randn_like(parameter)  # keeps the layout
            for name, parameter in parameters.items()
            if name != "unused" and not (missing and (number + len(name)) % 4 == 0)
        }
        blocks.append({name: gradient.mul_(10.0 ** (number % 3)) for name, gradient in block.items()})
    return blocks


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("owned", [((0, 1, 2), (3, 4, 5)), ((0,), (1, 2, 3, 4), (5,)), ((0, 3), (1, 4), (2, 5))])
def test_the_sums_are_those_of_one_rank(missing: bool, owned: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(3)
    parameters = parameters_of()
    blocks = blocks_of(parameters, missing)
    for block in blocks:
        for gradient in list(block.values())[:1]:
            gradient.view(-1)[0] = -0.0
    expected: dict[str, Tensor] = {}
    for block in blocks:
        for name, gradient in block.items():
            expected[name] = expected[name] + gradient if name in expected else gradient
    sliced = Slices(parameters, len(owned))
    packed = [sliced.pack({number: dict(blocks[number]) for number in reversed(numbers)}) for numbers in owned]
    parts = []
    for place in range(len(owned)):
        rows = {
            number: row
            for numbers, mine in zip(owned, packed, strict=True)
            for number, row in zip(numbers, mine[place], strict=True)
        }
        part, present = sliced.add([rows[number] for number in sorted(rows)], place)
        assert present == [name for name in parameters if name in expected]
        parts.append(part)
    unpacked = sliced.unpack(torch.cat(parts), present)
    assert unpacked.keys() == expected.keys()
    for name, gradient in unpacked.items():
        assert gradient.stride() == parameters[name].stride(), name
        assert torch.equal(gradient.contiguous().view(torch.int32), expected[name].contiguous().view(torch.int32)), name


def test_a_gradient_in_another_layout_and_a_parameter_with_gaps() -> None:
    gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
    weight = nn.Parameter(torch.randn(3, 4))
    gradients = {"gaps": torch.randn(4, 3), "weight": torch.randn(4, 3).t()}
    sliced = Slices({"gaps": gaps, "weight": weight}, 2)
    packed = sliced.pack({0: dict(gradients)})
    parts = [sliced.add([packed[place, 0]], place)[0] for place in range(2)]
    unpacked = sliced.unpack(torch.cat(parts), ["gaps", "weight"])
    assert all(torch.equal(unpacked[name], gradient) for name, gradient in gradients.items())
    assert [unpacked[name].stride() for name in unpacked] == [(3, 1), (4, 1)]


def test_two_dtypes_in_one_layer_are_refused() -> None:
    half = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
    with pytest.raises(CapslogError, match=r"whose parameters are torch\.bfloat16 and torch\.float32; give all"):
        Slices({"half": half, "whole": nn.Parameter(torch.randn(2))}, 2)
