"""The drawn models of five libraries at small sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Drawn:
    """Model and keyword arguments of one microbatch; both are determined by torch's seed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


REPLACED: dict[str, dict[str, str]] = {
    "transformers": {"Qwen2_5OmniForConditionalGeneration": "it has no forward, only `generate`"},
    "torchvision": {"s3d": "its last pooling is over 7 x 7, so it takes 16 frames of 224 x 224"},
    "peft": {
        "PSOFT on GPT-2": "PSOFT takes nn.Linear only, and GPT-2 has none",
        "LOKR on GPT-2": "LOKR takes no Conv1D of transformers, of which GPT-2 is made",
    },
}
"""Names by library that are replaced by the next of the shuffle, with reasons."""


def picture(size: int, key: str = "x", rows: int = 2) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws images of size x size."""
    return lambda: {key: torch.randn(rows, 3, size, size)}


TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "regnetx_120": (32, {}),
    "gcresnet33ts": (64, {}),
    "swinv2_cr_huge_384": (
        64,
        {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 1, 2, 2)},
    ),
    "eca_nfnet_l2": (64, {}),
    "efficientvit_b0": (64, {}),
    "vovnet39a": (64, {}),
    "maxvit_nano_rw_256": (64, {"img_size": 64}),
    "mobilevit_xxs": (64, {}),
    "maxvit_tiny_tf_384": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}),
    "edgenext_small": (64, {}),
    "swinv2_cr_tiny_384": (
        64,
        {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1), "embed_dim": 32, "num_heads": (1, 2, 2, 4)},
    ),
    "pit_b_distilled_224": (64, {"img_size": 64, "depth": (1, 1, 1), "heads": (1, 2, 4), "base_dims": (32, 32, 32)}),
}


def timm_model(name: str) -> Drawn:
    """Return a model of timm for ten classes."""
    import timm

    size, settings = TIMM[name]
    return Drawn(lambda: timm.create_model(name, num_classes=10, **settings), picture(size))


TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "vit_b_32": (64, {"image_size": 64}),
}


def torchvision_model(name: str) -> Drawn:
    """Return a model of torchvision for ten classes."""
    import torchvision

    if name == "swin3d_b":
        from torchvision.models.video.swin_transformer import SwinTransformer3d

        windows = {"patch_size": [2, 4, 4], "window_size": [2, 2, 2], "stochastic_depth_prob": 0.1}
        build = functools.partial(SwinTransformer3d, embed_dim=32, depths=[1, 2], num_heads=[2, 4], **windows)
        return Drawn(lambda: build(num_classes=10), lambda: {"x": torch.randn(2, 3, 4, 32, 32)})
    size, settings = TORCHVISION.get(name, (64, {}))
    return Drawn(lambda: torchvision.models.get_model(name, num_classes=10, **settings), picture(size))


def _flux2_inputs() -> dict[str, Any]:
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4), torch.arange(1))
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(8))
    return {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "img_ids": ids.expand(2, -1, -1),
        "txt_ids": words.expand(2, -1, -1),
        "timestep": torch.rand(2),
        "guidance": torch.rand(2),
    }


DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "QwenImageTransformer2DModel": (
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": torch.randn(2, 8, 16),
            "encoder_hidden_states_mask": torch.ones(2, 8, dtype=torch.long),
            "timestep": torch.rand(2),
            "img_shapes": [(1, 4, 4)] * 2,
        },
    ),
    "CogView4Transformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 4,
            "num_attention_heads": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 8, 8),
            "timestep": torch.randint(1000, (2,)),
            "original_size": torch.tensor([[64, 64]] * 2),
            "target_size": torch.tensor([[64, 64]] * 2),
            "crop_coords": torch.zeros(2, 2, dtype=torch.long),
        },
    ),
    "AutoencoderSAME": (
        {
            "audio_channels": 2,
            "patch_size": 4,
            "encoder_channels": 16,
            "encoder_c_mults": [1, 2],
            "encoder_strides": [2, 2],
            "encoder_transformer_depths": [1, 1],
            "latent_dim": 8,
            "dim_heads": 8,
            "ff_mult": 2,
        },
        lambda: {"sample": torch.randn(2, 2, 128)},
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 32,
        },
        picture(32, "sample"),
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (8, 8, 16),
            "in_channels": 4,
            "out_channels": 4,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D",) * 3,
            "up_block_types": ("UpResnetBlock1D",) * 2,
            "act_fn": "swish",
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
        },
        lambda: {"sample": torch.randn(2, 4, 16), "timestep": torch.randint(1000, (2,))},
    ),
    "Flux2Transformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": [4, 4, 4, 4],
        },
        _flux2_inputs,
    ),
    "Kandinsky6SRTransformer3DModel": (
        {
            "in_visual_dim": 2,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
        },
        lambda: {"hidden_states": torch.randn(1, 2, 8, 8, 5), "timestep": torch.rand(1) * 1000},
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 10, 32),
            "pooled_projections": torch.randn(2, 64),
            "timestep": torch.randint(1000, (2,)),
        },
    ),
    "StableAudioProjectionModel": (
        {"text_encoder_dim": 16, "conditioning_dim": 24, "min_value": 0, "max_value": 512},
        lambda: {
            "text_hidden_states": torch.randn(2, 5, 16),
            "start_seconds": torch.rand(2) * 100,
            "end_seconds": torch.rand(2) * 500,
        },
    ),
    "MochiTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "encoder_hidden_states": torch.randn(2, 16, 16),
            "timestep": torch.randint(1000, (2,)),
            "encoder_attention_mask": torch.ones(2, 16, dtype=torch.bool),
        },
    ),
    "TransformerTemporalModel": (
        {"num_attention_heads": 4, "attention_head_dim": 4, "in_channels": 4, "num_layers": 2, "norm_num_groups": 1},
        lambda: {"hidden_states": torch.randn(4, 4, 8, 8), "timestep": torch.randint(1000, (4,)), "num_frames": 2},
    ),
    "AutoencoderKLMiniMaxH3Audio": (
        {
            "encoder_dim": 4,
            "encoder_rates": (2, 2),
            "latent_dim": 32,
            "latent_channels": 8,
            "num_attention_heads": 2,
            "decoder_dim": 16,
            "decoder_rates": (2, 2),
            "decoder_kernel_sizes": (4, 4),
            "resblock_kernel_sizes": (3, 7),
            "resblock_dilation_sizes": ((1, 3), (1, 3)),
            "latents_mean": [0.0] * 8,
            "latents_std": [1.0] * 8,
        },
        lambda: {"sample": torch.randn(2, 1, 32)},
    ),
}


def diffusers_model(name: str) -> Drawn:
    """Return a model of diffusers."""
    import diffusers

    settings, inputs = DIFFUSERS[name]
    return Drawn(lambda: getattr(diffusers, name)(**settings), inputs)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
    )


def words(rows: int = 2, length: int = 9, vocabulary: int = 64) -> dict[str, Tensor]:
    """Return tokens without padding."""
    ids = torch.randint(3, vocabulary, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


BASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], str]] = {
    "BERT": (_bert, words, "SEQ_CLS"),
    "GPT-2": (_gpt2, words, "CAUSAL_LM"),
    "Llama": (_llama, words, "CAUSAL_LM"),
    "OPT": (_opt, words, "CAUSAL_LM"),
    "ViT": (_vit, lambda: {"pixel_values": torch.randn(2, 3, 16, 16)}, ""),
}
TUNERS: dict[str, dict[str, Any]] = {
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 3, "num_ranks": 2},
    "DEFT": {"r": 4},
    "FROD": {"progressbar": False},
    "SUPERTUNING": {"sparsity": 0.9},
    "PSOFT": {"r": 4},
    "FOURIERFT": {"n_frequency": 20},
    "LOKR": {"r": 4},
    "RANDLORA": {"r": 4},
    "ADAMSS": {"r": 8, "num_subspaces": 2},
    "LILY": {"r": 4},
    "SHADOW": {"r": 4},
    "PEANUT": {"r": 4},
    "ADALORA": {"target_modules": ["q_proj", "v_proj"], "init_r": 6, "target_r": 4, "total_step": 10},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8},
}


def peft_model(name: str) -> Drawn:
    """Return a base model with a tuner of peft."""
    import peft

    tuner, base = name.split(" on ")
    build, inputs, task = BASES[base]

    def make() -> nn.Module:
        kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(tuner)]
        return peft.get_peft_model(build(), kind(task_type=task or None, **TUNERS[tuner]))

    if tuner == "MULTITASK_PROMPT_TUNING":
        return Drawn(make, lambda: inputs() | {"task_ids": torch.randint(3, (2,))})
    return Drawn(make, inputs)


SMALL_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SMALL_VISION: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def _t5gemma2_settings() -> dict[str, Any]:
    text = SMALL_TEXT | {"num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    encoder = {"text_config": text, "vision_config": SMALL_VISION, "mm_tokens_per_image": 4, "image_token_index": 60}
    return {
        "encoder": encoder | {"boi_token_index": 61, "eoi_token_index": 62},
        "decoder": text,
        "image_token_index": 60,
        "eoi_token_index": 62,
    }


def _unlimited_ocr_settings() -> dict[str, Any]:
    text = SMALL_TEXT | {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sam = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sam |= {"image_size": 64, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64}
    return {
        "text_config": text | {"moe_intermediate_size": 16, "n_shared_experts": 1},
        "vision_config": {"sam_config": sam | {"downsample_channels": [16, 32]}, "encoder_config": SMALL_VISION},
        "image_token_id": 63,
    }


def _grounding_dino_settings() -> dict[str, Any]:
    swin = {"model_type": "swin", "image_size": 32, "embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 1, 2]}
    return {
        "backbone_config": swin | {"window_size": 2, "out_features": ["stage2", "stage3"]},
        "text_config": {"model_type": "bert"} | SMALL_TEXT,
        "num_queries": 6,
        "encoder_layers": 2,
        "encoder_ffn_dim": 32,
        "encoder_attention_heads": 2,
        "decoder_layers": 2,
        "decoder_ffn_dim": 32,
        "decoder_attention_heads": 2,
        "d_model": 32,
        "num_feature_levels": 3,
        "max_text_len": 16,
    }


def _pictures_and_words() -> dict[str, Any]:
    return words() | {"pixel_values": torch.randn(2, 3, 32, 32)}


def _choices() -> dict[str, Any]:
    return {key: tensor.view(2, 3, 9) for key, tensor in words(6).items()}


def _to_and_from() -> dict[str, Any]:
    return words(vocabulary=60) | {"decoder_input_ids": torch.randint(3, 60, (2, 5))}


AUDIO: dict[str, Any] = {
    "mask_time_prob": 0.0,  # the engine seeds numpy for each layer, the module alone does not
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": [16, 16, 16],
    "conv_stride": [4, 2, 2],
    "conv_kernel": [8, 3, 2],
    "num_conv_pos_embedding_groups": 2,
}

TRANSFORMERS: dict[str, tuple[str, Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "T5Gemma2ForConditionalGeneration": ("T5Gemma2Config", _t5gemma2_settings, _to_and_from),
    "SiglipForImageClassification": (
        "SiglipConfig",
        lambda: {"vision_config": SMALL_VISION, "text_config": SMALL_TEXT},
        picture(16, "pixel_values"),
    ),
    "UnlimitedOcrForConditionalGeneration": ("UnlimitedOcrConfig", _unlimited_ocr_settings, lambda: words()),
    "MPNetForMultipleChoice": ("MPNetConfig", lambda: SMALL_TEXT, _choices),
    "PPOCRV5MobileRecForTextRecognition": (
        "PPOCRV5MobileRecConfig",
        lambda: {"hidden_size": 32, "num_attention_heads": 2, "head_out_channels": 20},
        lambda: {"pixel_values": torch.randn(2, 3, 96, 128)},
    ),
    "SplinterForQuestionAnswering": ("SplinterConfig", lambda: SMALL_TEXT | {"question_token_id": 5}, lambda: words()),
    "GroundingDinoForObjectDetection": ("GroundingDinoConfig", _grounding_dino_settings, _pictures_and_words),
    "BertGenerationDecoder": (
        "BertGenerationConfig",
        lambda: SMALL_TEXT | {"is_decoder": True},
        lambda: words(),
    ),
    "UMT5ForTokenClassification": (
        "UMT5Config",
        lambda: {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
        lambda: words(),
    ),
    "MobileViTForSemanticSegmentation": (
        "MobileViTConfig",
        lambda: {"image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
        picture(64, "pixel_values"),
    ),
    "Data2VecAudioForAudioFrameClassification": (
        "Data2VecAudioConfig",
        lambda: AUDIO,
        lambda: {"input_values": torch.randn(2, 800)},
    ),
    "ReformerModelWithLMHead": (
        "ReformerConfig",
        lambda: {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "attention_head_size": 16,
            "feed_forward_size": 64,
            "attn_layers": ["local", "lsh"],
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 2,
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [16, 16],
            "max_position_embeddings": 64,
            "is_decoder": True,
        },
        lambda: words(length=16),
    ),
}


def transformers_model(name: str) -> Drawn:
    """Return a model of transformers."""
    import transformers

    config, settings, inputs = TRANSFORMERS[name]
    return Drawn(lambda: getattr(transformers, name)(getattr(transformers, config)(**settings())), inputs)


MODELS: dict[str, Callable[[str], Drawn]] = {
    "diffusers": diffusers_model,
    "peft": peft_model,
    "transformers": transformers_model,
    "timm": timm_model,
    "torchvision": torchvision_model,
}
