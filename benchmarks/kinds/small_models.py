"""One model of each of twelve kinds at small widths, with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["KINDS", "example"]

ROWS, LENGTH, VOCABULARY = 2, 48, 256
IMAGE_TOKEN = 250
Inputs = dict[str, Any]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
}

HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 24}


def transformers_model(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers from its config."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def tokens(rows: int = ROWS) -> Inputs:
    """Return tokens with labels, a third of which is ignored."""
    ids = torch.randint(3, IMAGE_TOKEN, (rows, LENGTH))
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 1 / 3, -100, ids)}


def images_and_tokens() -> Inputs:
    """Return an image of four patches for each row, and tokens with four places for it."""
    text = tokens()
    text["input_ids"][:, 2:6] = IMAGE_TOKEN
    return text | {"pixel_values": torch.randn(ROWS, 3, 16, 16)}


def audio_and_tokens() -> Inputs:
    """Return a spectrogram of 64 frames for each row, and the labels of its words."""
    return {"input_features": torch.randn(ROWS, 16, 64), "labels": torch.randint(3, VOCABULARY, (ROWS, 12))}


def latents() -> Inputs:
    """Return latent images, their step of noise and class."""
    return {
        "hidden_states": torch.randn(ROWS, 4, 16, 16),
        "timestep": torch.randint(1000, (ROWS,)),
        "class_labels": torch.randint(10, (ROWS,)),
        "return_dict": False,
    }


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        num_layers=3,
        sample_size=16,
        num_embeds_ada_norm=10,
    )


def _cnn() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


LLAMA = transformers_model("LlamaForCausalLM", "LlamaConfig", **TEXT, num_key_value_heads=2)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(LLAMA(), LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"))


def _qlora() -> nn.Module:
    """The Llama with bitsandbytes' linear layers of 4 bits in its blocks, and peft's adapters."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model

    model = LLAMA()
    for block in model.model.layers:
        for part in [part for part in block.modules() if not isinstance(part, nn.Linear)]:
            for name, linear in [*part.named_children()]:
                if isinstance(linear, nn.Linear):
                    few_bits = Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
                    few_bits.weight = Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
                    setattr(part, name, few_bits.to("cpu"))
    adapters = LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules="all-linear")
    return get_peft_model(model, adapters)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "dense": (
        transformers_model("Qwen3ForCausalLM", "Qwen3Config", **TEXT, num_key_value_heads=2, head_dim=24),
        tokens,
    ),
    "moe": (
        transformers_model(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **TEXT,
            **HEADS,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
        tokens,
    ),
    "mla": (
        transformers_model(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **TEXT,
            num_key_value_heads=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
        tokens,
    ),
    "sliding_window": (
        transformers_model(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **TEXT,
            **HEADS,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        tokens,
    ),
    "vision_language": (
        transformers_model(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            vision_config={
                "model_type": "siglip_vision_model",
                "image_size": 16,
                "patch_size": 8,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
            },
            text_config={"model_type": "llama", **TEXT, "num_key_value_heads": 2},
            image_token_index=IMAGE_TOKEN,
            vision_feature_select_strategy="full",
        ),
        images_and_tokens,
    ),
    "hybrid": (
        transformers_model(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            **TEXT | {"num_hidden_layers": 4},
            **HEADS,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            mlp_only_layers=[0, 1, 2, 3],  # experts do not run in float64
        ),
        tokens,
    ),
    "dit": (_dit, latents),
    "encoder_decoder": (
        transformers_model(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=96,
            d_kv=24,
            d_ff=192,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        tokens,
    ),
    "speech": (
        transformers_model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            d_model=96,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            max_source_positions=32,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        audio_and_tokens,
    ),
    "lora": (_lora, tokens),
    "qlora": (_qlora, tokens),
    "cnn": (_cnn, lambda: {"x": torch.randn(ROWS, 3, 64, 64)}),
}
"""Name of the kind -> its model, and the inputs of one microbatch, both of torch's seed."""


def example(kind: str) -> tuple[nn.Module, Inputs]:
    """Return the model of a kind and the inputs of a microbatch, the same on every call."""
    build, inputs = KINDS[kind]
    torch.manual_seed(0)
    return build().train(), inputs()
