"""Stores profiles between runs: one file per model and conditions. A cache may lose everything at any time, so a file
that cannot be read is no error: the profile is made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import cache_home
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.sources import class_name, code_digest, module_settings, source_file
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.conditions import (
    HYBRID_LETTERS,
    JOINED_PARTS,
    KEPT_WHOLE,
    LAST_HOLDS,
    ONE_MICROBATCH,
    PART_SECONDS,
    UPDATE_RATE,
)
from varuna_capslog.profiles.record import Profile, read_profile, write_profile

__all__ = ["cpu_name", "folder", "kept", "load", "model_digest", "store"]

_log = logging.getLogger(__name__)
_KNOWN_AFTERWARDS = (
    *("profiling", "attention", "seconds", "headroom", "limits"),
    *(UPDATE_RATE, KEPT_WHOLE, LAST_HOLDS, JOINED_PARTS, HYBRID_LETTERS, PART_SECONDS, ONE_MICROBATCH),
)
"""Conditions that are known only after the measurement or estimate, and so are no part of a cache key."""


def folder() -> Path | None:
    """Return `varuna-capslog/profiles` in the user's cache; None for a user without a cache."""
    home = cache_home()
    return None if home is None else home / "varuna-capslog" / "profiles"


def cpu_name() -> str:
    """Return the model of this machine's processor, or its architecture where the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def load(conditions: Mapping[str, Any]) -> Profile | None:
    """Return the profile that was stored under exactly these conditions (`model_digest` among them), or None.

    A damaged file is logged and counts as missing; a file of an older version with fewer fields is missing without a
    log entry. The next `store` replaces it.
    """
    path = _path(conditions)
    if path is None or not path.exists():
        return None
    try:
        profile = read_profile(path)
    except CapslogError as error:
        _log.warning("the cached profile is damaged and is measured again: %s", error)
        return None
    if _lasting(profile.conditions) != dict(conditions):
        _log.warning("the cached profile %s holds other conditions and is measured again", path)
        return None
    pairs = ((row.device, row.action_bytes) for row in profile.observations if row.action_bytes is not None)
    if any(
        actions.moment_bytes is None or (device != "cpu" and actions.lasting_bytes is None) for device, actions in pairs
    ):
        return None  # of an earlier version, which did not have these fields
    if profile.source == "estimated" and any(layer.divisible is None for layer in profile.layers):
        return None
    return profile


def store(profile: Profile) -> None:
    """Store a profile under its conditions, atomically; a folder that cannot be written is logged."""
    path = _path(profile.conditions)
    if path is None:
        return
    try:
        write_profile(path, profile)
    except CapslogError as error:
        _log.warning("the profile is not kept for the next time: %s", error)


def kept(conditions: Mapping[str, Any], model: str, make: Callable[[], Profile]) -> Profile:
    """Return the profile stored under these conditions; without one, store and return the result of `make`. The profile
    gets the name `model`, since it may have been stored under another name.
    """
    profile = load(conditions)
    if profile is None:
        profile = make()
        store(profile)
    return profile if profile.model == model else dataclasses.replace(profile, model=model)


def _lasting(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions without `_KNOWN_AFTERWARDS`."""
    return {key: value for key, value in conditions.items() if key not in _KNOWN_AFTERWARDS}


def _path(conditions: Mapping[str, Any]) -> Path | None:
    text, kept_in = json.dumps(_lasting(conditions), sort_keys=True), folder()
    return None if kept_in is None else kept_in / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def model_digest(workload: Workload, chain: Chain) -> str:
    """Return the SHA-256 of all that a model's costs depend on: layers, module classes, settings, shapes, source files.

    The values of weights do not count. Equal in every process and on every machine with the same files.
    """
    digest = hashlib.sha256()
    sources: set[type] = {type(workload)}
    for layer in chain.layers:
        digest.update(repr((layer.name, layer.reads, layer.writes)).encode())
        for name, module in layer.module.named_modules():
            sources.add(type(module))
            digest.update(repr((name, class_name(type(module)), list(module_settings(module)))).encode())
            if isinstance(module, torch.fx.GraphModule):
                digest.update(module.code.encode())
        for name, tensor in [*layer.module.named_parameters(), *layer.module.named_buffers()]:
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)).encode())
    functions = workload.costs_depend_on()
    if functions:
        modules = sorted({name.partition(":")[0] for name in functions})
        digest.update(repr((sorted(functions), code_digest((), modules))).encode())
    digest.update(repr([(shared.name, shared.layers) for shared in chain.shared]).encode())
    for file in sorted({file for kind in sources if (file := source_file(kind)) is not None}):
        digest.update(file.read_bytes())
    return f"sha256:{digest.hexdigest()}"
