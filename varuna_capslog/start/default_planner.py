"""Defaults of planning: the planner, as far as the profile decides it, and the memory limit.

Defaults that the config decides stand in `config/settings`. Planning for a profile imports no torch.
"""

from __future__ import annotations

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.config import defaults
from varuna_capslog.config.settings import Config
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import WHOLE_RUN
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape
from varuna_capslog.start.ordinary import WITHOUT_MODEL

__all__ = ["default_planner", "with_choices_of", "with_default_capacity", "with_defaults", "with_planner_for"]


def default_planner(profile: Profile, memory: str) -> str:
    """Return the planner for a profile where none is named: that of the shortest step, if the profile has the columns
    that it needs.
    """
    if not profile.timed or memory not in (AUTO, RANKS) or is_for_inference(profile):
        return defaults.SMALLEST
    try:
        resolve(RANKS, profile, DEFAULT_RUN)
    except CapslogError:
        return defaults.SMALLEST
    return defaults.FASTEST


def with_defaults(config: Config, profile: Profile | None) -> Config:
    """Return the config with the default planner and memory limit of a run with this profile, where it sets none."""
    return config if profile is None else with_default_capacity(with_planner_for(config, profile))


def with_planner_for(config: Config, profile: Profile) -> Config:
    """Return the config with a default planner whose inputs the profile has; the same config where it names one."""
    pipeline = config.pipeline
    if not pipeline.planner_is_default or default_planner(profile, pipeline.memory) == defaults.FASTEST:
        return config
    keys = {"planner": defaults.SMALLEST, "schedule": RunShape.of_config(config).settled().schedule}
    return config.model_copy(update={"pipeline": pipeline.model_copy(update=keys)})


def with_default_capacity(config: Config) -> Config:
    """Return the config with the memory of this machine's devices, where planner `budget` has no limit.

    The limit is all of an accelerator's memory, and on a CPU an equal part of the machine's, or its container's, for
    every rank. The same config is returned where there is a capacity, for a profile alone, and for devices that this
    machine does not have.
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
    """Return the memory of each accelerator of this type in this machine; [] where there is none, and for auto on the
    CPU.
    """
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
