"""The import path of `ChainModule` in older programs; new ones take it from `varuna_plugin.engine`."""

from varuna_capslog.varuna_plugin.engine import ChainModule

__all__ = ["ChainModule"]
