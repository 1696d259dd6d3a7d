"""Defaults of a plan: the planner and the capacity."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.planning.test_fastest_layerwise import profile_on
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.profiles.record import Profile
from varuna_capslog.start.ordinary import (
    config_of_profile,
    default_planner,
    with_default_capacity,
    with_planner_for,
)
from varuna_capslog.start.prepare import plan_run

PROFILE = profile_on("cuda")


def config_of(**values: Any) -> Config:
    pipeline = {"devices": 2, **values.pop("pipeline", {})}
    return section(Config, {"workload": "a:b", "device": "cpu", **values, "pipeline": pipeline}, "")


@pytest.mark.parametrize(
    ("values", "planner"),
    [
        ({}, "budget"),
        ({"pipeline": {"schedule": "zb-h1"}}, "budget"),
        ({"pipeline": {"memory": "ranks"}}, "budget"),
        ({"elastic": {"enabled": True}}, "budget"),
        ({"pipeline": {"planner": "throughput"}}, "throughput"),
        ({"pipeline": {"cuts": [0, 1]}}, "exact"),
        ({"pipeline": {"replicas": 2}, "train": {"minibatch_size": 4}}, "budget"),
        ({"elastic": {"enabled": True}, "train": {"minibatch_size": 4, "accumulation_blocks": 2}}, "budget"),
        ({"pipeline": {"stages_per_rank": 2}}, "exact"),
        ({"pipeline": {"schedule": "1f1b-star"}}, "exact"),
        ({"pipeline": {"schedule": "interleaved"}}, "exact"),
        ({"pipeline": {"memory": "additive"}}, "exact"),
        ({"pipeline": {"recompute": True}}, "exact"),
        ({"pipeline": {"stage_inputs": "device"}}, "exact"),
        ({"engine": "varuna"}, "exact"),
    ],
)
def test_budget_plans_what_it_can_and_exact_the_rest(values: dict[str, Any], planner: str) -> None:
    pipeline = config_of(**values).pipeline
    assert pipeline.planner == planner
    assert pipeline.schedule == values.get("pipeline", {}).get("schedule", "auto" if planner == "budget" else "varuna")


def test_a_profile_that_cannot_feed_budget_is_planned_by_exact() -> None:
    short = Profile(tuple(dataclasses.replace(layer, forward_seconds=None) for layer in PROFILE.layers))
    config = config_of()
    assert with_planner_for(config, PROFILE) is config
    for profile in (short, dataclasses.replace(PROFILE, observations=())):
        assert default_planner(profile, "auto") == "exact"
        pipeline = with_planner_for(config, profile).pipeline
        assert (pipeline.planner, pipeline.schedule) == ("exact", "varuna")
        named = config_of(pipeline={"planner": "budget"})
        assert with_planner_for(named, profile) is named
        plan = plan_run(config_of_profile(profile, {"devices": 2}), profile)
        assert "planned for the smallest peak by planner exact" in plan.notes[-1]
    assert default_planner(PROFILE, "additive") == "exact"
    assert plan_run(config_of_profile(PROFILE, {"devices": 2}), PROFILE).planner == "budget"


def test_budget_keeps_to_the_machine_where_no_capacity_is_given() -> None:
    assert with_default_capacity(config_of()).pipeline.capacity == granted_bytes() // 2
    assert with_default_capacity(config_of(pipeline={"capacity": "1GiB"})).pipeline.capacity == 1 << 30
    assert with_default_capacity(config_of(pipeline={"planner": "exact"})).pipeline.capacity is None
    assert with_default_capacity(config_of(pipeline={"cuts": [0, 1]})).pipeline.capacity is None
    gpu = {"profile": {"device": "cuda:t4", "source": "estimated"}}
    assert with_default_capacity(config_of(**gpu)).pipeline.capacity == config_of(**gpu).pipeline.capacity
