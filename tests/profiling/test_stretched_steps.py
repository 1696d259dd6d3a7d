"""Events of a whole step from those of a short one: the rehearsal of the whole step is the reference."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.profiling.workloads import Equal
from tests.sweeps import some
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.allocator import Event, rounded
from varuna_capslog.profiling.rehearsal import rehearse_layout
from varuna_capslog.profiling.short_steps import ShortSteps
from varuna_capslog.profiling.stretched_steps import short_pipeline, stretched


def by_order(events: list[Event]) -> list[tuple[int, int]]:
    """Events in whole blocks, with the number of each allocation in place of its key."""
    numbers: dict[int, int] = {}
    named = []
    for key, num_bytes in events:
        if num_bytes:
            numbers[key] = len(named)
        named.append((numbers[key], rounded(num_bytes)))
    return named


@pytest.mark.parametrize("seed", some(range(8), 2))
def test_a_short_step_tells_every_event_of_the_whole_one(seed: int) -> None:
    draw = random.Random(seed)
    recompute, waits = draw.random() < 0.5, draw.choice(["host", "device"])
    conditions = RunConditions(device="cuda", microbatch_size=64, recompute=recompute, stage_inputs=waits)
    estimator = StageEstimator(Equal(9), conditions)
    size = len(estimator.chain)
    stages = []
    for rank, (first, end) in enumerate(itertools.pairwise([0, *sorted(draw.sample(range(1, size), 3)), size])):
        middle, last = sorted(draw.choices(range(first, end + 1), k=2))
        memory = (MemoryInterval(middle, last, "recompute"),) if middle < last else ()
        stages.append(PlanStage(((first, end),), (rank,), memory=memory, in_flight=draw.choice([None, 5])))
    layout = Layout(tuple(stages))
    schedule = draw.choice(["1f1b", "varuna", "1f1b-star"])
    options = EngineOptions(11, schedule=schedule, recompute=recompute, stage_inputs=waits, clip_norm=1.0)
    whole, short = rehearse_layout(estimator, layout, options), ShortSteps(estimator.chain, layout, options, False)
    for rank in range(3):
        program = short._programs(11)[rank]
        pipeline = short_pipeline(layout.stages[rank], size, options, program)
        assert pipeline is not None
        assert pipeline.options.num_microbatches <= 7
        rehearsal = rehearse_layout(estimator, pipeline.layout, pipeline.options)[pipeline.rank]
        events = stretched(rehearsal.events, rehearsal.starts, pipeline.program, program)
        assert events is not None
        assert by_order(events) == by_order([*whole[rank].events])
