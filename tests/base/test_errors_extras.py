"""A missing module is reported with the extra that brings it, wherever it is missing; other defects are not hidden."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError, needed


@pytest.mark.parametrize(("module", "extra"), [("plotly.offline", "report"), ("PIL", "detr"), ("skopt", "bo")])
def test_a_missing_module_is_one_sentence(module, extra, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)  # so that importing it fails
    with pytest.raises(
        CapslogError, match=rf"^a page needs the module '{module.split('.')[0]}.*varuna-capslog\[{extra}\]"
    ):
        with needed("a page"):
            __import__(module)


def test_a_module_of_no_extra_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError), needed("a page"):
        __import__("varuna_capslog.no_such_module")


@pytest.mark.parametrize("place", ["import skopt\n", "def workload(config):\n    import skopt\n"])
def test_a_workload_that_lacks_a_module_is_refused_with_its_extra(
    place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DETR's workload imports its modules when it is called, and the refusal advised to name another function."""
    monkeypatch.setitem(sys.modules, "skopt", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"lacking_{len(place)}"
    (tmp_path / f"{name}.py").write_text(place)
    (tmp_path / "run.yaml").write_text(f"workload: {name}:workload\n")
    assert cli._run(["profile", "run.yaml", "--estimate"]) == 2
    message = capsys.readouterr().err
    assert "needs the module 'skopt', which is not installed; the extra 'bo' brings it" in message
    assert len(message.splitlines()) == 1
