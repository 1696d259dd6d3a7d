"""Attention variants in captured transformers models: same weights, same results, no attention maps saved."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sweeps import crossed
from varuna_capslog.model.chain import Chain
from varuna_capslog.variants.attention import AttentionCore
from varuna_capslog.variants.registry import difference, known_variants

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


@pytest.mark.parametrize(
    ("kind", "variant"), crossed(["gpt2", "bert", "llama"], ["sdpa", "chunked", "split-keys", "eager"])
)
def test_attention_of_captured_models_is_exact_in_float64(kind: str, variant: str) -> None:
    chain = captured(kind)
    number = with_attention(chain)
    plain = chain.layers[number].module
    rewritten = copy.deepcopy(plain)
    assert known_variants()[variant].rewrite(rewritten) == 1
    assert [name for name, _ in rewritten.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(module).__mro__[1] for module in rewritten.modules() if isinstance(module, AttentionCore)] != []
    assert known_variants()[variant].rewrite(chain.layers[0].module) is None
    deviation = difference(plain, rewritten, arguments(chain, number))
    # Llama's own code computes the softmax in float32
    assert deviation.part <= (1e-6 if kind == "llama" else 1e-12), deviation
    # a copy of the rewritten layer is rewritten too, and the original layer is unchanged
    assert difference(rewritten, copy.deepcopy(rewritten), arguments(chain, number)).part == 0
    assert any(isinstance(module, AttentionCore) for module in copy.deepcopy(rewritten).modules())
    assert not any(isinstance(module, AttentionCore) for module in plain.modules())


def arguments(chain: Chain, number: int) -> list[Tensor]:
    """Return the inputs of layer `number`; half of the second sample is padding."""
    values: dict[str, Tensor] = {
        "input_ids": torch.randint(0, 32, (2, 12)),
        "attention_mask": (torch.arange(12) < torch.tensor([[12], [6]])).long(),
        "labels": torch.randint(0, 32, (2, 12)),
    }
    with torch.no_grad():
        for layer in chain.layers[:number]:
            layer.module.eval()
            values.update(layer(values))
    inputs = [
        values[name].double() if values[name].is_floating_point() else values[name]
        for name in chain.layers[number].reads
    ]
    return [tensor.requires_grad_(position == 0) for position, tensor in enumerate(inputs)]


def test_dropout_of_the_maps_is_kept() -> None:
    chain = captured("gpt2")
    rewritten = copy.deepcopy(chain.layers[with_attention(chain)].module)
    known_variants()["chunked"].rewrite(rewritten)
    assert [module.rate for module in rewritten.modules() if isinstance(module, AttentionCore)] == [0.1]


def test_another_softmax_stays() -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            maps = (q @ k.transpose(-1, -2) + 1.0).softmax(-1)
            return maps @ v + maps.sum()

    example = {name: torch.randn(1, 2, 3, 4, requires_grad=True) for name in "qkv"}
    exported = torch.export.export(Other(), (), example).module()
    assert known_variants()["sdpa"].rewrite(exported) is None


def test_attention_of_a_model_that_was_captured_for_training_alone() -> None:
    """Profilers capture models for training alone. Dropout has no module then, and attention was not recognised."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(num_hidden_layers=2, attn_implementation="eager", **sizes)
    torch.manual_seed(0)
    model, ids = transformers.BertForMaskedLM(config), torch.randint(0, 32, (2, 12))
    chain = Chain.from_module(model, None, {"input_ids": ids}, evaluates=False)
    rewritten = copy.deepcopy(chain.layers[with_attention(chain)].module)
    assert known_variants()["sdpa"].rewrite(rewritten) == 1
    assert [module.rate for module in rewritten.modules() if isinstance(module, AttentionCore)] == [0.1]
