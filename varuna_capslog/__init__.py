"""Decides where to cut a deep network into pipeline stages, proves it before the run, and trains with it.

    import varuna_capslog as capslog

    plan = capslog.plan(model, sample, devices=4, capacity="16GiB")
    print(plan)

The names of this package load their modules at first use, so importing it imports no torch. No module of the package
imports this one.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = (
    False  # type checkers take it for true; importing typing would double the time of importing this package
)
if TYPE_CHECKING:
    from typing import Any

    from varuna_capslog.api.decoding import decode, plan_decoding
    from varuna_capslog.api.fits import fits
    from varuna_capslog.api.planning import Estimate, ModelPlan, estimate, plan
    from varuna_capslog.api.training import TrainedRun, train
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.base.version import __version__
    from varuna_capslog.config.reading import Config, load_config
    from varuna_capslog.elastic import on_notice, request_morph
    from varuna_capslog.fitting.module import fit
    from varuna_capslog.model.chain import Chain, Layer, LayerFactory
    from varuna_capslog.model.workload import DataSource, Workload
    from varuna_capslog.plans.plan import Plan, read_plan, write_plan
    from varuna_capslog.profiles.record import LayerProfile, Profile, read_profile, write_profile
    from varuna_capslog.start.callbacks import STOP

__all__ = [
    "STOP",
    "CapslogError",
    "Chain",
    "Config",
    "DataSource",
    "Estimate",
    "Layer",
    "LayerFactory",
    "LayerProfile",
    "ModelPlan",
    "Plan",
    "Profile",
    "TrainedRun",
    "Workload",
    "__version__",
    "decode",
    "estimate",
    "fit",
    "fits",
    "load_config",
    "on_notice",
    "plan",
    "plan_decoding",
    "read_plan",
    "read_profile",
    "request_morph",
    "train",
    "write_plan",
    "write_profile",
]

_NAMES = {
    "api.decoding": ("decode", "plan_decoding"),
    "api.fits": ("fits",),
    "api.planning": ("Estimate", "ModelPlan", "estimate", "plan"),
    "api.training": ("TrainedRun", "train"),
    "base.errors": ("CapslogError",),
    "base.version": ("__version__",),
    "config.reading": ("Config", "load_config"),
    "elastic": ("on_notice", "request_morph"),
    "fitting.module": ("fit",),
    "model.chain": ("Chain", "Layer", "LayerFactory"),
    "model.workload": ("DataSource", "Workload"),
    "plans.plan": ("Plan", "read_plan", "write_plan"),
    "start.callbacks": ("STOP",),
    "profiles.record": ("LayerProfile", "Profile", "read_profile", "write_profile"),
}
"""The public names that each module below `varuna_capslog` defines."""


def __getattr__(name: str) -> Any:
    """Return the object of a public name, imported from its module. Raises AttributeError for other names."""
    for module, names in _NAMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
