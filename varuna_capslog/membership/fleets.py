"""Joint plans for the members of a run: pipelines of any length for any number of devices, none idle where it helps.

Asked at every change where `pipeline.planner` is `joint` or `budget`; equal pipelines stand in where there is no such
plan. Pure; no torch.
"""

from __future__ import annotations

import functools

from varuna_capslog.membership.candidates import Candidates
from varuna_capslog.planners import BUDGET, JOINT
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet_of_run
from varuna_capslog.plans.plan import Plan

__all__ = ["Fleets"]


class Fleets:
    """Plans by the capacities and speeds of the devices, remembered.

    Args:
        candidates: of the run; its snapshots count beside training here, too.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self.plan = functools.cache(self._plan)

    @classmethod
    def of(cls, candidates: Candidates) -> Fleets | None:
        """Return None where the run's planner is another one, or the profile lacks seconds or bytes of the run."""
        is_ours = candidates.planner in (BUDGET, JOINT) and candidates.described and candidates.timed
        return cls(candidates) if is_ours else None

    def _plan(self, kinds: tuple[tuple[int, float], ...]) -> Plan | None:
        """The plan for devices of (bytes, speed), by rank; 0 bytes: no limit known. None where nothing fits."""
        ours = self._candidates
        assert ours.profile is not None
        devices = [Device(size or None, speed) for size, speed in kinds]
        fleet = best_fleet_of_run(ours.profile, devices, ours.run, ours.memory, ours.link, ours.beside)
        return fleet.plan if isinstance(fleet, JointPlan) else None

    def prepare(self, devices: int, capacity: int) -> None:
        """Plans for up to `devices` devices of this capacity, while no member waits for them."""
        for count in range(1, devices + 1):
            self.plan(((capacity, 1.0),) * count)
