"""FLOPs of layers with experts, counted by hand: a token meets top_k routed experts, and all shared ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config

TOKENS, HIDDEN, HEADS, EXPERTS, CHOSEN, EXPERT = 256, 256, 4, 32, 2, 128
COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "moe_intermediate_size": EXPERT, "num_experts_per_tok": CHOSEN, "use_cache": False,
}  # fmt: skip


def _linears(*sizes: tuple[int, int]) -> int:
    return 2 * TOKENS * sum(first * second for first, second in sizes)


def _attention(width: int, value_width: int) -> int:
    """Products of queries and keys, and of weights and values: attention is causal, but of two blocks of tokens the one
    below the diagonal and one and a half times those on it are four.
    """
    return 2 * TOKENS * TOKENS * HEADS * (width + value_width)


def _gated(width: int) -> list[tuple[int, int]]:
    return [(HIDDEN, width)] * 2 + [(width, HIDDEN)]


Flops = tuple[int, int]
"""Of a layer's weights, and of its attention."""


def _qwen3() -> tuple[Any, Any, Flops, Flops]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(**COMMON, num_key_value_heads=2, head_dim=64, num_experts=EXPERTS)
    attention = [(HIDDEN, HEADS * 64), (HIDDEN, 2 * 64), (HIDDEN, 2 * 64), (HEADS * 64, HIDDEN)]
    layer = _linears(*attention, (HIDDEN, EXPERTS)) + CHOSEN * _linears(*_gated(EXPERT))
    flops = layer, _attention(64, 64)
    return transformers.Qwen3MoeForCausalLM, config, flops, flops


def _deepseek_v3() -> tuple[Any, Any, Flops, Flops]:
    """The first layer is dense; the second has one shared expert. Heads of queries are 64 + 32 wide, of values 64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=HEADS, n_routed_experts=EXPERTS, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=128, kv_lora_rank=96, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        n_group=2, topk_group=1,
    )  # fmt: skip
    queries = [(HIDDEN, 128), (128, HEADS * 96)]
    keys = [(HIDDEN, 96 + 32), (96, HEADS * (64 + 64))]
    attention = _linears(*queries, *keys, (HEADS * 64, HIDDEN))
    dense = attention + _linears(*_gated(512))
    experts = attention + _linears((HIDDEN, EXPERTS), *_gated(EXPERT)) + CHOSEN * _linears(*_gated(EXPERT))
    return transformers.DeepseekV3ForCausalLM, config, (dense, _attention(96, 64)), (experts, _attention(96, 64))


@pytest.mark.parametrize("make", [_qwen3, _deepseek_v3])
def test_layers_with_experts_count_the_rows_that_tokens_choose(make: Any) -> None:
    kind, config, *by_hand = make()
    with torch.device("meta"):
        model = kind(config).bfloat16()
    tokens = {"input_ids": torch.ones(1, TOKENS, dtype=torch.int64)}
    question = OrdinaryModel(model, tokens, None)
    estimator = StageEstimator.of_config(
        ordinary_config(question, {"devices": 1}, device="cuda:h100-80gb", settings=None)
    )
    places = [at for at, layer in enumerate(estimator.chain.layers) if layer.name.startswith("model.layers.")]
    assert len(places) == len(by_hand)
    for place, flops in zip(places, by_hand, strict=True):
        work = estimator.stage(place, place + 1).work
        for half, linears, attention in (("F", 1, 1), ("B", 2, 3)):
            products = {
                name: amount for name, amount in work[half].items() if name.startswith(("product", "attention"))
            }
            del products["product bytes"]
            assert sum(products.values()) == pytest.approx(linears * flops[0] + attention * flops[1], rel=0.01)
