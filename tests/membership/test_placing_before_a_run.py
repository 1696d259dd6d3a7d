"""Bytes of snapshots and copies in a plan's notes and in its check, before a run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import with_unit
from varuna_capslog.config.reading import Config, section
from varuna_capslog.membership.placing import RunProtection
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.start.prepare import plan_run


def chain(states: list[int], with_parameters: bool = True) -> Profile:
    """Layers of 100 bytes, of which these are state (parameters are a third, gradients another one)."""
    rows = [
        LayerProfile(
            f"l{number}",
            100,
            100 if number else None,
            static_bytes=state // 3 * 4,
            parameter_bytes=state // 3 if with_parameters else None,
        )
        for number, state in enumerate(states)
    ]
    return Profile(tuple(rows))


def planned(profile: Profile, elastic: dict[str, Any] | None = None, workload: str = "a:b", **pipeline: Any) -> Plan:
    pipeline |= {"capacity": with_unit(pipeline["capacity"])} if "capacity" in pipeline else {}
    values = {
        "workload": workload,
        "pipeline": {"memory": "additive", **pipeline},
        "elastic": {"enabled": True, **(elastic or {})},
    }
    return plan_run(section(Config, values, ""), profile)


def test_the_notes_say_what_a_rank_keeps() -> None:
    plan = planned(chain([30] * 4))
    # a stage of two layers: 60 B; two boundaries of the other stage's 60 B, and its gradients of 20 B
    (reserves, problem) = plan.notes
    assert reserves == (
        "protection takes up to 200 B of a rank's memory on the device beside training (60 B for its own layers at the "
        "last boundary, 120 B for copies of others', 20 B for their gradients), 400 B over 2 rank(s)"
    )
    assert "two neighbours" in problem
    plan = planned(chain([30] * 4), {"protection": "async"}, devices=4)
    assert "up to 90 B" in plan.notes[0]
    assert len(plan.notes) == 1
    plan = planned(chain([30] * 4), {"redundancy": 0})
    assert "up to 60 B" in plan.notes[0]


def test_replicas_hold_each_others_layers_already() -> None:
    plan = planned(chain([30] * 4), replicas=2)
    (reserves,) = plan.notes
    assert "up to 60 B" in reserves
    assert "240 B over 4 rank(s)" in reserves


def test_without_elastic_nothing_is_said_or_counted() -> None:
    assert planned(chain([30] * 4), {"enabled": False}, capacity=200).notes == ()


def test_a_plan_that_fits_without_its_snapshots_only_does_not_fit() -> None:
    assert planned(chain([30] * 4), capacity=260).fits is True
    plan = planned(chain([30] * 4), capacity=259)
    assert plan.fits is False
    assert plan.shortfall is not None
    assert (plan.shortfall.stage, plan.shortfall.bytes) == (0, 1)
    assert plan.notes[0].startswith("does not fit with elastic.enabled: stage 0 needs 260 B of 259 B")


def test_it_is_cut_anew_with_the_snapshots_where_that_fits() -> None:
    """The first layer's state is large: beside it there is room for no second layer."""
    states = [90, 9, 9, 9]
    assert planned(chain(states), {"enabled": False}, capacity=330).cuts == (0, 2)
    plan = planned(chain(states), capacity=330)
    assert (plan.cuts, plan.fits, plan.planner) == ((0, 2), True, "exact")
    tight = planned(chain([300, 3, 3, 3]), capacity=450)
    assert (tight.cuts, tight.fits, tight.planner, tight.stage_bytes) == ((0, 1), True, "exact", (100, 300))
    fixed = planned(chain([300, 3, 3, 3]), capacity=450, cuts=[0, 2])
    assert fixed.fits is False


def test_the_cuts_of_a_given_plan_are_not_replaced(tmp_path: Path) -> None:
    """Regression: new cuts were searched with the snapshots, and the given plan was said to fit since these did."""
    states, path = [300, *[3] * 10], tmp_path / "given.json"
    write_plan(path, Plan.of_cuts(11, (0, 6)))
    free = planned(chain(states), capacity=800, workload="tests.engine.workload:workload")
    assert (free.cuts, free.fits) == ((0, 4), True)
    fixed = planned(chain(states), capacity=800, workload="tests.engine.workload:workload", plan=str(path))
    assert (fixed.cuts, fixed.fits) == ((0, 6), False)
    assert fixed.notes[0].startswith("does not fit with elastic.enabled")


def test_the_snapshot_of_a_stage_of_several_pieces_is_that_of_all_of_them() -> None:
    """Ranges of layers were asked for, and such a plan ended in an error."""
    stages = tuple(PlanStage(layers, (rank,)) for rank, layers in enumerate([((0, 1), (3, 4)), ((1, 3), (4, 5))]))
    plan, profile = Plan(5, stages, Units(2, 1, 1), "1f1b", routes="direct"), chain([3, 6, 30, 300, 9])
    config = section(Config, {"workload": "a:b", "elastic": {"enabled": True, "redundancy": 0}}, "")
    noted, snapshots = RunProtection(config, profile).reserve(plan, lambda **_: plan)
    assert snapshots == [303, 45]
    assert "up to 303 B of a rank's memory on the device beside training" in noted.notes[0]


def test_copies_without_room_are_said_and_not_refused() -> None:
    plan = planned(chain([30] * 4), capacity=399)
    assert plan.fits is True
    assert "finds no room for copies" in plan.notes[-1]
    assert "finds no room" not in " ".join(planned(chain([30] * 4), capacity=400).notes)


def test_a_profile_that_does_not_know_says_so() -> None:
    plan = planned(chain([30] * 4, with_parameters=False))
    assert plan.notes == (
        "what protection takes is unknown: the profile has no static_bytes or parameter_bytes; profile again",
    )


def test_a_planner_that_is_too_slow_for_a_change_is_refused_at_the_start() -> None:
    with pytest.raises(CapslogError, match=r"choose planner budget, throughput or exact"):
        planned(chain([30] * 4), planner="mcap-bf")


def test_planner_joint_leaves_room_for_the_snapshots() -> None:
    """Regression: the fastest cuts were chosen without the bytes of protection. They did not fit, though others do."""
    bare = chain([300, 3, 3, 3])
    rows = [dataclasses.replace(row, forward_seconds=1.0, backward_seconds=2.0) for row in bare.layers]
    profile = dataclasses.replace(bare, layers=tuple(rows))
    alone = planned(profile, {"enabled": False}, planner="joint", capacity=450, devices=2)
    assert [stage.numbers for stage in alone.stages] == [[0, 1], [2, 3]]
    plan = planned(profile, {"redundancy": 0}, planner="joint", capacity=450, devices=2)
    assert plan.fits is True
    assert [stage.numbers for stage in plan.stages] == [[0], [1, 2, 3]]
    assert [rank.bytes for rank in plan.ranks] == [100, 300], "of training alone"
