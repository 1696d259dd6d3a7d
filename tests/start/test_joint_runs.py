"""`pipeline.planner=joint`: all devices of a run are planned at once, and the run is the run of one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.start.test_choices import REPLICATED_MIDDLE, command, losses, write
from varuna_capslog import cli
from varuna_capslog.config.reading import load_config
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.start.choices import with_given_plan
from varuna_capslog.start.prepare import plan_run, prepare_run, profile_run

pytestmark = pytest.mark.usefixtures("forked_servers")

JOINT = ("pipeline.planner=joint", "pipeline.devices=3", "profile.source=estimated")


def test_three_devices_in_unequal_pipelines_train_as_one_device_does(tmp_path: Path) -> None:
    one_device = ["pipeline.devices=1", "pipeline.cuts=[0]"]
    assert cli._run(command(tmp_path, "alone", *one_device)) == 0
    assert cli._run(command(tmp_path, "shared", *JOINT)) == 0
    assert losses(tmp_path / "shared") == losses(tmp_path / "alone")
    plan = read_plan(tmp_path / "shared" / "plan-0.json")
    assert (plan.planner, plan.num_ranks, plan.units.blocks) == ("joint", 3, 4)
    assert plan.step_seconds is not None
    assert plan.fits
    assert set(plan.placement()) == {0, 1, 2}
    again = command(tmp_path, "shared", *JOINT)
    prepare_run(load_config(Path(again[1]), again[2:]), show=False)
    assert not (tmp_path / "shared" / "plan-1.json").exists(), "the same plan is no new generation"


def test_what_does_not_fit_ends_with_3_before_a_worker_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(command(tmp_path, "run", *JOINT, "pipeline.capacity=10KiB")) == 3
    assert "nothing fits" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_elastic_run_is_planned_with_its_snapshots_and_told_of_its_copies(tmp_path: Path) -> None:
    words = command(tmp_path, "run", *JOINT)
    for elastic, sentences in ((False, 0), (True, 1)):
        config = load_config(Path(words[1]), [*words[2:], f"elastic.enabled={json.dumps(elastic)}"])
        plan = plan_run(config, profile_run(config, show=False))
        assert len(plan.notes) == sentences
        assert all("protection takes up to" in note for note in plan.notes)


def test_an_elastic_run_that_fits_without_its_snapshots_only_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No plan with the snapshots was found, and the plan without them was begun as if they took no memory."""
    one_block = "train.accumulation_blocks=1"
    words = command(tmp_path, "run", *JOINT, "pipeline.devices=2", one_block, "pipeline.capacity=1MiB")
    config = load_config(Path(words[1]), words[2:])
    least = plan_run(config, profile_run(config, show=False)).peak_bytes
    words[-1] = f"pipeline.capacity={least}B"
    config = load_config(Path(words[1]), words[2:])
    assert plan_run(config, profile_run(config, show=False)).fits is True
    assert cli._run([*words, "elastic.enabled=true"]) == 3
    assert "where a snapshot of its layers lies beside it; add devices or capacity" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("workers/*.json"))


def test_a_joint_plan_has_the_bytes_that_its_ranks_programs_take(tmp_path: Path) -> None:
    """The search uses its model of one pipeline; the plan's bytes were not checked again before the run."""
    words = command(tmp_path, "run", *JOINT, "pipeline.capacity=100KiB")
    config = load_config(Path(words[1]), words[2:])
    plan = plan_run(config, profile_run(config, show=False))
    assert (plan.fits, plan.memory_model, plan.planner) == (True, "ranks", "joint")
    assert [rank.bytes for rank in plan.ranks] == rehearse_plan(config, plan)


def test_a_planner_that_needs_seconds_gets_its_profile_beside_a_given_plan(tmp_path: Path) -> None:
    """An elastic run trains by the given plan, and plans with the profile once its devices have changed."""
    words = command(tmp_path, "run", *JOINT, f"pipeline.plan={write(tmp_path, REPLICATED_MIDDLE)}")
    for elastic in (False, True):
        config = load_config(Path(words[1]), [*words[2:], f"elastic.enabled={json.dumps(elastic)}"])
        plan = prepare_run(with_given_plan(config), show=False)
        assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,), (0,)]
        assert (tmp_path / "run" / "profile.json").exists() == elastic
