"""Members that draw what a generation runs when they found it: any rectangles, which no other member could compute."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from varuna_capslog.elastic.member.pipeline_work import PipelineWork
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.rig.drawn_plans import draw_plan
from varuna_capslog.schedules import RunShape

__all__ = ["PLANS", "DrawingWork", "draw_for"]

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
        return draw_for(self.placer.candidates.run, len(self.chain), len(seats), seed, self.start.me, self._drawn)


def draw_for(run: RunShape, num_layers: int, ranks: int, *seed: object) -> Plan:
    """A plan for a run; the same for the same seed."""
    units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
    dice = random.Random(" ".join(map(str, seed)))
    return draw_plan(dice, num_layers, units, ranks, run.schedule)
