"""The drawn models with few layers: folders with config.json for `--hf`, and a function for `--model`.

Widths are those of the library's default configs, since nothing of a model is allocated; only depths are made small.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "captured"))
from drawn_models import DIFFUSERS, TUNERS, peft_model

DEPTH = 2
"""Layers of every stack, or as many as it takes to have one of each kind, where a config lists kinds."""
_DEPTHS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks)|(\w+_)?(layers|depths?)")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layers", "block_types")
_SKIPPED = ("feature_layer", "level", "skip", "dense_layers")


_BACKBONES: dict[str, dict[str, Any]] = {
    "vitmatte": {
        "hidden_size": 768,
        "backbone_config": {"model_type": "vitdet", "num_channels": 4, "num_hidden_layers": 2, "out_indices": [2]},
    },
    "pp_ocrv6_small_det": {
        "layer_list_out_channels": [48, 96, 192, 384],
        "backbone_config": {"model_type": "pp_lcnet_v3", "scale": 0.75, "divisor": 16, "out_indices": [2, 3, 4, 5]},
    },
}
"""Model types whose library does not run its own default config, since its sizes do not fit its backbone -> changes."""


def write_folder(kind: str, folder: Path) -> None:
    """Write config.json of a model type of transformers, from its class's defaults with fewer layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    config.architectures = [architecture_of(kind)]
    whole = config.to_dict() | _BACKBONES.get(kind, {})
    for changed in (whole,) if kind in _BACKBONES else (_shallow(whole), whole):
        try:
            made = type(config).from_dict(changed)
            _build(made)
        except Exception as error:  # whatever the library's own code raises: this config cannot have fewer layers
            why = error
            continue
        made.save_pretrained(folder)
        return
    raise why


def _build(config: Any) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def architecture_of(kind: str) -> str:
    """Return the class that the first of transformers' tasks, in the order below, gives a model type."""
    from transformers.models.auto import modeling_auto

    first = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("MAPPING_NAMES")]
    ordered = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in (*first, "IMAGE_CLASSIFICATION")]
    for name in [*ordered, *(name for name in names if name not in ordered)]:
        made = getattr(modeling_auto, name, {}).get(kind)
        if made is not None:
            return made if isinstance(made, str) else made[0]
    raise KeyError(kind)


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with few layers, also in the configs inside it."""
    depth = DEPTH
    for key in _KINDS:
        kinds = config.get(key)
        if isinstance(kinds, list) and kinds:
            depth = max(depth, *(kinds.index(one) + 1 for one in set(map(str, kinds)) if one in kinds))
    small: dict[str, Any] = {}
    for key, setting in config.items():
        if not isinstance(key, str):
            small[key] = setting
        elif isinstance(setting, dict):
            small[key] = _shallow(setting)
        elif isinstance(setting, list) and setting and key in _KINDS:
            small[key] = setting[:depth]
        elif not _DEPTHS.fullmatch(key) or any(word in key for word in _SKIPPED):
            small[key] = min(setting, 1) if key == "first_k_dense_replace" else setting
        elif isinstance(setting, list) and all(isinstance(size, int) for size in setting):
            small[key] = [min(size, 1) for size in setting]
        else:
            small[key] = min(setting, depth) if isinstance(setting, int) else setting
    return small


TUNERS |= {"OSF": {"effective_rank": 8}, "LORA": {"r": 4}, "HRA": {"r": 4}}


def _times() -> torch.Tensor:
    return torch.randint(1000, (1,))


DIFFUSERS |= {
    "PixArtTransformer2DModel": (
        {"num_layers": 2},
        lambda: {
            "hidden_states": torch.randn(1, 4, 128, 128),
            "encoder_hidden_states": torch.randn(1, 120, 1152),
            "timestep": _times(),
            "added_cond_kwargs": {"resolution": torch.ones(1, 2), "aspect_ratio": torch.ones(1, 1)},
        },
    ),
    "SanaVideoTransformer3DModel": (
        {"num_layers": 2},
        lambda: {
            "hidden_states": torch.randn(1, 16, 5, 30, 52),
            "encoder_hidden_states": torch.randn(1, 64, 2304),
            "timestep": _times(),
        },
    ),
    "ChromaTransformer2DModel": (
        {"num_layers": 2, "num_single_layers": 2},
        lambda: {
            "hidden_states": torch.randn(1, 256, 64),
            "encoder_hidden_states": torch.randn(1, 64, 4096),
            "timestep": torch.rand(1),
            "img_ids": torch.zeros(256, 3),
            "txt_ids": torch.zeros(64, 3),
        },
    ),
    "HeliosTransformer3DModel": (
        {"num_layers": 2},
        lambda: {
            "hidden_states": torch.randn(1, 16, 5, 16, 16),
            "timestep": _times(),
            "encoder_hidden_states": torch.randn(1, 64, 4096),
        },
    ),
    "HunyuanVideo15Transformer3DModel": (
        {"num_layers": 2, "num_refiner_layers": 2},
        lambda: {
            "hidden_states": torch.randn(1, 65, 5, 16, 16),
            "timestep": 1000 * torch.rand(1),
            "encoder_hidden_states": torch.randn(1, 64, 3584),
            "encoder_attention_mask": torch.ones(1, 64),
            "encoder_hidden_states_2": torch.randn(1, 64, 1472),
            "encoder_attention_mask_2": torch.ones(1, 64),
            "image_embeds": torch.randn(1, 729, 1152),
        },
    ),
}


def _denoiser(name: str) -> tuple[nn.Module, Any]:
    import diffusers

    settings, inputs = DIFFUSERS[name]
    example = inputs()
    with torch.device("meta"):
        return getattr(diffusers, name)(**settings), example


def _timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    return model, {"x": torch.randn(2, *model.pretrained_cfg["input_size"])}


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    import torchvision

    detects = "fpn" in name
    model = torchvision.models.get_model(name, **({"weights_backbone": None} if detects else {}))
    if not detects:
        return model, {"x": torch.randn(2, 3, 224, 224)}
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.ones(1, dtype=torch.int64)}]
    return model, {"images": [torch.randn(3, 320, 320)], "targets": targets}


def _peft(name: str) -> tuple[nn.Module, Any]:
    drawn = peft_model(name)
    return drawn.build(), drawn.inputs()


BUILDERS: dict[str, Callable[[str], tuple[nn.Module, Any]]] = {
    "diffusers": _denoiser,
    "timm": _timm,
    "torchvision": _torchvision,
    "peft": _peft,
}


def model(library: str, name: str) -> tuple[nn.Module, Any]:
    """Build a drawn model of one of the four libraries for training, with its example inputs."""
    made, example = BUILDERS[library](name)
    return made.train(), example
