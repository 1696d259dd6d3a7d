"""Members that draw a random plan for each generation that they found: any stages and any order of work, which no other
member could compute.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.rig.drawn_plans import WITHOUT_LIMITS, draw_plan, draw_round
from varuna_capslog.elastic.member.pipeline_work import PipelineWork
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import Units, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import SCHEDULES, RunShape, to_strings

__all__ = ["PLANS", "DrawingWork", "draw_for", "has_branches"]

PLANS = "CAPSLOG_CHAOS_PLANS"
"""The seed of the plans that members draw; unset: they draw none."""


class DrawingWork(PipelineWork):
    """An ordinary member where `PLANS` is not set."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._drawn = 0
        self.proposes = self.proposes or PLANS in os.environ

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        seed = os.environ.get(PLANS)
        if seed is None:
            return super().propose(seats)
        self._drawn += 1
        return draw_for(self.placer.candidates.run, self.chain, len(seats), seed, self.start.me, self._drawn)


def draw_for(run: RunShape, chain: Chain, ranks: int, *seed: object) -> Plan:
    """A plan for a run; the same for the same seed.

    Half of the plans have the lists of another schedule than the run's. Of a chain with branches half of them have
    direct routes, and stages of several pieces.
    """
    dice = random.Random(" ".join(map(str, seed)))
    num_layers, edges = len(chain), chain.edges
    units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
    direct = edges if dice.random() < 0.5 and has_branches(chain) else None
    if dice.random() < 0.1:
        plan = draw_round(dice, num_layers, units, ranks, run.schedule)
    else:
        plan = draw_plan(dice, num_layers, units, ranks, run.schedule, direct)
    return plan if dice.random() < 0.5 else _with_lists(dice, plan, chain, run)


def has_branches(chain: Chain) -> bool:
    """Return True if some layer does not read the output of the layer before it."""
    return any((layer - 1, layer) not in chain.edges for layer in range(1, len(chain)))


def _with_lists(dice: random.Random, plan: Plan, chain: Chain, run: RunShape) -> Plan:
    """The plan with the actions of any schedule that keeps the limits of its stages."""
    limited = any(stage.in_flight is not None for stage in plan.stages)
    names = [name for name in SCHEDULES if not (limited and name in WITHOUT_LIMITS)]
    rows = scheduled(dice.choice(names), plan.stages, plan.stage_graph(chain.edges), run)
    return replace(plan, schedule=None, actions=tuple(map(tuple, to_strings(rows))))
