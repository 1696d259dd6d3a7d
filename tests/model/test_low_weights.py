"""Which parameters are kept in 16 bits, and what that changes of bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.low_weights import low_bytes, low_parameters
from varuna_capslog.model.trace import ShapeTable


def module() -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4)]
    made = nn.ModuleDict({f"norm{number}": one for number, one in enumerate(norms)})
    made["line"], made["rms"], made["twice"] = nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4, dtype=torch.float64)
    made["frozen"] = nn.Linear(4, 8, bias=False).requires_grad_(False)
    made["tied"] = made["line"]
    return made


def test_matrices_and_biases_are_and_norms_that_refuse_mixtures_are_not() -> None:
    made = module()
    names = {one: name for name, one in made.named_parameters()}
    low = {names[one]: dtype for one, dtype in low_parameters(made, "bfloat16").items()}
    assert low == dict.fromkeys(("line.weight", "line.bias", "rms.weight", "frozen.weight"), torch.bfloat16)
    assert low_parameters(made, "float32") == {}
    assert low_bytes(made, "float16") == (2 * (16 + 4 + 4), 2 * 32)
    assert low_bytes(made, "float32") == (0, 0)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_specs_are_those_of_a_chain_with_such_weights(weights: str) -> None:
    """What an embedding writes has its type, and so has what is added to it."""
    embedding = nn.Embedding(8, 4)
    chain = Chain([Layer("embed", embedding), Layer("add", nn.Dropout(0.1)), Layer("norm", nn.LayerNorm(4))])
    precision = "float32" if weights == "float32" else weights
    specs = ShapeTable(chain, "cpu", precision, weights).boundaries({"x": TensorSpec((2, 3), torch.int64)})
    assert [one["x"].dtype for one in specs] == [torch.int64, *[getattr(torch, weights)] * 3]
    assert embedding.weight.dtype == torch.float32, "the chain stays as it is"
