"""Torch's transformer layers, split into parts, compute what the full layers compute, with every mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.test_splitting import whole
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.splitting.chains import split_chain

B, T, S = 2, 5, 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
BAD = float("-inf")
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.arange(T) >= torch.tensor([[T], [2]])
MEMORY_PADDED = torch.arange(S) >= torch.tensor([[S], [1]])
PER_HEAD = torch.linspace(-9, 9, B * 4 * T * T, **DOUBLE).sin().view(B * 4, T, T)


def compared(module: nn.Module, inputs: dict[str, Tensor], splits: str = "tensor-2") -> list[str]:
    """Run a module unsplit and in parts, check that outputs and all gradients agree to 1e-12, and return the parts'
    names.
    """
    results = []
    plain = Chain([Layer("layer", module.double(), tuple(inputs), ("out",))], tuple(inputs), ("out",))
    parts = split_chain(copy.deepcopy(plain), {"layer": splits}, "close")
    for chain in (plain, parts):
        leaves = {name: tensor.clone().requires_grad_(tensor.dtype == torch.float64) for name, tensor in inputs.items()}
        out = chain.run(leaves)["out"]
        (out * torch.linspace(-1, 1, out.numel(), **DOUBLE).view_as(out)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = {
            layer.name: {
                name: parameter.grad
                for name, parameter in layer.module.named_parameters()
                if parameter.grad is not None
            }
            for layer in chain.layers
        }
        inner = {name: leaf.grad for name, leaf in leaves.items() if name in ("x", "memory") and leaf.grad is not None}
        results.append({"out": out} | inner | whole(chain, gradients))
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) > len(list(module.parameters()))
    for name, tensor in results[0].items():
        assert float((results[1][name] - tensor).detach().abs().max()) < 1e-12, name
    return [layer.name for layer in parts.layers]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        (),
        (CAUSAL,),
        (CAUSAL, PADDED),
        (torch.zeros(T, T, **DOUBLE).masked_fill(CAUSAL, BAD), PADDED),
        (PER_HEAD, PADDED),
    ],
)
def test_an_encoder_layer(masks: tuple[Tensor, ...], batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 4, 12, 0.0, "gelu", batch_first=batch_first, norm_first=norm_first)
    x = torch.randn(B, T, 8, **DOUBLE)
    inputs = {"x": x if batch_first else x.transpose(0, 1)} | {f"mask.{n}": mask for n, mask in enumerate(masks)}
    names = compared(layer, inputs, "tensor-4")
    assert names.count("layer.attention.3") == names.count("layer.feed_forward.3") == names.count("layer.sum2") == 1


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "masks",
    [(), (CAUSAL,), (CAUSAL, torch.zeros(T, S, dtype=torch.bool), PADDED, MEMORY_PADDED)],
)
def test_a_decoder_layer(masks: tuple[Tensor, ...], batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 4, 12, 0.0, bias=norm_first, batch_first=batch_first, norm_first=norm_first)
    x, memory = torch.randn(B, T, 8, **DOUBLE), torch.randn(B, S, 8, **DOUBLE)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    compared(layer, {"x": x, "memory": memory} | {f"mask.{n}": mask for n, mask in enumerate(masks)})


def test_two_linear_maps_with_an_activation_between_them() -> None:
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, 5))
    assert compared(pair, {"x": torch.randn(3, 6, **DOUBLE)}, "tensor-3") == [
        *(f"layer.columns.{part}" for part in range(3)),
        "layer.sum",
    ]
    stack = Chain.from_module(nn.Sequential(pair, nn.TransformerEncoderLayer(5, 1, 4)), None)
    names = [layer.name for layer in split_chain(stack, {"0": "tensor-2"}, "close").layers]
    assert names == ["0.columns.0", "0.columns.1", "0.sum", "1"]


@pytest.mark.parametrize(
    ("layer", "reads", "split", "sentence"),
    [
        (nn.TransformerEncoderLayer(8, 4, 12), 1, "tensor-3", "its 4 heads cannot be shared out equally among 3 parts"),
        (
            nn.TransformerEncoderLayer(8, 4, 10),
            1,
            "tensor-4",
            "its 10 columns cannot be shared out equally among 4 parts",
        ),
        (
            nn.TransformerEncoderLayer(8, 4, 12),
            1,
            "sequence-2",
            "its positions cannot be shared out; take tensor-2 for it",
        ),
        (nn.TransformerEncoderLayer(8, 4, 12), 4, "tensor-2", "it reads 4 tensors, of which only src, src_mask and"),
        (
            nn.TransformerEncoderLayer(8, 4, 12, activation=lambda x: x.softmax(-1)),
            1,
            "tensor-2",
            "does not work on each entry alone; leave it whole",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)),
            1,
            "tensor-2",
            "none of these layers can be split",
        ),
    ],
)
def test_one_sentence_per_mistake(layer: nn.Module, reads: int, split: str, sentence: str) -> None:
    names = tuple(f"read.{number}" for number in range(reads))
    chain = Chain([Layer("layer", layer, names, ("out",))], names, ("out",))
    with pytest.raises(CapslogError, match=sentence):
        split_chain(chain, {"layer": split}, "close")
