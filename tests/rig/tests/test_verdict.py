"""The uninterrupted runs that chaos runs are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig import verdict
from tests.rig.judge import Truth
from tests.rig.toy import toy_config
from tests.rig.verdict import truth_of
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan, write_plan

pytestmark = pytest.mark.usefixtures("forked_servers")

# the schedule ends not at the last step
RECIPE = ["train.checkpoint_every=1", "train.optimizer=nadam", "train.lr_schedule=cosine", "train.ema=0.9"]


@pytest.fixture(scope="module")
def alone(forked_servers: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Truth]:
    """Config of a run on one device, and the results of two steps of it."""
    config = toy_config(tmp_path_factory.mktemp("alone"), [*RECIPE, "pipeline.devices=1"])
    return config, truth_of(config, 2, 2)


def test_the_uninterrupted_run_comes_as_far_as_any_member_did(alone: tuple[Config, Truth]) -> None:
    """A run may end while it makes up for steps that a loss has taken back.

    With three times as many steps as the run's last one, the checkpoint to compare with had been pruned.
    """
    config, short = alone
    long = truth_of(config, 2, 6)
    assert sorted(long.steps) == [1, 2, 3, 4, 5, 6]
    assert {step: long.steps[step] for step in (1, 2)} == short.steps
    assert long.weights == short.weights


def test_the_uninterrupted_run_of_a_given_plan_has_one_device(tmp_path: Path, alone: tuple[Config, Truth]) -> None:
    """It was once prepared with a plan for several ranks, of which only one was started."""
    path = tmp_path / "given.json"
    write_plan(path, Plan.of_cuts(8, (0, 2, 5)))
    truth = truth_of(toy_config(tmp_path / "given", [*RECIPE, f"pipeline.plan={path}"]), 2, 2)
    assert truth == alone[1]


def test_an_uninterrupted_run_that_fails_is_no_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its folder was not prepared."""
    monkeypatch.setattr(verdict, "prepare_run", lambda config, show: None)
    with pytest.raises(CapslogError, match=r"the uninterrupted run failed with 2: .*config\.yaml"):
        truth_of(toy_config(tmp_path, ["pipeline.devices=1"]), 2, 2)
