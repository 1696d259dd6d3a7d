"""What the tests of pictures share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from varuna_capslog.reports import style


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were drawn, in order."""
    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            FigureCanvasAgg(self)
            drawn.append(self)

    monkeypatch.setattr(style, "Figure", Kept)
    yield drawn
    assert drawn, "the test drew nothing"


class _Sketch(Figure):
    def savefig(self, *given: Any, **named: Any) -> None:
        self.set_layout_engine("none")
        super().savefig(*given, dpi=16, **named)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is drawn, but a tenth as large, and nothing is moved: for who reads the page beside its pictures."""
    monkeypatch.setattr(style, "Figure", _Sketch)
