"""What the attention layers of a Hugging Face model cache for one sequence, from its config and its modules.

The rules are those of transformers 5 (`DynamicCache`): every attention module that looks back (`is_causal`) and knows
its place (`layer_idx`) keeps one key and one value of `head_dim` numbers per key-value head and token; layers of
sliding windows and chunks keep no more tokens than these. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import source_modules
from varuna_capslog.model.layer import Layer

__all__ = ["attention_caches", "cache_of_layers"]

_LIMITS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of attention that keep no more tokens than a key of the config says."""


def attention_caches(model: nn.Module, tokens: int | None, itemsize: int) -> dict[str, int] | None:
    """Qualified name of each attention module that caches -> bytes for one sequence.

    None: the model is not one of transformers. An empty dict: it is, and caches nothing (BERT, ViT).

    Args:
        tokens: of a sequence; None where the model's inputs have none.
        itemsize: bytes of one number.

    Raises:
        CapslogError: it caches something else than keys and values of equal heads (latent attention, recurrent states,
            the encoder's in an encoder-decoder).
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, "it is an encoder-decoder")
    text = config.get_text_config()
    places = _places(model)
    if not places or tokens is None:
        return {}
    if getattr(text, "kv_lora_rank", None):
        _refuse(config, "it caches latent vectors (kv_lora_rank)")
    heads = getattr(text, "num_key_value_heads", None)
    if heads is None:
        if getattr(text, "multi_query", False) or hasattr(text, "num_kv_heads"):
            _refuse(config, "its config does not say num_key_value_heads")
        heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kept = [min(tokens, limit) for limit in _limits(config, text, max(places.values()) + 1, tokens)]
    return {path: 2 * heads * size * itemsize * kept[place] for path, place in places.items() if place < len(kept)}


def cache_of_layers(caches: Mapping[str, int], layers: Iterable[Layer]) -> list[int]:
    """Bytes that each layer of a captured chain caches: those of the attention modules that it is the first to run."""
    layer_bytes, waiting = [], dict(caches)
    for layer in layers:
        paths = [
            path
            for path in waiting
            if any(name == path or name.startswith(f"{path}.") for name in source_modules(layer) or ())
        ]
        layer_bytes.append(sum(waiting.pop(path) for path in paths))
    return layer_bytes


def _places(model: nn.Module) -> dict[str, int]:
    """Innermost modules that know their position (`layer_idx`) and look back -> that position."""
    places: dict[str, int] = {}
    for path, module in model.named_modules():
        place = getattr(module, "layer_idx", None)
        if isinstance(place, int) and getattr(module, "is_causal", False):
            places = {name: index for name, index in places.items() if not path.startswith(f"{name}.")}
            places[path] = place
    return places


def _limits(config: Any, text: Any, count: int, tokens: int) -> list[int]:
    """Largest number of tokens that each layer keeps; layers that reuse other layers' keys and values have no entry."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        configured = {kind: getattr(text, key, None) for kind, key in _LIMITS.items()}
        kinds = [next((kind for kind, limit in configured.items() if limit is not None), "full_attention")] * count
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    limits = []
    for kind in kinds[: len(kinds) - shared]:
        if kind != "full_attention" and kind not in _LIMITS:
            _refuse(config, f"it has layers of {kind}")
        limit = getattr(text, _LIMITS[kind], None) if kind in _LIMITS else None
        limits.append(tokens if limit is None else limit)
    return limits


def _refuse(config: Any, why: str) -> None:
    raise CapslogError(
        f"what a {config.model_type} caches is not known: {why}; wrap it in a module of your own and state the bytes "
        "with --cache"
    )
