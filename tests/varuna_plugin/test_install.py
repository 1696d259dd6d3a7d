"""The choice of the package called `varuna`, and patches: `uninstall` restores all that they replace, both in our own
examples and in the real Varuna.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import FoundVaruna
from varuna_capslog.varuna_plugin.install import Patches

installing = sys.modules["varuna_capslog.varuna_plugin.install"]  # the package gives this name to a function


class Owner:
    one = 1

    def method(self) -> str:
        return "before"


def test_everything_is_put_back_in_reverse() -> None:
    patches, before = Patches(), dict(vars(Owner))
    patches.replace(Owner, "one", 2)
    patches.replace(Owner, "one", 3)
    patches.replace(Owner, "method", lambda self: "after")
    assert (Owner.one, Owner().method(), len(patches.names)) == (3, "after", 3)
    patches.undo()
    assert dict(vars(Owner)) == before
    assert patches.names == []


def test_a_patch_must_hit_something() -> None:
    class Child(Owner):
        pass

    patches = Patches()
    with pytest.raises(AttributeError, match="no attribute 'method' of its own"):
        patches.replace(Child, "method", None)


def test_importing_the_plugin_needs_no_varuna() -> None:
    code = "import sys, varuna_capslog.varuna_plugin; assert 'varuna' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_real_varuna_is_as_before_after_uninstall(varuna: FoundVaruna) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        import varuna as package

        importlib.import_module("varuna.checkpoint")

    def state() -> dict[str, Any]:
        owners: list[Any] = [
            package.varuna,
            package.pipeline,
            package.partitioned_model,
            package.utils,
            package.checkpoint,
            package.Varuna,
            package.PartitionedModel,
            package.CutPoint,
            package.pipeline.Pipeline,
        ]
        return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}

    assert isinstance(package.varuna, types.ModuleType)
    before = state()
    installed = plugin.install()
    try:
        assert installed == varuna
        count = len(plugin.installed_patches())
        assert plugin.install() == installed
        assert len(plugin.installed_patches()) == count
        during = state()
        assert sum(during[name] is not value for name, value in before.items()) == count
    finally:
        plugin.uninstall()
    after = state()
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only folder in which `varuna` can be found; importing a module from it fails the test."""
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
    package = write(place, list(installing._SOURCES))
    digests = {name: installing._digest(package / name) for name in installing._SOURCES}
    monkeypatch.setattr(installing, "_SOURCES", digests)
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
