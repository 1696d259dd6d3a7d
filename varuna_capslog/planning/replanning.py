"""What to run on any number of equal devices, planned when it is first asked, against the clock.

The replay of a preemption trace calls a `Replanner` at every change. It chooses nothing itself: `joint` and the other
planners do, and the step time is the simulator's.
"""

from __future__ import annotations

__all__ = ["Replanner"]

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO
from varuna_capslog.planners import JOINT, PLANNER_NAMES
from varuna_capslog.planners.joint import Device
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.search import joint_plan, plan
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.trace_replay import Deployment
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape


@dataclass(frozen=True)
class Replanner:
    """Number of devices -> `Deployment`, None where nothing fits.

    planner: `joint`, or one of PLANNER_NAMES for one pipeline of as many devices as there are layers, at most.
    minibatch_size: samples of a step, whatever the number of devices; a multiple of the profile's microbatch size.
    capacity: bytes of every device; None: no limit.
    run: its schedule, recompute and stage_inputs are read.
    blocks: accumulation blocks, for `joint`; None: every microbatch is one.
    """

    profile: Profile
    minibatch_size: int
    planner: str = JOINT
    capacity: int | None = None
    run: RunShape = DEFAULT_RUN
    blocks: int | None = None
    link: Link | None = None
    _known: dict[int, Deployment | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields.refuse_unknown([self.planner], [JOINT, *PLANNER_NAMES], "planner")
        size = self.microbatch_size
        if self.minibatch_size < size or self.minibatch_size % size:
            raise CapslogError(
                f"a minibatch of {self.minibatch_size} samples is not a whole number of the profile's microbatches of "
                f"{size}; choose a multiple"
            )

    @property
    def microbatch_size(self) -> int:
        """Samples that the profile's seconds are for; 1 where it does not say."""
        size: int = self.profile.conditions.get("microbatch_size", 1)
        return size

    def __call__(self, devices: int) -> Deployment | None:
        """Plans, or looks up the plan of a number that was asked before; either is timed."""
        begun = time.perf_counter()
        if devices in self._known:
            known = self._known[devices]
            return None if known is None else replace(known, search_seconds=time.perf_counter() - begun)
        found = self._joint(devices) if self.planner == JOINT else self._single(devices)
        if found is not None and found.samples_per_second == float("inf"):
            raise CapslogError("a step takes no time: all seconds of the profile are 0; profile again")
        self._known[devices] = found
        return found

    def _joint(self, devices: int) -> Deployment | None:
        alike = [Device(self.capacity)] * devices
        answer = joint_plan(self.profile, alike, self.minibatch_size, self.blocks, self.run, link=self.link)
        if answer.step_seconds is None:
            # no fleet was found; the one pipeline that is answered instead may fit all the same
            return self._played(answer.plan)
        stages = [len(one.cuts) for one in answer.pipelines]
        return self._deployment(answer.plan, answer.step_seconds, devices - len(answer.idle), stages)

    def _single(self, devices: int) -> Deployment | None:
        stages = min(devices, self.profile.num_layers)
        run = replace(self.run, num_microbatches=self.minibatch_size // self.microbatch_size)
        return self._played(plan(self.profile, stages, self.planner, AUTO, self.capacity, run, self.link))

    def _played(self, found: Plan) -> Deployment | None:
        """The deployment of one pipeline; None where it does not fit."""
        if found.fits is False:
            return None
        count = self.minibatch_size // self.microbatch_size
        step = simulate_plan(
            self.profile, found, num_microbatches=count, recompute=self.run.recompute, run=self.run, link=self.link
        )
        return self._deployment(found, step.step_seconds, len(found.stages), [len(found.stages)])

    def _deployment(self, found: Plan, step_seconds: float, used: int, stages: Sequence[int]) -> Deployment:
        rate = self.minibatch_size / step_seconds if step_seconds > 0 else float("inf")
        return Deployment(rate, used, found.search_seconds or 0.0, _describe(stages))


def _describe(stages: Sequence[int]) -> str:
    """`1 pipeline of 4 stages`, `3 pipelines of 8 + 8 + 7 stages`."""
    count = len(stages)
    lengths = " + ".join(map(str, sorted(stages, reverse=True)))
    return f"{count} pipeline{'' if count == 1 else 's'} of {lengths} stage{'' if lengths == '1' else 's'}"
