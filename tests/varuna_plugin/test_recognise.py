"""The right Varuna, the unrelated package of that name, a changed one, none: what the user is told. Nothing is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import recognise


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one to find `varuna` in; importing what it holds fails the test."""
    for name in [name for name in sys.modules if name.split(".")[0] == "varuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def write(folder: Path, names: list[str]) -> Path:
    package = folder / "varuna"
    package.mkdir()
    for name in names:
        (package / name).write_text("raise SystemExit('imported')\n")
    return package


def test_none(place: Path) -> None:
    with pytest.raises(CapslogError, match=r"not importable here; get it with `git clone .*microsoft/varuna"):
        plugin.install()


def test_the_unrelated_package_of_that_name(place: Path) -> None:
    write(place, ["__init__.py", "varuna.py", "alerts.py"])
    with pytest.raises(CapslogError, match=r"not Microsoft's pipeline trainer .* package index is something else"):
        plugin.install()
    assert "varuna" not in sys.modules


def test_a_changed_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write(place, list(recognise._SOURCES))
    known = {name: recognise._digest(package / name) for name in recognise._SOURCES}
    monkeypatch.setattr(recognise, "_SOURCES", known)
    assert plugin.find_varuna().folder == package
    # line ends of another platform are no change
    (package / "utils.py").write_bytes((package / "utils.py").read_bytes().replace(b"\n", b"\r\n"))
    assert plugin.find_varuna().folder == package
    (package / "utils.py").write_text("raise SystemExit('imported!')\n")
    with pytest.raises(CapslogError, match=r"differs from commit a2145cc in utils.py"):
        plugin.install()
    (package / "launcher.py").unlink()
    with pytest.raises(CapslogError, match=r"lacks launcher.py"):
        plugin.install()
    assert plugin.installed_patches() == []


def test_the_name_and_commit_stand_in_no_requirement() -> None:
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    required = setup[setup.index("install_requires") : setup.index("entry_points")]
    assert '"varuna' not in required
    assert "'varuna" not in required
