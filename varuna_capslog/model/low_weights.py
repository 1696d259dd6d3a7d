"""Which parameters of a layer are kept in 16 bits for forward and backward, where `train.weights` says so.

Shapes are traced, bytes are counted and the engine's layers are made with the same answer. The float32 master of a
parameter that is trained is the business of the engine.
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
    """The parameters of a module that are kept in 16 bits, with the type: those of float32, but for the ones of
    normalisations.

    Args:
        weights: "float32" (none are), "bfloat16" or "float16".
    """
    if weights == "float32":
        return {}
    norms = [part for part in module.modules() if isinstance(part, _WIDE)]
    wide = {id(one) for part in norms for one in part.parameters(recurse=False)}
    low = [one for one in module.parameters() if one.dtype == torch.float32 and id(one) not in wide]
    return dict.fromkeys(low, _TYPES[weights])


def low_bytes(module: nn.Module, weights: str) -> tuple[int, int]:
    """What 16 bits change of a module's bytes: what is added by parameters that lie beside their float32 masters, and
    what frozen ones, which have no master, take less.

    Args as of `low_parameters`.
    """
    low = low_parameters(module, weights).items()
    beside = sum(one.numel() * dtype.itemsize for one, dtype in low if one.requires_grad)
    less = sum(one.numel() * (one.itemsize - dtype.itemsize) for one, dtype in low if not one.requires_grad)
    return beside, less
