"""Attention of captured models of transformers in other ways: same weights, same results, no maps kept."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.model.chain import Chain
from varuna_capslog.variants.attention import AttentionCore
from varuna_capslog.variants.check import difference
from varuna_capslog.variants.registry import known_variants

transformers = pytest.importorskip("transformers")


@functools.cache
def captured(kind: str) -> Chain:
    sizes: dict[str, Any] = {"vocab_size": 32, "attn_implementation": "eager", "use_cache": False}
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_embd=16, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, **sizes
            )
        )
    elif kind == "bert":
        layers = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**layers, **sizes))
    else:
        layers = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **layers, **sizes))
    ids = torch.randint(0, 32, (2, 12))
    example = {"input_ids": ids, "attention_mask": torch.ones(2, 12, dtype=torch.long), "labels": ids}
    return Chain.from_module(model.double(), None, example)


def with_attention(chain: Chain) -> int:
    return next(number for number, layer in enumerate(chain.layers) if ".0" in layer.name)


@pytest.mark.parametrize("variant", ["sdpa", "chunked", "split-keys", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_attention_of_captured_models_is_exact_in_float64(kind: str, variant: str) -> None:
    chain = captured(kind)
    number = with_attention(chain)
    plain = chain.layers[number].module
    other = copy.deepcopy(plain)
    assert known_variants()[variant].rewrite(other) == 1
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(one).__mro__[1] for one in other.modules() if isinstance(one, AttentionCore)] != []
    assert known_variants()[variant].rewrite(chain.layers[0].module) is None
    found = difference(plain, other, arguments(chain, number))
    assert found.part <= (1e-6 if kind == "llama" else 1e-12), found  # Llama's own code takes softmax in float32
    # a copy of the rewritten layer is rewritten too, and the plain one is still plain
    assert difference(other, copy.deepcopy(other), arguments(chain, number)).part == 0
    assert any(isinstance(one, AttentionCore) for one in copy.deepcopy(other).modules())
    assert not any(isinstance(one, AttentionCore) for one in plain.modules())


def arguments(chain: Chain, number: int) -> list[Tensor]:
    """What the layer reads, where half of the second sample is padding."""
    values: dict[str, Tensor] = {
        "input_ids": torch.randint(0, 32, (2, 12)),
        "attention_mask": (torch.arange(12) < torch.tensor([[12], [6]])).long(),
        "labels": torch.randint(0, 32, (2, 12)),
    }
    with torch.no_grad():
        for layer in chain.layers[:number]:
            layer.module.eval()
            values.update(layer(values))
    given = [
        values[name].double() if values[name].is_floating_point() else values[name]
        for name in chain.layers[number].reads
    ]
    return [value.requires_grad_(position == 0) for position, value in enumerate(given)]


def test_dropout_of_the_maps_is_kept() -> None:
    chain = captured("gpt2")
    other = copy.deepcopy(chain.layers[with_attention(chain)].module)
    known_variants()["chunked"].rewrite(other)
    assert [one.rate for one in other.modules() if isinstance(one, AttentionCore)] == [0.1]


def test_another_softmax_stays() -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            maps = (q @ k.transpose(-1, -2) + 1.0).softmax(-1)
            return maps @ v + maps.sum()

    example = {name: torch.randn(1, 2, 3, 4, requires_grad=True) for name in "qkv"}
    exported = torch.export.export(Other(), (), example).module()
    assert known_variants()["sdpa"].rewrite(exported) is None


def test_attention_of_a_model_that_was_captured_for_training_alone() -> None:
    """Profilers capture no more than that, and found no attention there: dropout has no module then."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(num_hidden_layers=2, attn_implementation="eager", **sizes)
    torch.manual_seed(0)
    model, ids = transformers.BertForMaskedLM(config), torch.randint(0, 32, (2, 12))
    chain = Chain.from_module(model, None, {"input_ids": ids}, evaluates=False)
    other = copy.deepcopy(chain.layers[with_attention(chain)].module)
    assert known_variants()["sdpa"].rewrite(other) == 1
    assert [one.rate for one in other.modules() if isinstance(one, AttentionCore)] == [0.1]
