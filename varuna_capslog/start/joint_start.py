"""The plan that a run with `pipeline.planner: joint` begins with: unequal pipelines over all its devices."""

from __future__ import annotations

from varuna_capslog.config.settings import Config
from varuna_capslog.membership.protection import state_bytes
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet_of_run
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.search import joint_plan
from varuna_capslog.planning.verdict import capacities_of_devices
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["plan_devices"]


def plan_devices(config: Config, profile: Profile, link: Link | None = None) -> Plan:
    """Plans all devices of a run at once, with the snapshots of an elastic run beside training.

    Where nothing fits with these, what fits without them; where nothing does, the smallest-peak pipeline, which says
    so.

    Raises:
        CapslogError: as `planners.joint.best_fleet`.
    """
    pipeline, run = config.pipeline, RunShape.of_config(config)
    one = capacities_of_devices(pipeline.capacity, pipeline.devices)
    capacities = [None] * config.world_size if one is None else [*one] * pipeline.replicas
    devices = [Device(size) for size in capacities]
    sizes = state_bytes(profile) if config.elastic.enabled else None
    found = best_fleet_of_run(profile, devices, run, pipeline.memory, link, None if sizes is None else sizes[0])
    if not isinstance(found, JointPlan):
        size = config.train.minibatch_size
        found = joint_plan(profile, devices, size, run.num_blocks, run, pipeline.memory, link)
    return found.plan
