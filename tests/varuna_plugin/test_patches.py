"""Whatever is replaced is put back, in our own examples and in the real Varuna."""

from __future__ import annotations

import contextlib
import importlib
import io
import types
from typing import Any

import pytest

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.varuna_plugin import FoundVaruna
from varuna_capslog.varuna_plugin.install import Patches


class Owner:
    one = 1

    def method(self) -> str:
        return "before"


def test_everything_is_put_back_in_reverse() -> None:
    patches, before = Patches(), dict(vars(Owner))
    assert patches.replace(Owner, "one", 2) == 1
    patches.replace(Owner, "one", 3)
    patches.replace(Owner, "method", lambda self: "after")
    patches.add(Owner, "two", 2)
    assert (Owner.one, Owner().method(), len(patches)) == (3, "after", 4)
    patches.undo()
    assert dict(vars(Owner)) == before
    assert len(patches) == 0


def test_a_patch_must_hit_something() -> None:
    class Child(Owner):
        pass

    patches = Patches()
    with pytest.raises(AttributeError, match="no attribute 'method' of its own"):
        patches.replace(Child, "method", None)
    with pytest.raises(AttributeError, match="already has"):
        patches.add(Owner, "one", 1)


def test_importing_the_plugin_needs_no_varuna() -> None:
    import subprocess
    import sys

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
    found = plugin.install()
    try:
        assert found == varuna
        count = len(plugin.installed_patches())
        assert plugin.install() == found
        assert len(plugin.installed_patches()) == count
        during = state()
        assert sum(during[name] is not value for name, value in before.items()) == count
    finally:
        plugin.uninstall()
    after = state()
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())
