"""Tensors that layers cache, against the caches that transformers itself fills."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.inference_model import cache_of_layers, layer_caches
from varuna_capslog.model.layer import Layer

transformers = pytest.importorskip("transformers")
TOKENS, HEADS = 12, {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16, "pad_token_id": None, "bos_token_id": None}
SMALL |= {"eos_token_id": None}
LATENT = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 6,
    "q_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
WINDOW = {"head_dim": 4, "sliding_window": 5, **HEADS}
GEMMA = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], **WINDOW}
NEMOTRON = {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "head_dim": 4, "n_groups": 2, **HEADS}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "hidden_size": 16, "chunk_size": 4}
NEXT = {"num_hidden_layers": 4, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, **DELTA, **HEADS}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "grouped heads": ("Llama", {"num_hidden_layers": 3, "head_dim": 6, **HEADS}),
    "plain heads": ("GPT2", {"n_embd": 16, "n_head": 4, "n_layer": 2, "vocab_size": 16, "eos_token_id": None}),
    "a window in every layer": ("Mistral", {"num_hidden_layers": 2, **WINDOW}),
    "a window in some layers": ("Gemma2", {"num_hidden_layers": 2, **WINDOW}),
    "a window in two of three": ("Gemma3", GEMMA),
    "latent vectors": ("DeepseekV3", {"num_hidden_layers": 2, **LATENT, **EXPERTS, **HEADS}),
    "a state space": ("NemotronH", NEMOTRON),
    "a delta rule": ("Qwen3Next", {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, **NEXT}),
}


def made(family: str, **keys: object) -> torch.nn.Module:
    keys = keys if "n_embd" in keys else {**SMALL, **keys}
    config = getattr(transformers, f"{family}{'Text' * (family == 'Gemma3')}Config")(**keys)
    return getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()


def kept_bytes(model: torch.nn.Module, tokens: int) -> list[int]:
    """Sum the tensors in each layer of the cache that transformers fills with real numbers."""
    with torch.no_grad():
        cache = model(torch.ones(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    sizes = []
    for layer in cache.layers:
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
        sizes.append(sum(tensor.nbytes for tensor in tensors if tensor is not None))
    return sizes


@pytest.mark.parametrize("name", MODELS)
def test_as_many_bytes_as_transformers_keeps(name: str) -> None:
    family, keys = MODELS[name]
    dtype = torch.float32 if len(name) % 2 else torch.bfloat16
    model = made(family, **keys).to(dtype)
    for tokens in (3, TOKENS):
        assert list(layer_caches(model, tokens).values()) == [size for size in kept_bytes(model, tokens) if size]


def test_a_model_of_pictures_and_text_caches_as_its_decoder_does() -> None:
    """Its forward has no `use_cache`, which it hands on."""
    text = transformers.LlamaConfig(num_hidden_layers=2, **SMALL, **HEADS)
    tower = transformers.CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, image_size=8)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=3)
    ).eval()
    assert list(layer_caches(model, TOKENS).values()) == kept_bytes(model, TOKENS)


def test_a_layer_caches_for_the_attention_that_it_runs_first() -> None:
    parts = [torch.nn.Identity() for _ in range(4)]
    for part, ran in zip(parts, (("embed",), ("h.1.attn.q",), ("h.1.attn.o", "h.10.attn.q"), ("norm",)), strict=True):
        part.meta = {"source_modules": ran}
    layers = [Layer(f"l{number}", part) for number, part in enumerate(parts)]
    assert cache_of_layers({"h.1.attn": 5, "h.10.attn": 7}, layers) == [0, 5, 7, 0]


SEQ2SEQ: dict[str, tuple[str, dict[str, object]]] = {
    "relative positions": ("T5", {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}),
    "learned positions": (
        "Bart",
        {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 4},
    ),
    "sound": (
        "Whisper",
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 6, "num_mel_bins": 4},
    ),
}


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_decoder_keeps_its_tokens_and_what_the_encoder_returns(name: str) -> None:
    """Bytes of each decoder layer are those of transformers' own cache for a prefill, of source and target lengths that
    differ; encoders cache nothing. They were refused."""
    family, keys = SEQ2SEQ[name]
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**keys, **tokens)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    inputs = {"decoder_input_ids": torch.ones(1, 5, dtype=torch.int64)}
    if family == "Whisper":
        inputs["input_features"] = torch.zeros(1, 4, 12)
    else:
        inputs["input_ids"] = torch.ones(1, TOKENS, dtype=torch.int64)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    own, cross = (
        [layer.keys.nbytes + layer.values.nbytes for layer in part.layers]
        for part in (cache.self_attention_cache, cache.cross_attention_cache)
    )
    sizes = layer_caches(model, 5, inputs)
    assert sizes is not None
    assert all("decoder" in path for path in sizes)
    assert list(sizes.values()) == [size for pair in zip(own, cross, strict=True) for size in pair]


def test_other_caches_are_refused() -> None:
    model = made("Llama", num_hidden_layers=1, **HEADS)
    model.model.forward = None
    with pytest.raises(CapslogError, match=r"what a llama caches is not known: its prefill fails \(TypeError: "):
        layer_caches(model, TOKENS)
