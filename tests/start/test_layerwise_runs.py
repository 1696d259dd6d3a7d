"""`pipeline.planner=dawnpiper` and `vpipe`: settings that are fixed before the run, and refused configs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.start.test_choices import command
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, load_config
from varuna_capslog.planners import LAYERWISE
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.start.prepare import plan_run, prepare_run, profile_run

SETTINGS = ("pipeline.devices=2", "profile.source=estimated", "pipeline.schedule=gpipe", "pipeline.recompute=false")

MICROSECONDS = (
    (45, 133, 16, 70, 22, 302, 197, 22, 124, 125, 191),
    (0, 98, 24, 67, 0, 294, 282, 12, 188, 188, 252),
)
"""Forward and backward of each layer, as once measured on a CPU."""


def config_of(tmp_path: Path, planner: str, *words: str) -> Config:
    line = command(tmp_path, planner, *SETTINGS, f"pipeline.planner={planner}", *words)
    return load_config(Path(line[1]), line[2:])


def test_plans_have_the_bytes_that_their_ranks_programs_take(tmp_path: Path) -> None:
    """The search uses its own fold; the bytes of plans that nearly fill a device are rehearsed. The seconds
    are constants with which these plans do: seconds measured anew gave, now and then, one that needs no rehearsal.
    """
    profile = profile_run(config_of(tmp_path, "vpipe"), show=False)
    layers = (
        dataclasses.replace(row, forward_seconds=forward * 1e-6, backward_seconds=backward * 1e-6)
        for row, forward, backward in zip(profile.layers, *MICROSECONDS, strict=True)
    )
    profile = dataclasses.replace(profile, layers=tuple(layers))
    kinds: dict[str, set[str]] = {}
    for name in LAYERWISE:
        words = ("pipeline.capacity=110KiB", f"pipeline.host_tier={tmp_path}")
        config = config_of(tmp_path, name, *words)
        plan = plan_run(config, profile)
        assert (plan.fits, plan.planner, plan.num_ranks) == (True, name, 2)
        assert [rank.bytes for rank in plan.ranks] == rehearse_plan(config, plan)
        assert all(rank.bytes is not None and rank.bytes <= 110 << 10 for rank in plan.ranks)
        kinds[name] = {interval.kind for stage in plan.stages for interval in stage.memory or ()}
    expected = {"dawnpiper": {"offload", "recompute"}, "vpipe": {"offload", "recompute"}}
    assert kinds == {"budget": {"recompute"}, **expected}, "nobody says what copies cost"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("pipeline.replicas=2", "pipeline.replicas=2: it plans one pipeline"),
        ("pipeline.stages_per_rank=2", "pipeline.stages_per_rank=2: it plans one stage per rank"),
        ("pipeline.schedule=1f1b-star", "schedule=1f1b-star: the limits of that schedule follow from cuts"),
        ("elastic.enabled=true", "elastic.enabled=true: it is not asked anew after a membership change"),
        ("pipeline.memory=gpipe", "memory is 'gpipe', but the plans of planner 'dawnpiper' have memory intervals"),
    ],
)
def test_what_cannot_be_one_pipeline_with_intervals_is_refused_before_a_profile(
    tmp_path: Path, word: str, sentence: str
) -> None:
    with pytest.raises(CapslogError, match=sentence):
        prepare_run(config_of(tmp_path, "dawnpiper", word), show=False)
    assert not (tmp_path / "dawnpiper").exists()


@pytest.mark.parametrize("word", ["pipeline.bandwidth=fast", "pipeline.latency=20furlongs"])
def test_a_link_that_is_no_rate_and_no_duration_is_refused_by_its_key(tmp_path: Path, word: str) -> None:
    with pytest.raises(CapslogError, match=word.partition("=")[0]):
        config_of(tmp_path, "budget", word)
