"""Checks that the labels of a picture can be read: none overlaps another, is too small or leaves the picture."""

from __future__ import annotations

import functools
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

__all__ = ["TITLE", "assert_legible", "assert_titled", "visible_texts"]

TITLE = "Picture of package.models:a_network_with_a_name on 16 devices (cuda:a100-80gb), schedule 1f1b, 64 microbatches"
"""A title of two lines."""


@functools.lru_cache(maxsize=1)
def visible_texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return every text of the drawn figure with its box in pixels; no text may be smaller than 4 points. It is drawn
    once: a test may not change it afterwards.
    """
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    texts: list[tuple[str, Bbox]] = []
    draw = Text.draw

    def note(text: Text, renderer: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            assert float(text.get_fontsize()) >= 4, f"{text.get_text()!r} is too small to be read"
            texts.append((text.get_text(), text.get_window_extent(renderer)))
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note)
        canvas.draw()
    return texts


def assert_legible(figure: Figure) -> None:
    """Check that no two texts overlap by more than a pixel and that none leaves the picture."""
    width, height = figure.canvas.get_width_height()
    texts = visible_texts(figure)
    for text, box in texts:
        inside = box.x0 > -1.5 and box.y0 > -1.5 and box.x1 < width + 1.5 and box.y1 < height + 1.5
        assert inside, f"{text!r} leaves the picture: {box} of {width} x {height}"
    for (first, a), (second, b) in combinations(texts, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= 1.0, f"{first!r} and {second!r} overlap by {across:.1f} x {down:.1f} pixels"


def assert_titled(figure: Figure, title: str) -> None:
    """Check that the whole title is on the figure, above all other texts."""
    texts = visible_texts(figure)
    ((found, box),) = [(text, box) for text, box in texts if text.replace("\n", " ") == title]
    assert all(other.y1 <= box.y0 + 1.0 for text, other in texts if text != found)
