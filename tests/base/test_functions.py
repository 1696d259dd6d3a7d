"""Functions that a config names: the search path of their modules."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from varuna_capslog.base.errors import ConfigError
from varuna_capslog.base.functions import import_function


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder that is not searched yet, as under the installed command."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_current_folder_is_searched_last(folder: Path) -> None:
    """A user's rich.py or queue.py beside his workload broke every run with an ImportError, as it replaced the
    library.
    """
    (folder / "users_functions.py").write_text("def workload(): return 3\n")
    for name in ("rich", "queue", "tomllib"):
        (folder / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    assert import_function("users_functions:workload", "workload")() == 3
    assert sys.path[-1] == str(folder)
    for name in ("rich", "queue"):
        spec = PathFinder.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert not spec.origin.startswith(str(folder))


@pytest.mark.parametrize("file", ["colorsys.py", "colorsys/__init__.py"])
def test_a_users_module_with_an_installed_name_is_refused(file: str, folder: Path) -> None:
    """The installed module would be run in its place, without a warning if it has a function of that name."""
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("def rgb_to_hls(): ...\n")
    with pytest.raises(ConfigError, match=f"comes before {file} of the current folder; rename yours"):
        import_function("colorsys:rgb_to_hls", "data.loss='colorsys:rgb_to_hls'")
