"""Makes configs for plans without a config file, from an ordinary model or a profile, and has the planning defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import NamedDevices, gpu_of
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.config import defaults
from varuna_capslog.config.defaults import MICROBATCHES_PER_DEVICE
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.config.reading import assign, section
from varuna_capslog.config.settings import Config
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import WHOLE_RUN
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, SCHEDULES, RunShape

__all__ = [
    "WITHOUT_MODEL",
    "OrdinaryModel",
    "check_kinds",
    "config_of_profile",
    "default_planner",
    "folder_keys",
    "held_types",
    "ordinary_config",
    "with_choices_of",
    "with_default_capacity",
    "with_defaults",
    "with_planner_for",
]


# -- Configs without a config file. A model's costs are estimated, unless `measured`. The default capacity is the memory
#    of this machine's GPU, or of the named kind (`cuda:a100-80gb`).


WITHOUT_MODEL = f"{__name__}:without_model"
"""The workload of a config that has only a profile, and no model."""


@dataclass(frozen=True)
class OrdinaryModel:
    """Model and its inputs.

    model: `package.module:function`, or the nn.Module or Chain itself. arguments: keyword arguments of the function.
    sample: input specs as text (`x=float32[8,3,224,224]`); for an object also example tensors, batch first.
    cut_points: submodules to cut before; None: every repeated block.
    """

    model: Any
    sample: Any = None
    cut_points: Sequence[str] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def ordinary_config(
    model: OrdinaryModel,
    pipeline: Mapping[str, Any],
    minibatch: int | None = None,
    device: str | None = None,
    measured: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """Return the config of a run of the model.

    Args:
        pipeline: keys of its `pipeline` section, the devices among them.
        minibatch: samples of a step; None: `defaults.MICROBATCHES_PER_DEVICE` microbatches per device, each the
            sample's batch or `train.microbatch_size` of settings.
        device: cpu, cuda, or cuda:KIND; None: the accelerator of this machine, or its CPU where it has none.
        settings: further keys of the config, such as {"train.precision": "bfloat16"}; they are applied last.

    Raises:
        CapslogError: an impossible model, sample, device or key.
    """
    from varuna_capslog.model.model_workload import config_values

    name, sample = model.model, model.sample
    workload, devices = None, fields.whole(pipeline["devices"], "pipeline.devices", minimum=1)
    if isinstance(name, str):
        specs = [sample] if isinstance(sample, str) else [] if sample is None else sample
        if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, str) for spec in specs):
            raise CapslogError(
                f"{name} is called by its name, so say the shapes of its inputs as text, such as "
                "'x=float32[8,3,224,224]', or give the model itself and tensors"
            )
        values = config_values(name, specs, model.cut_points, devices, model.arguments)
    else:
        from varuna_capslog.model.model_workload import workload_of_model

        workload, size = workload_of_model(name, sample, model.cut_points)
        train = {"microbatch_size": size, "minibatch_size": size * devices * MICROBATCHES_PER_DEVICE}
        values = {"workload": f"{type(name).__module__}:{type(name).__name__}", "train": train}
    set_size = (settings or {}).get("train.microbatch_size")
    if minibatch is None and isinstance(set_size, int):
        minibatch = set_size * devices * MICROBATCHES_PER_DEVICE * _data_cards(settings)
    values["train"]["minibatch_size"] *= _data_cards(settings)
    if minibatch is not None:
        values["train"]["minibatch_size"] = minibatch
    if device is None or (device != "cpu" and ":" not in device):
        from varuna_capslog import accelerator

        device = device or accelerator.auto_type()
        devices_here = [] if device == "cpu" else accelerator.all_devices(device)
        if devices_here and pipeline.get("capacity") is None:
            pipeline = {**pipeline, "capacity": accelerator.total_bytes(devices_here[0])}
    values["pipeline"] = dict(pipeline)
    values["profile"] = {"source": "measured" if measured else "estimated", "device": device}
    for key, value in (settings or {}).items():
        assign(values, key, value, f"settings {key!r}")
    config = section(Config, values, "")
    if workload is None:
        return config
    if config.profile.source == "measured":
        raise CapslogError(
            "a model that is given as an object is estimated, since the processes that measure build their own; give "
            "the name of a function that builds it, as 'package.module:function'"
        )
    return config.with_workload(workload)


def _data_cards(settings: Mapping[str, Any] | None) -> int:
    """Return the cards per stage that take different samples, by `pipeline.parallel`."""
    divisors = Divisors.of((settings or {}).get("pipeline.parallel"))
    return 1 if divisors is None else divisors.data


def folder_keys(
    folder: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the function that makes a Hugging Face folder's model, and the config's keys, to train.
    Weights are bfloat16 with a `train.precision` of bf16-weights, else float32, unless arguments have a `dtype`. That
    precision is the default if `dtype` is bfloat16, or if there is no `dtype` and the weights below adapters have few
    bits or config.json says bfloat16.
    """
    precision = defaults.precision_named(settings.get("train.precision"))
    keys = dict(settings)
    low = keys.get("model.arguments.base") is not None
    stated = arguments.get("dtype") or (("bfloat16" if low else _type_of(folder)) if precision is None else None)
    if precision is None and stated == "bfloat16":
        keys["train.precision"] = precision = defaults.BF16_WEIGHTS
    dtype = "bfloat16" if precision == defaults.BF16_WEIGHTS else "float32"
    return {"dtype": dtype, **arguments, "path": folder}, keys


def held_types(config: Config) -> str:
    """Return the types of a training in words, also where the model's argument `dtype` sets the type of weights."""
    held = config.model.get("arguments", {}).get("dtype", "float32")
    if config.train.precision != "float32" or held == "float32":
        return config.train.types
    return f"weights, gradients and optimizer states in {held}"


def _type_of(folder: str) -> str | None:
    """Return the type of weights that a folder's config.json states; None where it states none, or cannot be read."""
    try:
        stated = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return None  # the function that makes the model reports the fault
    sections = [stated, stated.get("text_config")] if isinstance(stated, dict) else []
    names = (part.get(key) for part in sections if isinstance(part, dict) for key in ("dtype", "torch_dtype"))
    return next((name for name in names if isinstance(name, str)), None)


def config_of_profile(
    profile: Profile,
    pipeline: Mapping[str, Any],
    minibatch: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """Return the config of a run with only a profile, which gives microbatch size, recompute and stage_inputs.

    Args:
        pipeline: keys of its `pipeline` section, the devices among them; default of the capacity: the memory of the
            profile's kind of GPU, else no limit.
        minibatch, settings: as for `ordinary_config`; `minibatch` is applied after settings.

    Raises:
        CapslogError: an impossible key or value, or a minibatch that is no multiple of the profile's microbatches.
    """
    conditions = profile.conditions
    size, gpu = conditions.get("microbatch_size", 1), gpu_of(f"cuda:{conditions.get('gpu')}")
    devices = fields.whole(pipeline["devices"], "pipeline.devices", minimum=1)
    samples = size * devices * MICROBATCHES_PER_DEVICE * _data_cards(settings)
    train = {"microbatch_size": size, "minibatch_size": samples}
    values: dict[str, Any] = {"workload": WITHOUT_MODEL, "train": train, "pipeline": dict(pipeline)}
    for key, value in (settings or {}).items():
        assign(values, key, value, f"settings {key!r}")
    if minibatch is not None:
        if isinstance(minibatch, int) and minibatch % size:
            raise CapslogError(
                f"a minibatch of {minibatch} samples is not a multiple of the microbatch size {size} of the profile"
            )
        values["train"]["minibatch_size"] = minibatch
    if gpu is not None and values["pipeline"].get("capacity") is None:
        values["pipeline"]["capacity"] = gpu.memory_bytes
    if (memory := values["pipeline"].get("memory")) in SCHEDULES:  # the memory model of a schedule
        values["pipeline"].setdefault("schedule", memory)
    config = section(Config, values, "")
    run, keys = RunShape.of_conditions(conditions), config.pipeline.model_fields_set
    taken = {name: getattr(run, name) for name in ("recompute", "stage_inputs") if name not in keys}
    run_keys = config.pipeline.model_copy(update=taken)
    run_keys.model_fields_set.difference_update(taken)  # still open keys for the choice of planner
    return config.model_copy(update={"pipeline": run_keys})


def check_kinds(devices: NamedDevices, profile: Profile) -> None:
    """Raise CapslogError where the profile is not of the fastest kind, to which all speeds are relative."""
    device, gpu = profile.conditions.get("device", "cuda"), profile.conditions.get("gpu", devices.fastest)
    if devices.kinds and (device != "cuda" or gpu != devices.fastest):
        kind = f"{device}:{gpu}" if device == "cuda" else str(device)
        raise CapslogError(
            f"the profile is of {kind}, but the fastest of the devices is {devices.fastest}; profile the model with "
            f"--device cuda:{devices.fastest}, or give the number of devices and their capacity"
        )


def without_model(config: Config) -> NoReturn:
    """Raise CapslogError: a profile alone trains nothing."""
    raise CapslogError("a profile has no model to run; name a CONFIG file or --model")


# -- Defaults of planning: the planner, as far as the profile decides it, and the memory limit.
#
# Defaults that the config decides stand in `config/settings`. Planning for a profile imports no torch.


def default_planner(profile: Profile, memory: str) -> str:
    """Return the default planner for a profile: FASTEST if the profile has the columns for it, else SMALLEST."""
    if not profile.timed or memory not in (AUTO, RANKS) or is_for_inference(profile):
        return defaults.SMALLEST
    try:
        resolve(RANKS, profile, DEFAULT_RUN)
    except CapslogError:
        return defaults.SMALLEST
    return defaults.FASTEST


def with_defaults(config: Config, profile: Profile | None) -> Config:
    """Return the config with the default planner and capacity of a run with this profile, where they are open."""
    return config if profile is None else with_default_capacity(with_planner_for(config, profile))


def with_planner_for(config: Config, profile: Profile) -> Config:
    """Return the config with a default planner whose inputs the profile has; the same config where it names one."""
    pipeline = config.pipeline
    if not pipeline.planner_is_default or default_planner(profile, pipeline.memory) == defaults.FASTEST:
        return config
    keys = {"planner": defaults.SMALLEST, "schedule": RunShape.of_config(config).settled().schedule}
    return config.model_copy(update={"pipeline": pipeline.model_copy(update=keys)})


def with_default_capacity(config: Config) -> Config:
    """Return the config with the memory of this machine's devices, where planner `budget` has no limit: all of an
    accelerator's memory, and on a CPU an equal part of the machine's, or its container's, for every rank. The same
    config is returned where there is a capacity, for a profile alone, and for devices that this machine lacks.
    """
    pipeline, device = config.pipeline, config.profile.device or config.device
    is_limited = pipeline.capacity is not None or pipeline.cuts is not None or pipeline.plan is not None
    if is_limited or pipeline.planner != defaults.FASTEST or config.workload == WITHOUT_MODEL:
        return config
    sizes = [] if device == "cpu" else _bytes_here(device)
    if not sizes and device not in ("auto", "cpu"):
        return config
    size = min(sizes) if sizes else granted_bytes() // config.world_size
    return config.model_copy(update={"pipeline": pipeline.model_copy(update={"capacity": size})})


def _bytes_here(device: str) -> list[int]:
    """Return the memory of each accelerator of this type in this machine; [] without one, and for auto on the CPU."""
    from varuna_capslog import accelerator

    kind = accelerator.auto_type() if device == "auto" else device
    return (
        []
        if kind == "cpu"
        else [accelerator.total_bytes(torch_device) for torch_device in accelerator.all_devices(kind)]
    )


# -- Choices of a plan besides its stages: the schedule, the accumulation blocks, the recomputation.


def with_choices_of(config: Config, plan: Plan) -> Config:
    """Return the config with its plan's choices; the same config where cuts or a plan are given."""
    pipeline = config.pipeline
    if pipeline.cuts is not None or pipeline.plan is not None or plan.schedule is None:
        return config
    chosen = {"schedule": plan.schedule} | ({"recompute": False} if plan.planner in WHOLE_RUN else {})
    train = config.train.with_blocks((None if plan.short else plan.units.blocks) or config.num_blocks)
    return config.model_copy(update={"train": train, "pipeline": pipeline.model_copy(update=chosen)})
