"""Tensors that attention layers cache, against the caches that transformers itself fills."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.inference_model import attention_caches, cache_of_layers
from varuna_capslog.model.layer import Layer

transformers = pytest.importorskip("transformers")
TOKENS, HEADS = 12, {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16, "pad_token_id": None, "bos_token_id": None}
SMALL |= {"eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "grouped heads": ("Llama", {"num_hidden_layers": 3, "head_dim": 6, **HEADS}),
    "plain heads": ("GPT2", {"n_embd": 16, "n_head": 4, "n_layer": 2, "vocab_size": 16, "eos_token_id": None}),
    "a window in every layer": ("Mistral", {"num_hidden_layers": 2, "sliding_window": 5, **HEADS}),
    "a window in some layers": (
        "Gemma2",
        {"num_hidden_layers": 2, "head_dim": 4, "sliding_window": 5, **HEADS},
    ),
}


def made(family: str, **keys: object) -> torch.nn.Module:
    keys = keys if "n_embd" in keys else {**SMALL, **keys}
    config = getattr(transformers, f"{family}Config")(**keys)
    return getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_as_many_bytes_as_transformers_keeps(name: str) -> None:
    family, keys = MODELS[name]
    model = made(family, **keys)
    with torch.no_grad():
        kept = model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=True).past_key_values.layers
    # a layer with a window keeps one token less than its width, which the next token needs; systems reserve its width
    held = [layer.keys.shape[-2] for layer in kept]
    reserved = [TOKENS if tokens == TOKENS else tokens + 1 for tokens in held]
    sizes = [
        (layer.keys.nbytes + layer.values.nbytes) // tokens * width
        for layer, tokens, width in zip(kept, held, reserved, strict=True)
    ]
    assert list(attention_caches(model, TOKENS, 4).values()) == sizes
    assert (min(held) < TOKENS) == ("window" in name)


def test_models_that_do_not_look_back_cache_nothing() -> None:
    config = transformers.BertConfig(**SMALL, num_hidden_layers=2, num_attention_heads=2)
    assert attention_caches(transformers.BertForMaskedLM(config), TOKENS, 4) == {}
    assert attention_caches(torch.nn.Linear(2, 2), TOKENS, 4) is None  # unknown


def test_a_layer_caches_for_the_attention_that_it_runs_first() -> None:
    parts = [torch.nn.Identity() for _ in range(4)]
    for part, ran in zip(parts, (("embed",), ("h.1.attn.q",), ("h.1.attn.o", "h.10.attn.q"), ("norm",)), strict=True):
        part.meta = {"source_modules": ran}
    layers = [Layer(f"l{number}", part) for number, part in enumerate(parts)]
    assert cache_of_layers({"h.1.attn": 5, "h.10.attn": 7}, layers) == [0, 5, 7, 0]


def test_other_caches_are_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=16)
    with pytest.raises(CapslogError, match="what a t5 caches is not known: it is an encoder-decoder; wrap it"):
        attention_caches(transformers.T5ForConditionalGeneration(config), TOKENS, 4)
    model = made("Llama", num_hidden_layers=1, **HEADS)
    model.config.kv_lora_rank = 8
    with pytest.raises(CapslogError, match="caches latent vectors"):
        attention_caches(model, TOKENS, 4)
    del model.config.kv_lora_rank
    model.config.layer_types = ["linear_attention"]
    with pytest.raises(CapslogError, match="layers of linear_attention"):
        attention_caches(model, TOKENS, 4)
