"""`launch/chaos.sh script` as users call it: a script, two faults and a verdict; and calls that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.rig.commands.script import app
from varuna_capslog.base.errors import CapslogError

SCRIPT = Path(__file__).parents[4] / "examples" / "ddp_elastic.py"


def test_a_script_comes_through_two_faults(tmp_path: Path, forked_servers: None) -> None:
    run = tmp_path / "run"
    words = ["--faults", "2", "--seed", "3", "--mean", "50ms", "--run-dir", str(run), str(SCRIPT), "--steps", "100000"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    verdict = json.loads((run / "chaos.json").read_text())
    assert (verdict["seed"], verdict["breaches"], sum(row["count"] for row in verdict["classes"])) == (3, [], 2)
    assert done.stdout == f"seed 3: passed; 2 faults, {verdict['steps']} steps\n"
    assert "comparing with the script alone" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([str(SCRIPT.with_name("nowhere.py"))], "there is no script"),
        (["--nproc", "1", str(SCRIPT)], "faults need at least --nproc 2"),
        (["--elastic", "redundance=1", str(SCRIPT)], "redundance"),
        (["--mean", "soon", str(SCRIPT)], "mean is 'soon'"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_begins(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--run-dir", str(tmp_path / "run"), *words])
    assert isinstance(done.exception, CapslogError)
    assert sentence in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_and_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["--dry-run", "--chaos", "4", "--run-dir", str(tmp_path), str(SCRIPT), "--steps", "3"]
    )
    assert "would inject 4 faults into 2 workers" in done.stdout
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").touch()
    done = CliRunner().invoke(app, ["--run-dir", str(tmp_path), str(SCRIPT)])
    assert "holds a run already" in str(done.exception)
