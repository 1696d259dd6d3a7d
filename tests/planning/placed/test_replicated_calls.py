"""Calls of several microbatches and groups of k calls (kFkB), chosen by the played step, beside all choices."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.asking import plan as planned
from tests.planning.placed.test_replicated import profile_of_graph
from tests.planning.placed.test_replicated_limits import drawn_graph, shortest_in_groups
from tests.sweeps import some
from varuna_capslog.planners.replicas.costs import ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import plan_of_stages, with_larger_calls, with_wider_limits
from varuna_capslog.planning.playing import even_share_seconds, play, with_step_seconds
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.rules import check_actions
from varuna_capslog.profiles.conditions import ONE_MICROBATCH
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.schedules import RunShape, from_strings

RUN = RunShape(8, "1f1b", False)


def with_calls(profile: Profile, fixed: float) -> Profile:
    """Return the profile with runs of 1, 2 and 4 microbatches in a call, of whose seconds a part is `fixed`."""
    rows = []
    for grain in (1, 2, 4):
        times = fixed + (1 - fixed) * grain
        for at, layer in enumerate(profile.layers):
            assert layer.forward_seconds is not None
            assert layer.backward_seconds is not None
            seconds = {
                "forward_seconds": times * layer.forward_seconds,
                "backward_seconds": times * layer.backward_seconds,
            }
            rows.append(Observation((at, at + 1), "cuda", 3 * grain, {}, 1, **seconds))
    return dataclasses.replace(profile, observations=tuple(rows))


@pytest.mark.parametrize("seed", some(range(60), 5))
@pytest.mark.parametrize("fixed", [0.0, 0.3])
def test_the_choice_is_within_a_percent_of_the_best_of_all_choices(seed: int, fixed: float) -> None:
    profile, plan, link = drawn_graph(seed, 4)
    profile = with_calls(profile, fixed)
    plan = with_step_seconds(profile, plan, RUN, link)
    wider = with_wider_limits(profile, plan, RUN, link)
    chosen = with_larger_calls(profile, wider, RUN, link)
    assert chosen.step_seconds is not None
    assert wider.step_seconds is not None
    assert chosen.step_seconds <= 1.01 * shortest_in_groups(profile, plan, link)
    assert chosen is wider or chosen.step_seconds <= 0.99 * wider.step_seconds
    assert chosen.step_seconds == with_step_seconds(profile, chosen, RUN, link).step_seconds
    if chosen.actions is not None:
        graph = chosen.stage_graph(profile.known_edges)
        check_actions(chosen.actions, graph, chosen.stages)


def line(fixed: float, last: float = 3.0) -> tuple[Profile, Plan, Link]:
    profile = with_calls(profile_of_graph([(0, 1), (1, 2)], [3.0, 3.0, last]), fixed)
    stages = tuple(PlanStage(((at, at + 1),), (at,), memory=()) for at in range(3))
    plan, link = Plan(3, stages, Units(8, 1, 1), "1f1b", routes="direct"), Link()
    return profile, with_step_seconds(profile, plan, RUN, link), link


def test_layers_of_one_microbatch_and_plans_that_do_not_fit_keep_smaller_calls() -> None:
    profile, plan, link = line(0.5)
    everywhere = with_larger_calls(profile, plan, RUN, link)
    assert min(stage.grain for stage in everywhere.stages) > 1
    for last in (3.0, 0.3):  # the last stage is as slow as the others, which gain nothing then, or fast
        mixed, its_plan, _ = line(0.5, last)
        mixed = dataclasses.replace(mixed, conditions={**mixed.conditions, ONE_MICROBATCH: [2]})
        grains = [stage.grain for stage in with_larger_calls(mixed, its_plan, RUN, link).stages]
        assert grains[2] == 1
    assert min(grains[:2]) > 1
    assert with_larger_calls(profile, plan, RUN, link, fits=lambda larger: False) is plan
    small = with_larger_calls(profile, plan, RUN, link, fits=lambda larger: max(s.grain for s in larger.stages) < 4)
    assert {stage.grain for stage in small.stages} <= {1, 2}
    assert small is not plan


def test_without_the_seconds_of_larger_calls_no_stage_takes_any() -> None:
    """Also where variants have changed the seconds of layers, so that those of larger calls are of other layers."""
    profile, plan, link = line(0.5)
    bare = dataclasses.replace(profile, observations=profile.observations[:8])  # one row of calls of 4 is missing
    assert list(bare.call_seconds) == [1, 2]
    faster = dataclasses.replace(profile.layers[0], forward_seconds=0.5)
    changed = dataclasses.replace(profile, layers=(faster, *profile.layers[1:]))
    assert list(changed.call_seconds) == [1]
    chosen = with_larger_calls(changed, with_step_seconds(changed, plan, RUN, link), RUN, link)
    assert {stage.grain for stage in chosen.stages} == {1}


def test_a_call_takes_the_seconds_of_its_runs_and_else_those_of_its_microbatches() -> None:
    profile, plan, link = line(0.5)
    grained = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, grain=2) for s in plan.stages))
    bare = dataclasses.replace(profile, observations=())
    steps = [play(given, grained, None, None, False, RUN, link) for given in (profile, bare)]
    # calls of 2 take 1.5 times as long as of one, and 4 of them fill a line of 3 stages
    assert [step.step_seconds for step in steps] == pytest.approx([6 * 4.5, 6 * 6.0])
    notes = ["taken to last as long as these one after the other" in " ".join(step.notes) for step in steps]
    assert notes == [False, True]
    # calls of 4 take 2.5 times as long, so that no plan on 3 devices is faster than this
    assert even_share_seconds(profile, 8, 3) == pytest.approx(9.0 * 2.5 / 4 * 8 / 3)
    assert even_share_seconds(bare, 8, 3) == pytest.approx(9.0 * 8 / 3)


def test_replicas_take_larger_calls_of_their_blocks() -> None:
    """Two blocks of 4 units on two replicas behind one stage: the lists of ranks count calls."""
    profile = with_calls(profile_of_graph([(0, 1)], [2.0, 4.0], 1), 0.5)
    frame = Plan(2, (PlanStage(((0, 2),), (0,)),), Units(8, 1, 1), "1f1b", routes="relay")
    stages = [ReplicatedStage((0,), 1), ReplicatedStage((1,), 2)]
    plan = with_step_seconds(profile, plan_of_stages(frame, stages, 2, profile.edges), RUN)
    chosen = with_larger_calls(profile, plan, RUN, None)
    assert [stage.grain for stage in chosen.stages[1:]] == [4, 4]
    assert chosen.actions is not None
    rows = from_strings(chosen.actions)
    assert [sum(action.kind == "F" for action in row) for row in rows] == [8 // chosen.stages[0].grain, 1, 1]


def test_graphpipe_chooses_calls_and_says_no_bound_that_larger_calls_undercut() -> None:
    profile = with_calls(profile_of_graph([(0, 1), (1, 2)], [3.0, 3.0, 3.0], weights=10**6), 0.5)
    answer = planned(profile, 3, "graphpipe", run=RUN, link=Link(1000.0))
    grains = [stage.grain for stage in answer.stages]
    assert max(grains) > 1
    assert f"the stages take {', '.join(map(str, grains))} microbatches in a call" in " ".join(answer.notes)
    assert answer.step_seconds is not None
    assert answer.bound_seconds is not None
    assert answer.bound_seconds < answer.step_seconds < 9.0 * 8 / 3 + 6
    assert not answer.proven
