"""Planners, which choose cuts from the costs of stages and a number of devices, and the tables of their names.

A planner is a function on numbers; nothing here imports torch. `planning/` calls the planners. The default is `budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from varuna_capslog.config import defaults
from varuna_capslog.memory import StageCosts
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.planners.baselines import seconds_balanced_cuts, size_balanced_cuts, varuna_cuts
from varuna_capslog.planners.budget import budget_stages
from varuna_capslog.planners.capslog import capslog_cuts, capslog_tb_cuts
from varuna_capslog.planners.dawnpiper import dawnpiper_stages
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.mcap import mcap_bf_cuts, mcap_bo_cuts
from varuna_capslog.planners.replicas import REPLICATED
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planners.throughput import fastest_cuts, steady_cuts
from varuna_capslog.planners.vpipe import vpipe_stages
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = [
    "BALANCED",
    "BUDGET",
    "DEFAULT_MICROBATCHES_PER_STAGE",
    "JOINT",
    "LAYERWISE",
    "MADPIPE",
    "PLANNERS",
    "PLANNER_NAMES",
    "REPLICATED",
    "WHOLE_RUN",
    "Planner",
    "find_cuts",
    "with_microbatches",
]

Planner = Callable[[StageCosts, int, Sequence[int] | None], list[int]]
"""(stage costs, number of devices, capacity of each device in bytes or None) -> first layer of each stage.

A planner returns exactly one stage per device, also where no cut list fits. There may be at most L devices.
"""

PLANNERS: dict[str, Planner] = {
    "varuna": varuna_cuts,
    "mcap-bf": mcap_bf_cuts,
    "mcap-bo": mcap_bo_cuts,
    "capslog": capslog_cuts,
    "capslog-tb": capslog_tb_cuts,
    "exact": exact_cuts,
}

PLANNER_NAMES = (*PLANNERS, "throughput")
"""Planners of `find_cuts` that an elastic run may also use: those of the table, which need bytes alone, and one that
needs seconds.
"""

BALANCED: dict[str, Callable[[Profile, int], list[int]]] = {
    "gpipe": seconds_balanced_cuts,
    "gpipe-size": size_balanced_cuts,
}
"""Planners of `find_cuts` that balance columns of the profile over the stages, without regard to capacities."""

BUDGET = defaults.FASTEST
"""The default planner: chooses cuts and memory intervals together for the shortest step that fits (`budget`)."""

LAYERWISE: dict[str, Callable[[Layerwise], list[StageChoice]]] = {
    BUDGET: budget_stages,
    "dawnpiper": dawnpiper_stages,
    "vpipe": vpipe_stages,
}
"""Planners of one pipeline that choose its cuts and the layers to recompute or offload to the host tier."""

MADPIPE = "madpipe"
"""The planner that may place several stages on one rank, and makes a periodic schedule (`madpipe`)."""

WHOLE_RUN = (*REPLICATED, MADPIPE)
"""Planners whose plans keep all activations, and choose accumulation blocks and action lists themselves."""

JOINT = "joint"
"""The planner that divides the devices into pipelines of different lengths (`joint`)."""

DEFAULT_MICROBATCHES_PER_STAGE = defaults.MICROBATCHES_PER_DEVICE
"""Microbatches per stage that planners assume where the run's number of microbatches is not set."""


def with_microbatches(run: RunShape, devices: int) -> RunShape:
    """Return the run with its number of microbatches, or `DEFAULT_MICROBATCHES_PER_STAGE` per device if not set."""
    return replace(run, num_microbatches=run.num_microbatches or DEFAULT_MICROBATCHES_PER_STAGE * devices)


def find_cuts(
    planner: str,
    profile: Profile,
    costs: StageCosts,
    run: RunShape,
    devices: int,
    usable: Sequence[int] | None = None,
    link: Link | None = None,
    speeds: Sequence[float] | None = None,
) -> list[int]:
    """Return the first layer of each of `devices` stages, chosen by the planner of this name.

    costs: of the profile for this run. usable: bytes that a stage may hold on each device; None: no limit. run, link,
    speeds (of each device, at most 1): for planners that need seconds; if no cuts fit, `throughput` returns those of
    the smallest peak. Raises CapslogError naming the first layer whose seconds or boundary_bytes the profile lacks.
    """
    if planner in BALANCED:
        return BALANCED[planner](profile, devices)
    if planner != "throughput":
        return PLANNERS[planner](costs, devices, usable)
    seconds = LayerSeconds.of_profile(profile, link)
    if is_for_inference(profile):
        return steady_cuts(costs, seconds, devices, usable) or exact_cuts(costs, devices, usable)
    best = fastest_cuts(costs, seconds, with_microbatches(run, devices), devices, usable, speeds)
    return exact_cuts(costs, devices, usable) if best is None else list(best.cuts)
