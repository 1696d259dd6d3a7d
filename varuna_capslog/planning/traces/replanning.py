"""Deployments on any number of equal devices: planned at the first request, and timed.

The replay of a preemption trace calls a `Replanner` at every change. It chooses nothing itself: `joint` and the other
planners do, and the step time is the simulator's.
"""

from __future__ import annotations

__all__ = ["Replanner"]

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import JOINT
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY, planner_named
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.traces.trace_replay import Deployment
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape


@dataclass(frozen=True)
class Replanner:
    """Number of devices -> `Deployment`, None where nothing fits.

    planner: one that elastic runs may ask; other planners than `joint` plan one pipeline of as many devices as there
        are layers, at most.
    minibatch_size: samples of a step, whatever the number of devices; a multiple of the profile's microbatch size.
    capacity: bytes of every device; None: no limit.
    run: its schedule, recompute and stage_inputs are read.
    blocks: accumulation blocks; None: the planner chooses.
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
        if not planner_named(self.planner).elastic:
            names = ", ".join(name for name, planner in REGISTRY.items() if planner.elastic)
            raise CapslogError(f"planner {self.planner} is not asked anew after a membership change; choose {names}")
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
            cached = self._known[devices]
            return None if cached is None else replace(cached, search_seconds=time.perf_counter() - begun)
        width = devices if self.planner == JOINT else min(devices, self.profile.num_layers)
        run = replace(
            self.run, num_microbatches=self.minibatch_size // self.microbatch_size, num_blocks=self.blocks or 1
        )
        problem = Problem.of(self.profile, width, self.capacity, run, self.link)
        problem = replace(problem, blocks_open=self.blocks is None)
        self._known[devices] = deployment = self._deployment(solve(problem, self.planner))
        return deployment

    def _deployment(self, plan: Plan) -> Deployment | None:
        """Return the deployment of a plan; None where the plan does not fit."""
        if plan.fits is False:
            return None
        if plan.step_seconds is None:
            raise CapslogError("the profile has not the seconds of its layers; profile again")
        if plan.step_seconds == 0:
            raise CapslogError("a step takes no time: all seconds of the profile are 0; profile again")
        rate, ranks = self.minibatch_size / plan.step_seconds, {stage.rank for stage in plan.stages}
        return Deployment(rate, len(ranks), plan.search_seconds or 0.0, _describe([len(path) for path in plan.paths()]))


def _describe(stages: Sequence[int]) -> str:
    """`1 pipeline of 4 stages`, `3 pipelines of 8 + 8 + 7 stages`."""
    count = len(stages)
    lengths = " + ".join(map(str, sorted(stages, reverse=True)))
    return f"{count} pipeline{'' if count == 1 else 's'} of {lengths} stage{'' if lengths == '1' else 's'}"
