"""Varuna's launcher wrapped: a cut list from outside, and the user's message when a worker dies anywhere or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile
from varuna_capslog.varuna_plugin import FoundVaruna, launch

SCRIPT = Path(__file__).parent / "training_script.py"
ROOT = Path(__file__).parents[2]


def start(varuna: FoundVaruna, *options: str, script: tuple[str, ...] = ()) -> tuple[int, str, float]:
    """Run the launcher; return its exit status, its stderr and the seconds that it took."""
    paths = os.pathsep.join([str(ROOT), str(varuna.folder.parent), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "varuna_capslog.varuna_plugin.launch", *options),
            *("--ngpus_per_server", "2", "--nservers", "1", "--nstages", "2", "--batch_size", "8", "--chunk_size", "2"),
            *(str(SCRIPT), *script),
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_a_script_trains_with_a_plan_from_outside(varuna: FoundVaruna, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", Plan.of_cuts(num_layers=6, cuts=(0, 4)))
    status, text, _ = start(varuna, "--cuts", str(tmp_path / "plan.json"), script=("--cuts=mine",))
    assert status == 0, text
    assert "cuts (0, 4); mine" in text
    # the same script under Varuna's own split: the same training
    second_status, again, _ = start(varuna)
    assert second_status == 0, again
    assert "cuts (0, 3)" in again
    assert text.split("losses end with ")[1][:8] == again.split("losses end with ")[1][:8]


def test_cuts_are_searched_before_the_start(varuna: FoundVaruna, tmp_path: Path) -> None:
    rows = [LayerProfile(f"piece {i}", size, size if i else None) for i, size in enumerate([9, 1, 1, 1, 1, 1])]
    write_profile(tmp_path / "profile.json", Profile(tuple(rows)))
    status, text, _ = start(varuna, "--profile", str(tmp_path / "profile.json"))
    assert status == 0, text
    assert "cuts (0, 1);" in text
    status, text, _ = start(varuna, "--profile", str(tmp_path / "profile.json"), "--capacity", "8B")
    assert status == 3
    assert "stage 0 needs 9 B of 8 B" in text


def test_the_cause_is_not_the_one_that_lost_it() -> None:
    """Regression: the launcher may see any process fail first, and rank 0, which lost its neighbour, was named as the
    cause.
    """
    assert launch._cause([5, 9]) == 1
    assert launch._cause([None, 5, -9]) == 2
    assert launch._cause([0, 5, 5]) == 1


def test_a_rank_that_hangs_is_given_up(varuna: FoundVaruna) -> None:
    status, text, seconds = start(varuna, script=("--fail=hang", "--timeout=4"))
    assert status == 5, text
    assert "waiting for gradients of microbatch" in text or "waiting for activations of microbatch" in text
    assert "nothing came for 4 s" in text
    assert seconds < 300  # the rank sleeps for 600; starting alone may take a minute on a busy machine


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "checkpoint"])
def test_a_killed_worker_ends_the_job(varuna: FoundVaruna, tmp_path: Path, where: str) -> None:
    status, text, _ = start(varuna, script=(f"--fail={where}", f"--store={tmp_path}"))
    assert status in (128 + 9, 2), text
    assert "the others are stopped" in text
    assert "Traceback" not in text
    assert "rank 0: rank 0 was" in text or "rank 1 ended with signal 9" in text
    # the previous step's checkpoint is complete, the interrupted one never got its name
    assert "varuna_ckpt_1" in os.listdir(tmp_path)
    assert "varuna_ckpt_2" not in os.listdir(tmp_path)


def test_a_workers_own_status_is_the_commands(varuna: FoundVaruna) -> None:
    status, text, _ = start(varuna, script=("--fail=exception",))
    assert status == 9, text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cuts", "0,2,4"), "makes 3 stages, but --nstages is 2"),
        (("--cuts", "nowhere.json"), "nowhere.json cannot be read"),
        (("--profile", "nowhere.json"), "nowhere.json cannot be read"),
        (("--profile", "p.json", "--cuts", "0,2"), "leave one out"),
        (("--gpus_per_stage", "4"), "Too many gpus_per_stage"),
    ],
)
def test_mistakes_end_before_anything_is_started(varuna: FoundVaruna, options: tuple[str, ...], message: str) -> None:
    status, text, _ = start(varuna, *options)
    assert status == 2
    assert message in text
    assert "Traceback" not in text


def test_the_scripts_own_arguments_are_left_alone() -> None:
    words = ["--cuts", "0,1", "--nstages", "2", "train.py", "--cuts", "mine"]
    assert launch._options(words) == words[:4]
