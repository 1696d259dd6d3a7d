"""What chaos runs are compared with."""

from __future__ import annotations

from pathlib import Path

from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.rig.toy import toy_config
from varuna_capslog.rig.verdict import truth_of


def test_the_uninterrupted_run_comes_as_far_as_any_member_did(tmp_path: Path) -> None:
    """A run may end while it makes up for steps that a loss has taken back.

    With three times as many steps as the run's last one, the checkpoint to compare with had been pruned.
    """
    recipe = ["train.optimizer=nadam", "train.lr_schedule=cosine", "train.ema=0.9"]  # ends not at the last step
    config = toy_config(tmp_path, ["train.checkpoint_every=1", "pipeline.devices=1", *recipe])
    short, long = truth_of(config, 2, 2), truth_of(config, 2, 6)
    assert sorted(long.steps) == [1, 2, 3, 4, 5, 6]
    assert {step: long.steps[step] for step in (1, 2)} == short.steps
    assert long.weights == short.weights


def test_the_uninterrupted_run_of_a_given_plan_has_one_device(tmp_path: Path) -> None:
    """It was prepared with the plan of several ranks, of which only one was started."""
    path = tmp_path / "given.json"
    write_plan(path, Plan.of_cuts(8, (0, 2, 5)))
    common = ["train.checkpoint_every=1"]
    given = truth_of(toy_config(tmp_path / "given", [*common, f"pipeline.plan={path}"]), 2, 2)
    assert given == truth_of(toy_config(tmp_path / "alone", [*common, "pipeline.devices=1"]), 2, 2)
