"""Titles of pictures name the model, the devices and the schedule, as far as they are known, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.reports.style import device_kind, plan_title, schedules_text, title_of

LAYERS = (LayerProfile("a", 1, None), LayerProfile("b", 1, 1))


def test_what_is_not_known_is_left_out() -> None:
    assert title_of("Training", "vit", "") == "Training of vit"
    assert title_of("One step", None, "2 devices", None, "schedule 1f1b") == (
        "One step of a model on 2 devices, schedule 1f1b"
    )
    assert plan_title("One step", Plan.of_cuts(2, (0,)), None) == "One step of a model on 1 device"
    assert schedules_text([None]) is None


def test_a_plan_has_the_model_and_device_of_its_profile() -> None:
    profile = Profile(LAYERS, model="vit", conditions={"device": "cpu"})
    plan = Plan.of_cuts(2, (0, 1), planner="exact")
    assert plan_title("Peaks", plan, profile, "schedule 1f1b") == (
        "Peaks of vit on a pipeline of 2 devices (cpu), planner exact, schedule 1f1b"
    )


def test_unlike_devices_have_no_common_kind() -> None:
    """A profile for devices "2x rtx4090, rtx3090" is of the fastest kind, which is not that of all of them."""
    conditions = {"device": "cuda", "gpu": "rtx4090"}
    assert device_kind(conditions) == device_kind(conditions, [None, None]) == " (cuda:rtx4090)"
    assert device_kind(conditions, [1.0, 0.5]) == ""
    plan = replace(Plan.of_cuts(2, (0, 1)), ranks=(PlanRank(speed=1.0), PlanRank(speed=0.5)))
    assert "rtx4090" not in plan_title("Peaks", plan, Profile(LAYERS, conditions=conditions))


def test_each_schedule_is_named_once() -> None:
    assert schedules_text(["1f1b", None, "1f1b"]) == "schedule 1f1b"
    assert schedules_text(["varuna", "1f1b", "varuna"]) == "schedules varuna, 1f1b"
