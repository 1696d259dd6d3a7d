"""Says which parameters of a layer are kept in 16 bits for forward and backward, where `train.weights` asks for it.

Tracing of shapes, counting of bytes and the engine's layers all use this answer. The engine keeps the float32 master of
a parameter that is trained.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["low_bytes", "low_parameters"]

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDE = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Their kernels take activations of 16 or 32 bits beside parameters of 32 bits, and refuse other mixtures; under
autocast both kinds of activations come. Running statistics are 32 bits, and parameters beside them must be so."""


def low_parameters(module: nn.Module, weights: str) -> dict[nn.Parameter, torch.dtype]:
    """Return the parameters of a module that are kept in 16 bits, with the dtype: those of float32, except those of
    normalisations.

    Args:
        weights: "float32" (none are), "bfloat16" or "float16".
    """
    if weights == "float32":
        return {}
    norms = [part for part in module.modules() if isinstance(part, _WIDE)]
    wide = {id(parameter) for part in norms for parameter in part.parameters(recurse=False)}
    low = [
        parameter for parameter in module.parameters() if parameter.dtype == torch.float32 and id(parameter) not in wide
    ]
    return dict.fromkeys(low, _TYPES[weights])


def low_bytes(module: nn.Module, weights: str) -> tuple[int, int]:
    """Return how 16 bits change a module's bytes: (bytes added by parameters that lie beside their float32 masters,
    bytes saved by frozen ones, which have no master).

    Args as of `low_parameters`.
    """
    low = low_parameters(module, weights).items()
    beside = sum(parameter.numel() * dtype.itemsize for parameter, dtype in low if parameter.requires_grad)
    less = sum(
        parameter.numel() * (parameter.itemsize - dtype.itemsize)
        for parameter, dtype in low
        if not parameter.requires_grad
    )
    return beside, less
