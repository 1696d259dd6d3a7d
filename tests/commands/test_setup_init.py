"""`capslog init` copies the files that come with the package; it overwrites changed ones with --force only."""

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


def test_a_changed_file_is_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    mine = tmp_path / "configs/tiny.yaml"
    mine.write_text("mine")
    assert cli._run(["init", str(tmp_path)]) == 2
    assert f"{mine} is there and differs from the package's" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert not (tmp_path / "examples").exists()
    mine.unlink()
    assert cli._run(["init", str(tmp_path)]) == cli._run(["init", str(tmp_path)]) == 0


def test_force_overwrites_changed_files_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed config blocked all other files, and there was no way on but to move it away."""
    assert cli._run(["init", str(tmp_path)]) == 0
    changed = [tmp_path / "configs/tiny.yaml", tmp_path / "examples/gpt2.py"]
    for path in changed:
        path.write_text("mine")
    capsys.readouterr()
    assert cli._run(["init", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "the package's, like 1 other file;" in error
    assert "overwrite it with --force" in error
    assert cli._run(["init", str(tmp_path), "--force"]) == 0
    replaced = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replaced")]
    assert replaced == [f"replaced {path}" for path in changed]
    assert changed[0].read_bytes() == (ROOT / "configs/tiny.yaml").read_bytes()
    assert cli._run(["init", str(tmp_path), "--force"]) == 0
    assert "replaced" not in capsys.readouterr().out
    changed[0].unlink()
    changed[0].mkdir()
    assert cli._run(["init", str(tmp_path), "--force"]) == 2
    assert f"{changed[0]} is no file" in capsys.readouterr().err
