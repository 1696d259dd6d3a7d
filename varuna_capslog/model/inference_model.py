"""An ordinary model as it is served: in its own dtype, in eval mode, without a loss; and the caches of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import source_modules
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload

__all__ = ["InferenceModel", "attention_caches", "cache_of_layers"]


# -- What the attention layers of a Hugging Face model cache for one sequence, from its config and its modules.
#
# The rules are those of transformers 5 (`DynamicCache`): every attention module that looks back (`is_causal`) and
# knows its place (`layer_idx`) keeps one key and one value of `head_dim` numbers per key-value head and token; layers
# of sliding windows and chunks keep no more tokens than these. Nothing here imports transformers.


_LIMITS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of attention that keep no more tokens than a key of the config says."""


def attention_caches(model: nn.Module, tokens: int | None, itemsize: int) -> dict[str, int] | None:
    """Qualified name of each attention module that caches -> bytes for one sequence.

    None: not a model of transformers. {}: a model of transformers that caches nothing (BERT, ViT).

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
    """Map the innermost modules that look back and know their position (`layer_idx`) to that position."""
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


# -- an ordinary model as it is served


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InferenceModel(ModelWorkload):
    """Workload of a model that is served.

    Args:
        settings: the config's `model` section.
        microbatch_size: samples of one forward.
        dtype: of weights, caches and floating-point inputs, a name in DTYPES; None: that of the model's parameters.
        sequence: tokens of a sequence: the second size of the inputs of whole numbers; None: as the inputs say.

    Attributes:
        tokens: of a sequence; None where no input has tokens. Set by the first chain that is built, as is
            `cache_bytes`.
        cache_bytes: bytes that each layer caches for one sequence; None where they are unknown.

    Raises:
        CapslogError: an input spec that cannot be read; an unknown dtype.
    """

    def __init__(
        self, settings: ModelSection, microbatch_size: int, dtype: str | None = None, sequence: int | None = None
    ) -> None:
        super().__init__(settings, microbatch_size)
        if dtype is not None and dtype not in DTYPES:
            raise CapslogError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
        self._stated = None if dtype is None else DTYPES[dtype]
        self.dtype = self._stated or torch.float32
        self._sequence = sequence
        self.tokens: int | None = None
        self.cache_bytes: tuple[int, ...] | None = None
        self._caches: Mapping[str, int] | None = None

    def loss(
        self, outputs: Mapping[str, Tensor], targets: object, normalisers: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Raise: a served model has no loss."""
        raise CapslogError(f"{self.name} is served, and not trained: it has no loss")

    def _ready(self, model: nn.Module | Chain) -> None:
        modules = [layer.module for layer in model.layers] if isinstance(model, Chain) else [model]
        types = {
            parameter.dtype for module in modules for parameter in module.parameters() if parameter.is_floating_point()
        }
        self.dtype = self._stated or (types.pop() if len(types) == 1 else torch.float32)
        for module in modules:
            if self._stated is not None and types != {self._stated}:
                module.to(self._stated)
        self._specs = tuple(
            dataclasses.replace(spec, dtype=self.dtype) if spec.dtype.is_floating_point else spec
            for spec in self._specs
        )
        counted = [spec for spec in self._specs if not spec.dtype.is_floating_point and len(spec.shape) > 1]
        if self._sequence is not None:
            if not counted:
                raise CapslogError(
                    f"--sequence is {self._sequence}, but {self.name} has no input of tokens (whole numbers, batch "
                    "first); leave it out"
                )
            longer = {spec.name: (spec.shape[0], self._sequence, *spec.shape[2:]) for spec in counted}
            self._specs = tuple(
                dataclasses.replace(spec, shape=longer.get(spec.name, spec.shape)) for spec in self._specs
            )
        self.tokens = self._sequence or (counted[0].shape[1] if counted else None)
        if isinstance(model, nn.Module):
            self._caches = attention_caches(model, self.tokens, self.dtype.itemsize)

    def _finished(self, chain: Chain) -> Chain:
        self.cache_bytes = None if self._caches is None else tuple(cache_of_layers(self._caches, chain.layers))
        return chain
