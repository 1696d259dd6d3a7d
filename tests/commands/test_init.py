"""`capslog init` copies the files that come with the package and never overwrites a file that the user has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_capslog import cli
from varuna_capslog.config.reading import load_config

ROOT = Path(__file__).parents[2]


def test_it_copies_configs_examples_and_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["init", str(tmp_path / "new")]) == 0
    assert load_config(tmp_path / "new/configs/tiny.yaml").train.max_steps == 10
    for name in ("configs/paper/rn50_d_e6.yaml", "examples/gpt2.py", "launch/torchrun.sh"):
        copy = tmp_path / "new" / name
        assert copy.read_bytes() == (ROOT / name).read_bytes()
        assert copy.stat().st_mode == (ROOT / name).stat().st_mode
    assert not (tmp_path / "new/launch/quickstart.sh").exists(), "it installs a clone"
    assert not list((tmp_path / "new").rglob("__pycache__"))
    assert "files in" in capsys.readouterr().out


def test_a_changed_file_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    mine = tmp_path / "configs/tiny.yaml"
    mine.write_text("mine")
    assert cli._run(["init", str(tmp_path)]) == 2
    assert f"{mine} is there and differs from the package's" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert not (tmp_path / "examples").exists()
    mine.unlink()
    assert cli._run(["init", str(tmp_path)]) == cli._run(["init", str(tmp_path)]) == 0
