"""Output whose reader goes away, or whose disk is full: no write to it raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from varuna_capslog import cli
from varuna_capslog.base.tables import LastingStream, lasting_output

LOST = "standard output cannot be written: No space left on device; what follows is not shown"


def test_a_reader_that_goes_away_is_passed_over_in_silence() -> None:
    """`capslog train | head` lost 17 steps: rank 0 died of BrokenPipeError at its next line (wandb/wandb#6201,
    facebookresearch/dinov2#404). Programs that are started later get the null device.
    """
    reading, writing = os.pipe()
    errors: list[str] = []
    with open(writing, "w") as stream:
        lasting = LastingStream(stream, errors.append)
        lasting.write("seen\n")
        lasting.flush()
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        for _ in range(3):
            print("unseen", file=lasting, flush=True)
        assert subprocess.run(["echo", "unseen"], stdout=lasting.fileno(), check=False).returncode == 0
    assert not errors


def test_a_full_disk_is_told_once() -> None:
    """The error was reported as a defect: "unexpected OSError: [Errno 28] ..., this is a defect"."""
    errors: list[str] = []
    with open("/dev/full", "w", buffering=1) as stream:
        lasting = LastingStream(stream, errors.append)
        for _ in range(3):
            lasting.writelines(["a\n", "b\n"])
    assert errors == [LOST]


@pytest.mark.parametrize(("command", "status"), [("--version", 2), ("train", 0), ("", 2)])
def test_a_run_goes_on_without_its_output_and_another_command_fails(
    command: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The product of `train` is a trained model; the product of `plan --json` is its output."""
    monkeypatch.setattr(cli, "_status_of", lambda *_: sys.stdout.write("told\n") * 0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli._run(command.split()) == status
        full.write("what a stream still held went to the null device")
    assert capsys.readouterr().err == f"capslog: {LOST}\n"


def test_streams_that_a_shell_has_closed_stay_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After `>&-` Python has no standard output at all."""
    monkeypatch.setattr(sys, "stdout", None)
    with lasting_output():
        print("nowhere")  # noqa: T201
        assert sys.stdout is None
