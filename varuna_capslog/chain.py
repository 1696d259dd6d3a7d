"""The import path of `Chain` and `Layer` in programs written before the package had rooms; new ones use the package."""

from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.chain import TiedParameter as SharedParameter

__all__ = ["Chain", "Layer", "SharedParameter", "TensorSpec"]
