"""Hosts with faults of their own: a slow name server or a slow shared file system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from tests.rig.faults import Fault
from tests.rig.toy import CONFIG


def test_a_slow_name_server_is_asked_before_training_only(
    cradle: Cradle, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each member looks up the store's name once; a loss, a change and new groups look up nothing."""
    monkeypatch.setattr(Live, "around", {"SLOW_NAMES": "0.5", "CAPSLOG_STORE": "localhost:{port}"})
    live = Live(cradle, config_of(tmp_path, 3), faults=[Fault("m1", "vote", "kill", 4)])
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": -9, "m2": 0}, describe(outcome)
    check(outcome, truth)
    for member in ("m0", "m2"):
        look_ups = (tmp_path / "slow" / f"{member}.txt").read_text().splitlines()
        outside = [line for line in look_ups if not line.rpartition(" ")[2].startswith("127.")]  # a number is no name
        assert outside == ["name MainThread localhost"], look_ups


def test_a_slow_shared_file_system_holds_up_no_step(
    cradle: Cradle, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint gets its name by several syncs and renames, which together take longer than a message may: the
    others do not take its writer for lost, and nothing else waits for the disk.
    """
    monkeypatch.setattr(Live, "around", {"SLOW_DISK": "0.3"})
    config = config_of(tmp_path, 3, train={"checkpoint_every": 6}, pipeline={"timeout_seconds": 1.0})
    live = Live(cradle, config, faults=[Fault("m1", "compute", "wait", 3, "three")])
    live.when("three")
    live.leave("m1")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("three")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    check(outcome, truth)
    assert len(outcome.rows) == 12, "no step was made again"
    lines = [line for path in (tmp_path / "slow").iterdir() for line in path.read_text().splitlines()]
    assert {line.split()[1] for line in lines} == {"checkpoint_0", "together_0", "write-papers"}, "none that trains"


def test_a_run_folder_that_is_read_only_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The folder is on a read-only file system, since the tests may run as root, for whom permissions do not count."""
    (tmp_path / "toy.yaml").write_text(CONFIG, encoding="utf-8")
    folder = tmp_path / "disk"
    folder.mkdir()
    words = (
        f"{sys.executable} -m varuna_capslog.cli train {tmp_path}/toy.yaml run_dir={folder}/run elastic.enabled=true"
    )
    program = f"mount -t tmpfs -o ro none {folder} && exec {words} pipeline.devices=2"
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        done = subprocess.run([*unshare, "sh", "-c", program], capture_output=True, text=True, timeout=300)
        if "capslog" in done.stderr:
            break
    else:
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    assert done.returncode == 2
    (message,) = done.stderr.strip().splitlines()
    assert message == f"capslog: {folder}/run/workers cannot be used: Read-only file system; choose another run_dir"
