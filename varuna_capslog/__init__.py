"""Decides where to cut a deep network into pipeline stages, proves it before the run, and trains with it.

What a program needs is imported from here: `from varuna_capslog import Chain, read_plan`. Each name is loaded from its
room when it is first used, so importing this package imports no torch. No room imports this module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.version import __version__

if TYPE_CHECKING:
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.config.reading import Config, load_config
    from varuna_capslog.elastic import on_notice, request_morph
    from varuna_capslog.model.chain import Chain, Layer
    from varuna_capslog.model.workload import DataSource, Workload
    from varuna_capslog.plans.plan import Plan, read_plan, write_plan
    from varuna_capslog.profiles.record import LayerProfile, Profile, read_profile, write_profile

__all__ = [
    "CapslogError",
    "Chain",
    "Config",
    "DataSource",
    "Layer",
    "LayerProfile",
    "Plan",
    "Profile",
    "Workload",
    "__version__",
    "load_config",
    "on_notice",
    "read_plan",
    "read_profile",
    "request_morph",
    "write_plan",
    "write_profile",
]

_MODULES = {
    "CapslogError": "base.errors",
    "Chain": "model.chain",
    "Config": "config.reading",
    "DataSource": "model.workload",
    "Layer": "model.chain",
    "LayerProfile": "profiles.record",
    "Plan": "plans.plan",
    "Profile": "profiles.record",
    "Workload": "model.workload",
    "load_config": "config.reading",
    "on_notice": "elastic",
    "read_plan": "plans.plan",
    "read_profile": "profiles.record",
    "request_morph": "elastic",
    "write_plan": "plans.plan",
    "write_profile": "profiles.record",
}
"""Where each public name is defined, below `varuna_capslog`."""


def __getattr__(name: str) -> Any:
    """A public name, loaded from its room. Raises AttributeError for any other name, as for every module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
