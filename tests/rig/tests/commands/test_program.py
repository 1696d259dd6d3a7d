"""`launch/chaos.sh` from any folder: its help, its refusals, and which `tests` it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def chaos(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}
    return subprocess.run(
        [ROOT / "launch" / "chaos.sh", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--help"], "--kinds"),
        (["-h"], "--network"),
        (["script", "--help"], "--nproc"),
        (["script", "-h"], "--run-dir"),
    ],
)
def test_the_help_names_the_program_and_all_its_options(words: list[str], option: str) -> None:
    shown = chaos(*words)
    assert shown.returncode == 0, shown.stderr
    program = "launch/chaos.sh script" if words[0] == "script" else "launch/chaos.sh"
    assert f"Usage: {program} [OPTIONS]" in shown.stdout
    assert option in shown.stdout


def test_a_mistake_ends_in_one_sentence_that_names_the_program() -> None:
    for words, sentence in (
        (["--fault", "3"], "(Possible options: --faults, --results); see launch/chaos.sh --help"),
        (["script", "--serve", "a:1", "x.py"], "see launch/chaos.sh script --help"),
    ):
        shown = chaos(*words)
        assert shown.returncode == 2
        assert sentence in shown.stderr
        assert len(shown.stderr.splitlines()) == 1


def test_a_project_with_tests_of_its_own_is_no_hindrance(tmp_path: Path) -> None:
    """The project's package `tests` once came first on the path, in this process and in those that fork members."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "queue.py").write_text("raise SystemExit(9)\n")
    words = ["--faults", "1", "--kinds", "kill", "--workers", "1", "--mean", "50ms", "--seed", "3", "-o", "run"]
    done = chaos(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed 3: passed; 1 faults" in done.stdout
    assert (tmp_path / "run" / "chaos" / "records").is_dir()


def test_a_copy_without_the_rig_says_what_it_needs(tmp_path: Path) -> None:
    """The wheel has the launchers, and no tests."""
    copy = tmp_path / "launch" / "chaos.sh"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "launch" / "chaos.sh").read_bytes())
    done = subprocess.run(["bash", copy], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launch/chaos.sh needs a clone of the repository: {tmp_path} has no tests/rig\n"
