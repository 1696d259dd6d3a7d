"""Imports by users: public names of the package, and the import paths in saved configs and programs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import varuna_capslog


@pytest.mark.parametrize("name", varuna_capslog.__all__)
def test_every_public_name_is_had_from_the_package(name):
    value = getattr(varuna_capslog, name)
    if name not in ("__version__", "STOP"):
        assert value.__name__ == name
        assert value.__module__.startswith("varuna_capslog.")


def test_the_package_lists_its_public_names_and_refuses_others():
    assert set(varuna_capslog.__all__) <= set(dir(varuna_capslog))
    with pytest.raises(AttributeError, match="no attribute 'Chains'"):
        varuna_capslog.Chains  # noqa: B018


def test_importing_the_package_loads_no_room():
    """Its names loaded the version's module and typing, which doubled the time of importing the package."""
    code = "import sys; old = set(sys.modules); import varuna_capslog; print(*set(sys.modules) - old)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "varuna_capslog" in loaded
    assert not [name for name in loaded if name.startswith(("varuna_capslog.", "typing"))]


def test_importing_the_package_and_a_plan_imports_no_torch():
    code = "import sys, varuna_capslog as v; v.read_plan; v.Profile; v.load_config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("varuna_capslog.elastic", "request_morph"),
        ("varuna_capslog.elastic.script", "train"),
        ("varuna_capslog.varuna_plugin", "install"),
        ("varuna_capslog.varuna_plugin.launch", "main"),
    ],
)
def test_import_paths_of_older_programs_still_work(module, name):
    assert callable(getattr(importlib.import_module(module), name))
