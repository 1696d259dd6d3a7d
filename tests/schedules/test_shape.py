"""The run shape: the description of a run that memory models, planners, the simulator and the engine share."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.schedules import RunShape

CONFIG = section(
    Config,
    {
        "workload": "a.b:c",
        "train": {"minibatch_size": 24, "microbatch_size": 2, "accumulation_blocks": 6},
        "pipeline": {"replicas": 3, "schedule": "1f1b", "recompute": False, "stage_inputs": "device"},
    },
    "",
)


def test_a_config_says_the_whole_step_and_a_pipeline_has_its_share() -> None:
    step = RunShape.of_config(CONFIG)
    assert step == RunShape(12, "1f1b", False, "device", microbatch_size=2, num_blocks=6)
    assert step.share(3) == RunShape(4, "1f1b", False, "device", microbatch_size=2, num_blocks=2)
    assert step.share(1) == step


def test_a_profile_says_how_it_was_taken() -> None:
    conditions = {"recompute": False, "stage_inputs": "device", "microbatch_size": 8}
    assert RunShape.of_conditions(conditions, "gpipe") == RunShape(None, "gpipe", False, "device")
    assert RunShape.of_conditions({}) == RunShape()


def test_varuna_recomputes_whatever_is_asked() -> None:
    assert [RunShape(4, name, False).recomputes for name in ("varuna", "1f1b", "gpipe")] == [True, False, False]


def test_the_engines_options_are_a_run_shape() -> None:
    options = EngineOptions(4, num_blocks=2, schedule="gpipe", clip_norm=0.1)
    assert (options.share(2).microbatches, options.recomputes, options.stage_inputs) == (2, True, "host")
    with pytest.raises(CapslogError, match="3 accumulation blocks do not divide the 4 microbatches of a step"):
        EngineOptions(4, num_blocks=3)
