"""What is planned for where nobody says it: the planner, as far as the profile decides it, and the memory to keep to.

What a config decides stands in `config/settings`. Planning for a profile imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.config import defaults
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape
from varuna_capslog.start.ordinary import WITHOUT_MODEL

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["default_planner", "with_default_capacity", "with_defaults", "with_planner_for"]


def default_planner(profile: Profile, memory: str) -> str:
    """The planner for a profile where none is named: that of the shortest step, if the profile can feed it."""
    if not profile.timed or memory not in (AUTO, RANKS) or is_for_inference(profile):
        return defaults.SMALLEST
    try:
        resolve(RANKS, profile, DEFAULT_RUN)
    except CapslogError:
        return defaults.SMALLEST
    return defaults.FASTEST


def with_defaults(config: Config, profile: Profile | None) -> Config:
    """The config with the planner and the memory that a run with this profile has where it says neither."""
    return config if profile is None else with_default_capacity(with_planner_for(config, profile))


def with_planner_for(config: Config, profile: Profile) -> Config:
    """The config with a default planner that the profile can feed; the same config where it names one itself."""
    pipeline = config.pipeline
    if not pipeline.planner_is_default or default_planner(profile, pipeline.memory) == defaults.FASTEST:
        return config
    found = {"planner": defaults.SMALLEST, "schedule": RunShape.of_config(config).settled().schedule}
    return config.model_copy(update={"pipeline": pipeline.model_copy(update=found)})


def with_default_capacity(config: Config) -> Config:
    """The config with the memory of this machine's devices, where planner `budget` has none to keep to.

    That is all of an accelerator's, and on a CPU an equal part of the machine's, or of its container's, for every rank.
    The same config where there is a capacity, for a profile alone, and for devices that are not here.
    """
    pipeline, device = config.pipeline, config.profile.device or config.device
    given = pipeline.capacity is not None or pipeline.cuts is not None or pipeline.plan is not None
    if given or pipeline.planner != defaults.FASTEST or config.workload == WITHOUT_MODEL:
        return config
    sizes = [] if device == "cpu" else _bytes_here(device)
    if not sizes and device not in ("auto", "cpu"):
        return config
    size = min(sizes) if sizes else granted_bytes() // config.world_size
    return config.model_copy(update={"pipeline": pipeline.model_copy(update={"capacity": size})})


def _bytes_here(device: str) -> list[int]:
    """The memory of each accelerator here of this type; [] where there is none, and for auto on the CPU."""
    from varuna_capslog import accelerator

    kind = accelerator.auto_type() if device == "auto" else device
    return [] if kind == "cpu" else [accelerator.total_bytes(one) for one in accelerator.all_devices(kind)]
