"""Fixtures of the tests of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from varuna_capslog.reports import style


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Yield the drawn figures, in order."""
    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            FigureCanvasAgg(self)
            drawn.append(self)

    monkeypatch.setattr(style, "Figure", Kept)
    yield drawn
    assert drawn, "the test drew nothing"
