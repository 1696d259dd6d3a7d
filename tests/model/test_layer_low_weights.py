"""Parameters that are kept in 16 bits, and the resulting bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.layer import low_bytes, low_parameters
from varuna_capslog.model.trace import ShapeTable


def module() -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4)]
    made = nn.ModuleDict({f"norm{number}": norm for number, norm in enumerate(norms)})
    made["line"], made["rms"], made["twice"] = nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4, dtype=torch.float64)
    made["frozen"] = nn.Linear(4, 8, bias=False).requires_grad_(False)
    made["tied"] = made["line"]
    return made


def test_matrices_and_biases_are_and_norms_that_refuse_mixtures_are_not() -> None:
    made = module()
    names = {parameter: name for name, parameter in made.named_parameters()}
    low = {names[parameter]: dtype for parameter, dtype in low_parameters(made, "bfloat16").items()}
    assert low == dict.fromkeys(("line.weight", "line.bias", "rms.weight", "frozen.weight"), torch.bfloat16)
    assert low_parameters(made, "float32") == {}
    assert low_bytes(made, "float16") == (2 * (16 + 4 + 4), 2 * 32)
    assert low_bytes(made, "float32") == (0, 0)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_specs_are_those_of_a_chain_with_such_weights(weights: str) -> None:
    """An embedding's output has the type of its weights, and so has the sum of a tensor with it."""
    embedding = nn.Embedding(8, 4)
    chain = Chain([Layer("embed", embedding), Layer("add", nn.Dropout(0.1)), Layer("norm", nn.LayerNorm(4))])
    precision = "float32" if weights == "float32" else weights
    specs = ShapeTable(chain, "cpu", precision, weights).boundaries({"x": TensorSpec((2, 3), torch.int64)})
    assert [boundary["x"].dtype for boundary in specs] == [torch.int64, *[getattr(torch, weights)] * 3]
    assert embedding.weight.dtype == torch.float32, "the chain stays as it is"
