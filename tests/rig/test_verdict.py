"""What chaos runs are compared with."""

from __future__ import annotations

from pathlib import Path

from varuna_capslog.rig.toy import toy_config
from varuna_capslog.rig.verdict import truth_of


def test_the_uninterrupted_run_comes_as_far_as_any_member_did(tmp_path: Path) -> None:
    """A run may end while it makes up for steps that a loss has taken back.

    With three times as many steps as the run's last one, the checkpoint to compare with had been pruned.
    """
    config = toy_config(tmp_path, ["train.checkpoint_every=1", "pipeline.devices=1"])
    short, long = truth_of(config, 2, 2), truth_of(config, 2, 6)
    assert sorted(long.steps) == [1, 2, 3, 4, 5, 6]
    assert {step: long.steps[step] for step in (1, 2)} == short.steps
    assert long.weights == short.weights
