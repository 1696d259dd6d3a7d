"""`launch/chaos.sh` from any folder: its help, its refusals, which `tests` it takes, and networks of the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.namespaces import how_to_enter
from varuna_capslog.base.errors import CapslogError

ROOT = Path(__file__).parents[4]


def chaos(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}
    return subprocess.run(
        [ROOT / "launch" / "chaos.sh", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
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


def has_namespaces() -> bool:
    try:
        how_to_enter()
    except CapslogError:
        return False
    return True


def test_a_project_with_tests_of_its_own_is_no_hindrance_and_the_kernel_cuts_machines_off(tmp_path: Path) -> None:
    """The project's package `tests` once came first on the path, in this process and in those that fork members. Where
    machines can have networks of their own, the kernel cuts one off.
    """
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "queue.py").write_text("raise SystemExit(9)\n")
    network, kind = ("namespaces", "cut") if has_namespaces() else ("relay", "kill")
    words = ["--network", network, "--workers", "1", "--faults", "1", "--kinds", kind, "--mean", "50ms"]
    done = chaos(*words, "--seed", "5", "-o", "run", "--results", "results.jsonl", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed 5: passed; 1 faults" in done.stdout
    assert (tmp_path / "run" / "chaos" / "records").is_dir()
    report = json.loads((tmp_path / "results.jsonl").read_text())
    assert (report["outcome"], report["network"], report["faults"]) == ("passed", network, 1)
    if kind == "kill":
        pytest.skip("this machine allows no network namespaces")
    assert {1, 2} <= set(report["layouts"]), "nobody was cut off"
    log = [json.loads(line) for line in (tmp_path / "run" / "chaos" / "log.jsonl").open()]
    assert any("does not answer" in str(entry.get("why")) for entry in log if entry["kind"] == "dead")


def test_a_copy_without_the_rig_says_what_it_needs(tmp_path: Path) -> None:
    """The wheel has the launchers, and no tests."""
    copy = tmp_path / "launch" / "chaos.sh"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "launch" / "chaos.sh").read_bytes())
    done = subprocess.run(["bash", copy], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launch/chaos.sh needs a clone of the repository: {tmp_path} has no tests/rig\n"
