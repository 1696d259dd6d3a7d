"""Objects that are handed over to the processes of a run; objects that no other process finds are refused at once."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.own_data.handed import hand_over, handed

SCRIPT = """
import functools

class Data:
    def __init__(self, transform=None):
        self.transform = transform

class Replaced:
    pass

kept = Replaced()

class Replaced:
    pass

def twice(x):
    return 2 * x

def made():
    class Local:
        pass
    def local(x):
        return x
    return Local(), local

named = lambda x: x
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program whose objects belong to `__main__`, which workers find as the module `handing_script`."""
    (tmp_path / "handing_script.py").write_text(SCRIPT)
    main = types.ModuleType("__main__")
    exec(SCRIPT, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "handing_script", raising=False)
    return main


WITHOUT_NAMES: dict[str, Callable[[Any], object]] = {
    "a lambda in an attribute": lambda script: script.Data(script.named),
    "a lambda in a partial": lambda script: script.Data([functools.partial(script.named, 3)]),
    "an object of a local class": lambda script: script.made()[0],
    "a local function in a dict": lambda script: {"f": script.made()[1]},
    "a class of which another one has the name": lambda script: script.kept,
}


@pytest.mark.parametrize("what", WITHOUT_NAMES)
def test_what_has_no_name_in_the_script_is_refused_before_any_worker_starts(
    what: str, script: Any, tmp_path: Path
) -> None:
    """`self.t = lambda x: x` in a data set passed, and each worker failed with the advice to start again, which fails
    the same way (pytorch/xla#1554, facebookresearch/fastMRI#335)."""
    with pytest.raises(
        CapslogError, match=r"that cannot be handed to the workers \(PicklingError: no other process finds "
    ):
        hand_over(tmp_path / "handed.pkl", {"dataset": WITHOUT_NAMES[what](script)}, lambda name: "handing_script")
    assert not (tmp_path / "handed.pkl").exists()


def test_what_the_script_names_arrives(script: Any, tmp_path: Path) -> None:
    """Functions and classes of the script, also inside of other objects."""
    path = tmp_path / "handed.pkl"
    hand_over(path, {"dataset": script.Data(functools.partial(script.twice, 4))}, lambda name: "handing_script")
    dataset = handed(path, "dataset")
    assert type(dataset).__module__ == "handing_script"
    assert dataset.transform() == 8
