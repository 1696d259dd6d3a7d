"""Inputs of `plan`, `front`, `largest` and `compare`: options and KEY=VALUE, with a CONFIG, a model or a profile alone,
become one config. The config and its profile determine the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import NamedDevices, parse_devices
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import ModelFlags, announced, config_of_model, keys_of, overrides_of
from varuna_capslog.commands.shared import option
from varuna_capslog.planning.registry import REGISTRY

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = [
    "PlannerFlags",
    "Profiles",
    "QuestionFlags",
    "config_of_keys",
    "costs_of",
    "former_option",
    "question_of",
    "read_profiles",
]


Profiles = Annotated[
    list[Path] | None,
    option(
        "Plan for this profile instead of measuring; for planner joint one per microbatch size to choose from.",
        False,
        "--profile",
    ),
]

_OF_A_MODEL = ("workload", "model", "data", "profile", "variants", "splits", "numerics", "device")
"""Sections and keys that a profile alone has decided, or has no model for."""


@dataclass(frozen=True)
class QuestionFlags(ModelFlags):
    """Devices and step to plan for."""

    devices: shared.Devices = None
    memory: Annotated[
        str | None,
        option("Memory model: additive, composition, gpipe, 1f1b, varuna, ranks, or auto.", "pipeline.memory, or auto"),
    ] = None
    capacity: Annotated[
        str | None,
        option(
            "Memory of each device: 16GiB, or one size per device: 16GiB,16GiB,8GiB or 16GiB*2,8GiB.",
            "pipeline.capacity, or that of the kind of GPU, or no limit",
        ),
    ] = None
    minibatch: Annotated[
        int | None,
        option("Samples of one step, where time counts.", "CONFIG's; else 4 microbatches per device", min=1),
    ] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@dataclass(frozen=True)
class PlannerFlags(QuestionFlags):
    """Devices, step and planner."""

    planner: Annotated[
        str | None,
        option(
            f"{', '.join(REGISTRY)}; auto is another word for budget. See docs/planners.md; compare asks all.",
            "pipeline.planner, or budget where it can plan the run, else exact",
            metavar="NAME",
        ),
    ] = None


def read_profiles(paths: list[Path] | None, flags: ModelFlags) -> list[Profile]:
    """Return the profiles of the files. Raises CapslogError where a model is given too, or where nothing is given."""
    from varuna_capslog.profiles.record import read_profile

    if paths and flags.model is not None:
        raise CapslogError("both --profile and --model (or --hf) are given, but a profile is of one model; choose one")
    if not paths and flags.config is None and flags.model is None:
        raise CapslogError(
            "nothing to plan for: give a CONFIG file, --profile FILE, --model package.module:function or --hf FOLDER"
        )
    return [read_profile(path) for path in paths or ()]


def named_devices(flags: QuestionFlags) -> NamedDevices | None:
    """Return the devices of --devices. Raises CapslogError where an option that follows from their kinds is given."""
    if flags.devices is None:
        return None
    devices, keys = parse_devices(flags.devices, "--devices"), keys_of(flags.overrides)
    beside = {"--device": flags.device, "--capacity": flags.capacity}
    beside |= {key: keys.get(key) for key in ("profile.device", "pipeline.capacity")}
    devices.refuse_beside(beside, f"--devices {flags.devices}", f"--devices {devices.count}")
    return devices


def question_of(flags: QuestionFlags, planner: str | None, profile: Profile | None = None, **more: Any) -> Config:
    """Return the config to plan for.

    Args:
        profile: the costs, where they are known; without a CONFIG or model the config is made from it alone.
        more: further keys of the section `train`, or `numerics`, of the command itself; None: not given.

    Raises:
        CapslogError: options or keys that do not go together; no number of devices.
    """
    devices, keys = named_devices(flags), keys_of(flags.overrides)
    changes = {} if devices is None else {f"pipeline.{key}": value for key, value in devices.pipeline_keys.items()}
    if "pipeline.speeds" in keys:
        changes.pop("pipeline.speeds", None)
    options: dict[str, Any] = {"pipeline.planner": planner, "pipeline.memory": flags.memory}
    options |= {"pipeline.capacity": flags.capacity, "train.minibatch_size": flags.minibatch, **more}
    changes |= {key: value for key, value in options.items() if value is not None}
    fastest = None if devices is None else devices.fastest
    if devices is not None and profile is not None:
        from varuna_capslog.start.ordinary import check_kinds

        check_kinds(devices, profile)
    elif fastest is not None:
        changes["profile.device"] = f"cuda:{fastest}"
    if flags.config is not None:
        texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
        return shared.load(
            flags.config, flags.overrides, *overrides_of(flags), *texts, *shared.SEARCHED, trust=flags.trust
        )
    if "pipeline.devices" not in keys | changes:
        source = "--profile without a CONFIG" if flags.model is None else "--model"
        raise CapslogError(f"{source} needs --devices N, the number of devices to plan for")
    if flags.model is not None:
        return config_of_model(flags, keys | changes)
    assert profile is not None, "given where neither a CONFIG nor a model is"
    if overrides_of(flags):
        raise CapslogError("--device, --estimate and --measure go with a CONFIG or --model; a profile is of one device")
    return config_of_keys(profile, keys | changes)


def config_of_keys(profile: Profile, keys: Mapping[str, Any]) -> Config:
    """Return the config of a profile alone; keys: of the config, `pipeline.devices` among them.

    Raises CapslogError for those that the profile has decided already, and as `start/ordinary.config_of_profile`.
    """
    from varuna_capslog.start.ordinary import config_of_profile

    for key in keys:
        if key.partition(".")[0] in _OF_A_MODEL:
            raise CapslogError(f"{key} is of a model and its costs, which --profile has already; leave it out")
    settings = dict(keys)
    pipeline = {"devices": settings.pop("pipeline.devices")}
    return config_of_profile(profile, pipeline, settings.pop("train.minibatch_size", None), settings)


def costs_of(
    flags: QuestionFlags, config: Config, profile: Profile | None, choose: bool = True
) -> tuple[Config, Profile, Memo | None]:
    """Return the config with the defaults that follow from the profile, the profile (made now where none is given), and
    the memo of an estimate.

    choose: whether a planner may choose variants of layers, which the config then names.
    """
    from varuna_capslog.planning.registry import planner_named
    from varuna_capslog.start.default_planner import with_defaults
    from varuna_capslog.start.prepare import estimate_memo, profile_and_variants, profile_run

    planner_named(config.pipeline.planner).check(config)  # before the profile, which may take minutes
    memo, show = estimate_memo(config), not flags.as_json
    if profile is None:
        with announced(None if flags.model is None else config):
            if choose:
                config, profile = profile_and_variants(config, show, memo, say=shared.tell)
            else:
                profile = profile_run(config, show, memo)
    return with_defaults(config, profile), profile, memo


# -- Options of earlier versions, which are refused with their new form.


_FORMER = {
    "--pareto": "is a command of its own: capslog front, with the arguments of capslog plan",
    "--maximize": "is a command of its own: capslog largest, with microbatch, minibatch or image-size among its words",
    "--joint": "is a planner: --planner joint",
    "--speeds": "is said by kinds, --devices '2x rtx4090, rtx3090', or by the key pipeline.speeds=[1,0.5]",
    "--blocks": "is the key train.accumulation_blocks=4",
    "--bandwidth": "is the key pipeline.bandwidth=10Gbit",
    "--latency": "is the key pipeline.latency=20us",
    "--host-bandwidth": "is the key pipeline.host_bandwidth=12GB/s",
    "--node-devices": "is the key pipeline.node_devices=4",
    "--search-seconds": "is the key pipeline.search_seconds=60",
    "--schedule": "is the key pipeline.schedule=1f1b",
    "--microbatches": "is the key train.minibatch_size, the samples of a step: microbatches times their size",
    "--microbatch": "is the key train.microbatch_size=4",
    "--recompute": "is the key pipeline.recompute=true",
    "--no-recompute": "is the key pipeline.recompute=false",
    "--stage-inputs": "is the key pipeline.stage_inputs=device",
}


def former_option(name: str) -> str | None:
    """Return a sentence that refuses an option of an earlier version and gives its new form; None for other options."""
    name = name.partition("=")[0]
    return f"{name} {_FORMER[name]}; it is no option any more" if name in _FORMER else None
