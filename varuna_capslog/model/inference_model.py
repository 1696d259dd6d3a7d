"""Ordinary model as it is served: in its own dtype, in eval mode, without a loss; and the caches of its layers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import source_modules
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.hollow import on_host
from varuna_capslog.model.hugging_face import keep_no_cache
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload

__all__ = ["InferenceModel", "cache_of_layers", "layer_caches"]


# -- Computes the bytes that layers of a Hugging Face model cache for one sequence, from prefills of the model itself.
#
# Two short prefills on tensors without values fill transformers' own cache. The bytes of a layer have a constant part
# (recurrent states) and a part per token, up to the window: a cache keeps one token less than its window, since the
# next token takes that place. An encoder-decoder is prefilled with the inputs themselves: its decoder caches keys and
# values of its own tokens, and of all that the encoder returns. Nothing here imports transformers.


_SHORT = (8, 12)
"""Tokens of the two prefills."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in the results of transformers' models."""


def layer_caches(
    model: nn.Module, tokens: int | None, inputs: Mapping[str, Tensor] | None = None
) -> dict[str, int] | None:
    """Return the bytes that each caching module keeps for one sequence, by the module's qualified name.

    None: not a model of transformers. {}: a model of transformers that caches nothing (BERT, ViT).

    Args:
        tokens: number of tokens of a sequence; None where the model's inputs have no tokens.
        inputs: tensors of one sequence, for an encoder-decoder.

    Raises:
        CapslogError: its prefill cannot run on tensors without values.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        return None
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    places = _places(model, "decoder" if decodes else "")
    takes = inspect.signature(model.forward).parameters.keys() & {"use_cache", *_CACHES}
    if not places or tokens is None or not takes:
        return {}
    try:
        if decodes:
            filled = [_prefilled(model, inputs or {}, part) for part in _PARTS]
        else:
            filled = [_prefilled(model, {"input_ids": torch.zeros(1, count, dtype=torch.int64)}) for count in _SHORT]
    except Exception as error:  # the model's own code raises it
        _refuse(config, f"its prefill fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
    caches = dict.fromkeys(places, 0)
    for number, kept in enumerate(filled if decodes else filled[:1]):
        for place, layer in enumerate(kept):
            paths = [path for path in places if places[path] == place]
            if paths:  # a decoder layer's first module attends to its own tokens, the last to the encoder's result
                bytes_kept = layer.size if decodes else _bytes_of(layer, filled[1][place], tokens)
                caches[paths[min(number, len(paths) - 1)]] += bytes_kept
    return {path: size for path, size in caches.items() if size}


_PARTS = ("self_attention_cache", "cross_attention_cache")
"""Parts of the cache of a decoder behind an encoder."""


class _Kept(NamedTuple):
    """Bytes that a layer keeps after a prefill. window: the most tokens that it attends to; None: no limit."""

    size: int
    window: int | None


def _bytes_of(few: _Kept, more: _Kept, tokens: int) -> int:
    """Return the bytes that a layer keeps for `tokens`, extrapolated from the two short prefills."""
    lengths = [count if few.window is None else min(count, few.window - 1) for count in (*_SHORT, tokens)]
    grown = lengths[1] - lengths[0]
    each = (more.size - few.size) // grown if grown else few.size // max(1, lengths[0])
    return few.size + each * (lengths[2] - lengths[0])


def _prefilled(model: nn.Module, inputs: Mapping[str, Tensor], part: str = "") -> list[_Kept]:
    """Return the bytes of each layer of the cache, or of one part of the cache, after a prefill with these inputs."""
    with on_host(model), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        device = next(model.parameters()).device
        made = model(**{name: mode.from_tensor(x).to(device) for name, x in inputs.items()}, use_cache=True)
    cache = next((made[name] for name in _CACHES if made.get(name) is not None), None)
    cache = getattr(cache, part) if part else cache
    return [_kept_by(layer) for layer in getattr(cache, "layers", ())]


def _kept_by(layer: Any) -> _Kept:
    tensors = [leaf for leaf in pytree.tree_leaves(vars(layer)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return _Kept(sum(tensor.nbytes for tensor in tensors), getattr(layer, "sliding_window", None))


def cache_of_layers(caches: Mapping[str, int], layers: Iterable[Layer]) -> list[int]:
    """Return the bytes that each layer of a captured chain caches: each attention module counts in its first layer."""
    layer_bytes, waiting = [], dict(caches)
    for layer in layers:
        paths = [
            path
            for path in waiting
            if any(name == path or name.startswith(f"{path}.") for name in source_modules(layer) or ())
        ]
        layer_bytes.append(sum(waiting.pop(path) for path in paths))
    return layer_bytes


def _places(model: nn.Module, below: str) -> dict[str, int]:
    """Map the path of the innermost module with each `layer_idx` -> this index; the first of several modules counts.

    below: name of a module, such as a decoder: all modules inside it count, and no others; "": the whole model.
    """
    places: dict[str, int] = {}
    for path, module in model.named_modules():
        place = getattr(module, "layer_idx", None)
        if isinstance(place, int) and (not below or below in path.split(".")):
            places = {name: index for name, index in places.items() if not path.startswith(f"{name}.")}
            if below or place not in places.values():
                places[path] = place
    return places


def _refuse(config: Any, why: str) -> NoReturn:
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
        dtype: dtype of weights, caches and floating-point inputs, a key of DTYPES; None: that of most parameters.
        sequence: number of tokens of a sequence, the second size of integer inputs; None: as in the input specs.

    Attributes:
        tokens: number of tokens of a sequence; None where no input has tokens. Set by the first chain that is built,
            as is `cache_bytes`.
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
        self._encodes = False

    def of_next_token(self) -> Self:
        """Return the model as it runs for the next token of every sequence, without the attention to the cache.

        Raises CapslogError for an encoder-decoder.
        """
        if self._encodes:
            raise CapslogError(f"the encoder of {self.name} does not run for a next token, and its chain has it")
        model = copy.copy(self)
        model._sequence = 1
        return model

    def build_chain(self) -> Chain:
        """Return the chain of the model in eval mode. Raises as `ModelWorkload.build_chain`."""
        return self._captured(evaluates=None)

    def loss(
        self, outputs: Mapping[str, Tensor], targets: object, normalisers: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Raise: a served model has no loss."""
        raise CapslogError(f"{self.name} is served, and not trained: it has no loss")

    def _ready(self, model: nn.Module | Chain) -> None:
        modules = [layer.module for layer in model.layers] if isinstance(model, Chain) else [model]
        numbers = Counter[torch.dtype]()
        for module in modules:
            for parameter in filter(torch.is_floating_point, module.parameters()):
                numbers[parameter.dtype] += parameter.numel()
        self.dtype = self._stated or max(numbers, key=numbers.__getitem__, default=torch.float32)
        for module in modules:
            if self._stated is not None:
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
            one_sample = {spec.name: torch.zeros(1, *spec.shape[1:], dtype=spec.dtype) for spec in self._specs}
            self._caches = layer_caches(model, self.tokens, one_sample)
            self._encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
            keep_no_cache(model)

    def _finished(self, chain: Chain) -> Chain:
        self.cache_bytes = None if self._caches is None else tuple(cache_of_layers(self._caches, chain.layers))
        return chain
