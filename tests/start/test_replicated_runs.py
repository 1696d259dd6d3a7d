"""`pipeline.planner=pipedream`, `piper` and `graphpipe`: settings that a run takes from plans, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.start.test_choices import command
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.layout import layout_of
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.start.ordinary import with_choices_of
from varuna_capslog.start.prepare import plan_run, prepare_run, profile_run, settled_plan

SETTINGS = ("pipeline.devices=3", "profile.source=estimated")


def test_the_planner_chooses_the_blocks_of_the_run_where_the_config_leaves_them_null(tmp_path: Path) -> None:
    """They are a constant of the run, and stand in the config of its folder, by which its workers go."""
    words = command(tmp_path, "run", "pipeline.planner=pipedream", "train.accumulation_blocks=null", *SETTINGS)
    words.append("pipeline.devices=4")  # no line of stages reaches a quarter of the four microbatches each
    plan = prepare_run(load_config(Path(words[1]), words[2:]), show=False)
    assert (plan.planner, plan.num_ranks, plan.schedule) == ("pipedream", 4, "1f1b")
    assert plan.units.blocks == 4
    written = load_config(tmp_path / "run" / "config.yaml", [])
    assert (written.num_blocks, written.pipeline.schedule) == (plan.units.blocks, "1f1b")
    assert layout_of(plan, written).num_blocks == plan.units.blocks


def test_auto_is_another_word_for_budget_and_its_choices_are_constants_of_the_run(tmp_path: Path) -> None:
    words = command(tmp_path, "run", "pipeline.planner=auto", "train.accumulation_blocks=null", *SETTINGS)
    words += ["pipeline.capacity=90KiB", "pipeline.devices=4"]
    plan = prepare_run(load_config(Path(words[1]), words[2:]), show=False)
    assert plan.fits
    assert plan.bound_seconds is not None
    assert any("accumulation blocks are chosen" in note for note in plan.notes)
    written = load_config(tmp_path / "run" / "config.yaml", [])
    assert (written.pipeline.planner, written.pipeline.schedule) == ("budget", plan.schedule)
    assert written.num_blocks == (plan.units.blocks or 1)
    assert layout_of(plan, written).num_blocks == written.num_blocks
    assert [rank.bytes for rank in plan.ranks] == pytest.approx(rehearse_plan(written, plan), rel=0.01)
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    again = settled_plan(load_config(Path(words[1]), words[2:]), False, print)[0]
    assert (again.num_blocks, again.train.blocks_are_open) == (written.num_blocks, False), "it goes on with them"


def test_a_plan_has_the_bytes_that_its_ranks_programs_take(tmp_path: Path) -> None:
    words = command(tmp_path, "run", "pipeline.planner=graphpipe", *SETTINGS, "pipeline.capacity=135KiB")
    config = load_config(Path(words[1]), words[2:])
    plan = plan_run(config, profile_run(config, show=False))
    assert (plan.fits, plan.memory_model, plan.planner, plan.units.blocks) == (True, "ranks", "graphpipe", 4)
    # another processor has other seconds, and so another plan: it may leave a device out
    folded = [rank.bytes for rank in plan.ranks if rank.bytes is not None]
    assert folded == pytest.approx(rehearse_plan(with_choices_of(config, plan), plan), rel=0.002)


def test_a_periodic_plan_has_the_bytes_that_its_ranks_programs_take(tmp_path: Path) -> None:
    words = command(tmp_path, "run", "pipeline.planner=madpipe", *SETTINGS, "pipeline.capacity=90KiB")
    plan = prepare_run(load_config(Path(words[1]), words[2:]), show=False)
    written = load_config(tmp_path / "run" / "config.yaml", [])
    assert (plan.fits, plan.memory_model, plan.planner, plan.schedule) == (True, "ranks", "madpipe", "1f1b")
    assert written.pipeline.recompute is False
    assert [rank.bytes for rank in plan.ranks] == rehearse_plan(written, plan)


@pytest.mark.parametrize(
    ("planner", "word", "sentence"),
    [
        ("graphpipe", "pipeline.replicas=2", "pipeline.replicas=2: it shares all devices out itself"),
        ("piper", "pipeline.stages_per_rank=2", "pipeline.stages_per_rank=2: it says itself how many"),
        ("pipedream", "elastic.enabled=true", "elastic.enabled=true: it is not asked anew after a membership change"),
        ("capture", "elastic.enabled=true", "elastic.enabled=true: it is not asked anew after a membership change"),
        ("madpipe", "elastic.enabled=true", "elastic.enabled=true: it is not asked anew after a membership change"),
        ("madpipe", "pipeline.stages_per_rank=2", "pipeline.stages_per_rank=2: it says itself how many"),
        ("madpipe", "pipeline.memory=gpipe", "memory is 'gpipe', but ranks of planner 'madpipe' may have several"),
        ("gpipe", "elastic.enabled=true", "elastic.enabled=true: it is not asked anew"),
        ("pipedream", "pipeline.memory=gpipe", "memory is 'gpipe', but stages of planner 'pipedream' have several"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused_before_a_profile(
    tmp_path: Path, planner: str, word: str, sentence: str
) -> None:
    words = command(tmp_path, planner, f"pipeline.planner={planner}", *SETTINGS, word)
    with pytest.raises(CapslogError, match=sentence):
        prepare_run(load_config(Path(words[1]), words[2:]), show=False)
    assert not (tmp_path / planner).exists()
