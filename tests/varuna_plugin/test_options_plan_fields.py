"""Varuna runs a plan's cuts; every other field that is set is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, section
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.start.choices import with_given_plan
from varuna_capslog.start.prepare import plan_run
from varuna_capslog.varuna_plugin.options import cuts_of

UNITS = Units(4, 2, 2)


def full(*more: dict[str, Any], **fields: Any) -> Plan:
    """Return a plan of two stages of 5 and 6 layers, each recomputed as a whole, with the fields in `more` replaced."""
    bounds = ((0, 5), (5, 11))
    stages = [
        {"layers": (span,), "ranks": (rank,), "memory": (MemoryInterval(*span, "recompute"),)}
        for rank, span in enumerate(bounds)
    ]
    changed = [values | changes for values, changes in zip(stages, (*more, {}, {}), strict=False)]
    return Plan(11, tuple(PlanStage(**values) for values in changed), UNITS, **({"schedule": "varuna"} | fields))


TWO_HALVES = tuple(dataclasses.replace(stage, blocks=(0,)) for stage in full().stages)
REFUSED = {
    "schedule": (full(schedule="1f1b"), "schedule is '1f1b'; Varuna has a schedule of its own: give varuna"),
    "variants": (full(variants={"3": "sdpa"}), "variants is {'3': 'sdpa'}; Varuna runs the layers as they are"),
    "routes": (full(routes="direct"), "routes is 'direct'; Varuna hands tensors from stage to stage"),
    "actions": (
        Plan(2, (PlanStage(((0, 2),), (0,)),), Units(1, 1, 1), actions=(("0F0", "0B0"),)),
        "actions are given for 1 ranks; Varuna has a schedule of its own",
    ),
    "kept": (full({}, {"memory": ()}), r"stages[1].memory is []; Varuna recomputes whole stages and does nothing else"),
    "part": (
        full({"memory": (MemoryInterval(0, 3, "recompute"),)}),
        "stages[0].memory is [[0, 3, 'recompute']]; Varuna recomputes whole stages",
    ),
    "offload": (
        full({"memory": (MemoryInterval(0, 5, "offload"),)}),
        "stages[0].memory is [[0, 5, 'offload']]; Varuna recomputes whole stages",
    ),
    "moments": (
        full({"moments": (MemoryInterval(0, 2, "host"),)}),
        "stages[0].moments is [[0, 2, 'host']]; Varuna keeps the optimizer's moments on the device",
    ),
    "one rank": (full({}, {"ranks": (0,)}), "stages[1].ranks is [0]; Varuna runs stage 1 on rank 1"),
    "limit": (full({}, {"in_flight": 2}), "stages[1].in_flight is 2; Varuna has limits of its own"),
    "grain": (full({"grain": 2}, {"grain": 2}), "stages[0].grain is 2; in Varuna all stages take the same"),
    "blocks": (
        dataclasses.replace(full(), stages=(*TWO_HALVES, PlanStage(((0, 11),), (2,), (1,)))),
        "stages[0].blocks is [0]; in Varuna every stage serves all blocks: leave it out",
    ),
    "order": (
        dataclasses.replace(full(), stages=full().stages[::-1]),
        "stages[0].layers is [[5, 11]]; Varuna's stages follow each other: stage 0 begins with layer 0",
    ),
    "split": (
        full({"parallel": {"kind": "tensor", "degree": 2}, "ranks": (0, 2)}),
        "stages[0].parallel is {'kind': 'tensor', 'degree': 2}; Varuna does not split layers",
    ),
}


@pytest.mark.parametrize(("plan", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_varuna_would_not_do_is_refused_by_field(plan: Plan, message: str) -> None:
    with pytest.raises(CapslogError) as refused:
        cuts_of(plan)
    assert str(refused.value).startswith(message)
    with pytest.raises(CapslogError) as again:
        plugin.configure(cuts=plan)
    assert str(again.value) == str(refused.value)


def test_the_cuts_are_taken_of_either_form() -> None:
    assert cuts_of(Plan.of_cuts(11, (0, 5))) == (0, 5)
    assert cuts_of(full()) == (0, 5)
    offloaded = [{"memory": (MemoryInterval(*span, "recompute+offload"),)} for span in ((0, 5), (5, 11))]
    assert cuts_of(full(*offloaded)) == (0, 5)


def test_a_run_on_varuna_refuses_the_plan_before_it_starts(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", full({}, {"in_flight": 2}))
    values = {
        "workload": "tests.engine.workload:workload",
        "engine": "varuna",
        "train": {"minibatch_size": 8, "microbatch_size": 2},
        "pipeline": {"plan": str(tmp_path / "plan.json")},
        "device": "cpu",
    }
    config = with_given_plan(section(Config, values, ""))
    with pytest.raises(CapslogError, match=r"^stages\[1\].in_flight is 2; Varuna has limits of its own"):
        plan_run(config, None)
