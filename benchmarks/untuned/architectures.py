"""List that `untuned.py` draws from: architectures of torchvision and transformers that no estimate was tuned on.

All are built by the libraries' own classes, from small configurations without a download. Models that tests, examples
or other benchmarks of memory use (ResNet-18, GPT-2, Llama, DETR, ViT) are not in the list. An entry gives the model and
its inputs as `capslog plan --model` takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["TORCHVISION", "TRANSFORMERS", "architecture", "inputs_of"]

IMAGES = ["x=float32[2,3,96,96]"]
BATCH, LENGTH, VOCABULARY = 2, 48, 256
TEXT = [f"input_ids=int64[{BATCH},{LENGTH}]:{VOCABULARY}"]
LABELLED = [*TEXT, f"labels=int64[{BATCH},{LENGTH}]:{VOCABULARY}"]
PIXELS = [f"pixel_values=float32[{BATCH},3,64,64]"]

TORCHVISION: dict[str, dict[str, Any]] = {
    "alexnet": {},
    "vgg11_bn": {},
    "resnext50_32x4d": {},
    "wide_resnet50_2": {},
    "densenet121": {},
    "squeezenet1_1": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mnasnet0_5": {},
    "shufflenet_v2_x0_5": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "convnext_tiny": {},
    "swin_t": {},
    "swin_v2_t": {},
    "segmentation.fcn_resnet50": {"weights_backbone": None},
    "segmentation.deeplabv3_mobilenet_v3_large": {"weights_backbone": None},
    "segmentation.lraspp_mobilenet_v3_large": {"weights_backbone": None},
    "detection.retinanet_resnet50_fpn": {"weights_backbone": None},
    "detection.ssdlite320_mobilenet_v3_large": {"weights_backbone": None},
    "detection.fasterrcnn_mobilenet_v3_large_fpn": {"weights_backbone": None},
}
"""Name in `torchvision.models` -> arguments beside 10 classes and no weights."""

_NARROW = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
_TOKENS = {"vocab_size": VOCABULARY}
_DECODER = _NARROW | _TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
_ENCODER = _NARROW | _TOKENS | {"max_position_embeddings": 128, "pad_token_id": 0}
_VISION = _NARROW | {"image_size": 64, "patch_size": 8}
_SEQ2SEQ = _TOKENS | {
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "Roberta": ("ForMaskedLM", _ENCODER | {"max_position_embeddings": 160}, LABELLED),
    "Electra": ("ForMaskedLM", _ENCODER | {"embedding_size": 32}, LABELLED),
    "Albert": ("ForMaskedLM", _ENCODER | {"embedding_size": 32}, LABELLED),
    "DistilBert": (
        "ForMaskedLM",
        _TOKENS | {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 128},
        LABELLED,
    ),
    "MPNet": ("ForMaskedLM", _ENCODER, LABELLED),
    "DebertaV2": ("ForMaskedLM", _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, LABELLED),
    "RoFormer": ("ForMaskedLM", _ENCODER, LABELLED),
    "FNet": ("ForMaskedLM", _NARROW | _TOKENS | {"tpu_short_seq_length": LENGTH, "pad_token_id": 0}, LABELLED),
    "GPTNeoX": ("ForCausalLM", _DECODER, LABELLED),
    "OPT": (
        "ForCausalLM",
        _ENCODER | {"ffn_dim": 128, "word_embed_proj_dim": 64},
        LABELLED,
    ),
    "Bloom": ("ForCausalLM", _TOKENS | {"hidden_size": 64, "n_layer": 4, "n_head": 4}, LABELLED),
    "Falcon": ("ForCausalLM", _DECODER, LABELLED),
    "Mistral": ("ForCausalLM", _DECODER | {"sliding_window": 32}, LABELLED),
    "Qwen2": ("ForCausalLM", _DECODER, LABELLED),
    "Qwen3": ("ForCausalLM", _DECODER | {"head_dim": 16}, LABELLED),
    "Gemma2": ("ForCausalLM", _DECODER | {"head_dim": 16, "sliding_window": 32}, LABELLED),
    "Phi": ("ForCausalLM", _DECODER, LABELLED),
    "StableLm": ("ForCausalLM", _DECODER, LABELLED),
    "Olmo": ("ForCausalLM", _DECODER, LABELLED),
    "Mixtral": ("ForCausalLM", _DECODER | {"num_local_experts": 4}, LABELLED),
    "T5": (
        "ForConditionalGeneration",
        _TOKENS
        | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
        LABELLED,
    ),
    "Bart": ("ForConditionalGeneration", _SEQ2SEQ, LABELLED),
    "Pegasus": ("ForConditionalGeneration", _SEQ2SEQ, LABELLED),
    "Deit": ("ForImageClassification", _VISION, PIXELS),
    "Beit": ("ForImageClassification", _VISION, PIXELS),
    "Dinov2": ("ForImageClassification", _VISION, PIXELS),
    "ConvNextV2": (
        "ForImageClassification",
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1], "image_size": 64},
        PIXELS,
    ),
    "Segformer": (
        "ForSemanticSegmentation",
        {
            "depths": [1, 1, 2, 1],
            "hidden_sizes": [16, 32, 64, 96],
            "decoder_hidden_size": 64,
            "num_attention_heads": [1, 2, 4, 4],
        },
        PIXELS,
    ),
    "PoolFormer": ("ForImageClassification", {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 96]}, PIXELS),
    "Swinv2": (
        "ForImageClassification",
        {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 24,
            "depths": [1, 1, 2],
            "num_heads": [1, 2, 4],
            "window_size": 4,
        },
        PIXELS,
    ),
    "Siglip": (
        "Model",
        {"text_config": _ENCODER | {"projection_size": 64, "pad_token_id": 0}, "vision_config": _VISION},
        [*TEXT, *PIXELS],
    ),
    "Wav2Vec2": (
        "ForSequenceClassification",
        _NARROW
        | {
            "conv_dim": [32, 32, 32],
            "conv_kernel": [10, 3, 3],
            "conv_stride": [5, 2, 2],
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "classifier_proj_size": 32,
        },
        [f"input_values=float32[{BATCH},4000]"],
    ),
}
"""Prefix of the classes -> the rest of the model's class, its configuration, its inputs."""


def architecture(name: str) -> nn.Module:
    """Return the model of an entry, weights drawn from seed 0."""
    torch.manual_seed(0)
    if name in TORCHVISION:
        import torchvision

        *folders, last = name.split(".")
        place = torchvision.models
        for folder in folders:
            place = getattr(place, folder)
        made: nn.Module = getattr(place, last)(weights=None, num_classes=10, **TORCHVISION[name])
        return made
    import transformers

    kind, keys, _ = TRANSFORMERS[name]
    config = getattr(transformers, f"{_class(name)}Config")(**keys)
    if "labels=" in " ".join(inputs_of(name)):
        config.use_cache = False
    model: nn.Module = getattr(transformers, f"{_class(name)}{kind}")(config)
    return model


def inputs_of(name: str) -> list[str]:
    """Return the specs of its inputs, as `--input` takes them."""
    return IMAGES if name in TORCHVISION else TRANSFORMERS[name][2]


def _class(name: str) -> str:
    return {"Deit": "DeiT"}.get(name, name)
