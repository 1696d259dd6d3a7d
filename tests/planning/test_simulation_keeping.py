"""Costs of a plan's memory intervals against keeping everything, beside sums worked out by hand."""

from __future__ import annotations

import random

import pytest

from tests.planners.test_budget import timed
from varuna_capslog.commands.plan import print_treatments
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import treated
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import against_keeping, treatments
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(3, "gpipe", recompute=False)


def test_what_runs_again_and_what_travels() -> None:
    profile = timed(random.Random(3), 5)
    memory = (
        MemoryInterval(0, 1, "recompute"),
        MemoryInterval(1, 2, "recompute+offload"),
        MemoryInterval(2, 4, "offload"),
    )
    plan = Plan(5, (PlanStage(((0, 5),), (0,), memory=memory),), Units(3, 1, 1), "gpipe")
    (treatment,) = treatments(plan, RUN)
    assert (treatment.kept, treatment.recomputed, treatment.offloaded, treatment.inputs_offloaded) == (
        ((4, 5),), ((0, 2),), ((2, 4),), ((1, 2),),
    )  # fmt: skip
    again = 3 * sum(layer.forward_seconds or 0.0 for layer in profile.layers[:2])
    moved = 3 * treated(RangeBytes(profile, "ranks", True), ((0, 5),), memory, True, True).host
    costs = against_keeping(profile, plan, RUN)
    assert costs is not None
    assert costs.stage_seconds == pytest.approx((again,))
    assert costs.seconds == pytest.approx(again)
    assert costs.moved_bytes == (moved,)
    # copies that take the rank's own time count too, at the bytes that a simulated step copies
    slow = against_keeping(profile, plan, RUN, Link(host_bandwidth=1e6, copies_beside=False))
    assert slow is not None
    (row,) = slow.step.pipelines[0].timeline.actions
    took = sum(span.end_seconds - span.start_seconds for span in row if span.action.kind in "OL")
    assert took > 0
    assert slow.stage_seconds == pytest.approx((again + took,))


def test_layers_of_which_parts_run_again_are_neither_kept_nor_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    memory = (MemoryInterval(0, 1, "recompute"), MemoryInterval(2, 4, "recompute", ("attention", "norms")))
    plan = Plan(5, (PlanStage(((0, 5),), (0,), memory=memory),), Units(3, 1, 1), "gpipe")
    (treatment,) = treatments(plan, RUN)
    assert (treatment.kept, treatment.recomputed) == (((1, 2), (4, 5)), ((0, 1),))
    assert treatment.in_parts == memory[1:]
    print_treatments(plan, RUN)
    assert "│ 1, 4 │ 0, attention, norms of 2-3 │" in capsys.readouterr().out


def test_every_stage_of_a_short_plan_does_as_the_run_says_and_a_plan_without_seconds_has_no_costs() -> None:
    profile = timed(random.Random(4), 4)
    plan = Plan.of_cuts(4, (0, 2), schedule="varuna", num_microbatches=6)
    run = RunShape(6, "varuna", recompute=True)
    assert [treatment.recomputed for treatment in treatments(plan, run)] == [((0, 2),), ((2, 4),)]
    costs = against_keeping(profile, plan, run)
    assert costs is not None
    assert costs.keeping.recompute is False
    first, last = (sum(layer.forward_seconds or 0.0 for layer in profile.layers[a:b]) for a, b in ((0, 2), (2, 4)))
    assert costs.stage_seconds[0] > 0
    assert costs.stage_seconds[0] <= 6 * first * (1 + 1e-9)
    assert costs.stage_seconds[1] <= 6 * last * (1 + 1e-9)
    assert [treatment.kept for treatment in treatments(plan, RunShape(6, "1f1b", recompute=False))] == [
        ((0, 2),),
        ((2, 4),),
    ]
    bare = Profile(tuple(LayerProfile(f"l{n}", 1, 1 if n else None) for n in range(4)))
    assert against_keeping(bare, plan, run) is None
