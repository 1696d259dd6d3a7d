"""The notebook of examples/ runs from its first cell to its last, and shows tables and pictures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, of the extra test")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel, of the extra test")

ROOT = Path(__file__).parents[1]


def test_the_notebook_shows_tables_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook = nbformat.read(ROOT / "examples" / "plan.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [set().union(*(output.get("data", {}) for output in cell.outputs)) for cell in cells]
    assert sum("text/html" in kinds for kinds in shown) == 2, "the table of the costs, the table of the plan"
    assert sum("image/png" in kinds for kinds in shown) == 2, "the layers with the cuts, and the step"
    (plan,) = (output.data["text/html"] for cell in cells for output in cell.outputs if "3 stages" in str(output))
    assert plan.count("<tr>") == 4
    texts = [output.text for cell in cells for output in cell.outputs if output.output_type == "stream"]
    lines = "".join(texts).splitlines()  # what is printed may come in parts
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert "does not fit" in lines[0]
    assert lines[2] == "3 fits"
