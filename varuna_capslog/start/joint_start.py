"""The plan that a run with `pipeline.planner: joint` begins with: unequal pipelines over all its devices."""

from __future__ import annotations

import dataclasses

from varuna_capslog.config.settings import Config
from varuna_capslog.membership.placing import Placer, describe_reserves, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import reserves
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet_of_run
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.search import joint_plan
from varuna_capslog.planning.verdict import capacities_of_devices
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["plan_devices"]


def plan_devices(config: Config, profile: Profile, link: Link | None = None) -> Plan:
    """Plans all devices of a run at once, with the snapshots and copies of an elastic run beside training.

    Where nothing fits, the smallest-peak pipeline, which says so.

    Raises:
        CapslogError: as `planners.joint.best_fleet`, and as `Placer` in an elastic run.
    """
    pipeline, run = config.pipeline, RunShape.of_config(config)
    one = capacities_of_devices(pipeline.capacity, pipeline.devices)
    capacities = [None] * config.world_size if one is None else [*one] * pipeline.replicas
    devices = [Device(size) for size in capacities]
    sizes = state_bytes(profile) if config.elastic.enabled else None
    beside = None if sizes is None else sizes[0]
    found = best_fleet_of_run(profile, devices, run, pipeline.memory, link, beside)
    if not isinstance(found, JointPlan):
        size = config.train.minibatch_size
        return joint_plan(profile, devices, size, run.num_blocks, run, pipeline.memory, link).plan
    if sizes is None:
        return found.plan
    placer = Placer.of_config(config, profile, *sizes)
    seats = [Seat(f"rank {rank}", f"host {rank}", size or 0) for rank, size in enumerate(capacities)]
    layout = placer(seats, found.plan)
    if isinstance(layout, str):  # fewer devices than elastic.min_devices
        return dataclasses.replace(found.plan, notes=(layout,))
    kept = reserves(layout, placer.sync, placer.layer_bytes, placer.gradient_bytes)
    return dataclasses.replace(found.plan, notes=tuple(filter(None, (describe_reserves(kept), layout.problem))))
