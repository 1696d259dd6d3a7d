"""An ordinary model as it is served: in its own dtype, in eval mode, without a loss; and the caches of its layers.

It is a `ModelWorkload` whose chain ends with the model's result. `profiling/inference` estimates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.attention_cache import attention_caches, cache_of_layers
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload

__all__ = ["DTYPES", "InferenceModel"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InferenceModel(ModelWorkload):
    """Workload of a model that is served.

    Args:
        settings: the config's `model` section.
        microbatch_size: samples of one forward.
        dtype: of weights, caches and floating-point inputs, a name in DTYPES; None: that of the model's parameters.
        sequence: tokens of a sequence: the second size of the inputs of whole numbers; None: as the inputs say.

    Attributes:
        tokens: of a sequence; None where no input has tokens. Known once a chain was built, as is the following.
        cache_bytes: bytes that each layer caches for one sequence; None where the model does not say it.

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
