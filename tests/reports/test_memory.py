"""Pictures of memory for small and large runs: no label overlaps another, and bars show the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tests.reports.legible import TITLE, assert_legible, assert_titled, visible_texts
from varuna_capslog.profiles.record import LayerProfile
from varuna_capslog.reports.memory import (
    MOST_GENERATIONS,
    GenerationPeaks,
    draw_generations,
    draw_layers,
    draw_stage_peaks,
    shows_capacity,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("layers", "cuts"),
    [
        (1, [0]),
        (4, [0]),
        (4, [0, 1, 2, 3]),
        (24, [0, 1, 2, 3, 4, 5, 6, 20]),
        (48, [0, 2, 4, 7, 11, 17, 24, 34]),
        (100, [0, 50]),
        (130, [0, 60]),
    ],
)
def test_layers(layers: int, cuts: list[int], tmp_path: Path, figures: list[Figure]) -> None:
    names = [rf"$\frac$.encoder.layers.{index}.self_attn" for index in range(layers)]
    sizes = [(1 + index) * 2**24 for index in range(layers)]
    added = [None, *(-size // 3 for size in sizes[1:])]
    rows = [LayerProfile(*row) for row in zip(names, sizes, added, strict=True)]
    draw_layers(tmp_path / "x.png", TITLE, rows, cuts)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    shown = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert len(shown) == layers if layers <= 100 else len(shown) > layers / 3


@pytest.mark.parametrize("added", [5, -5])
def test_the_picture_of_layers_says_what_its_bars_are(added: int, tmp_path: Path, figures: list[Figure]) -> None:
    """The legend read "alone (M_i)" and "added to a stage (M_a)", and a bar below 0 was explained nowhere."""
    draw_layers(tmp_path / "x.png", TITLE, [LayerProfile("a", 9, None), LayerProfile("norm", 3, added)], [0, 1])
    assert_legible(figures[0])
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert texts[:2] == ["M_i: memory of the layer alone", "M_a: memory that it adds behind the layer before"]
    assert texts[2:] == (["M_a below 0: with it the layer before needs less than alone"] if added < 0 else [])


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 40])
@pytest.mark.parametrize("size", [3_000, 5 * 2**20, 700 * GIB])
def test_stage_peaks(stages: int, size: int, tmp_path: Path, figures: list[Figure]) -> None:
    predicted = [size + size * stage // 20 for stage in range(stages)]
    measured = [peak + peak // 50 for peak in predicted]
    draw_stage_peaks(tmp_path / "x.png", TITLE, predicted, measured, [measured[0] + size // 40] * stages)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    unit = {3_000: "KiB", 5 * 2**20: "MiB", 700 * GIB: "GiB"}[size]
    assert figures[0].axes[0].get_ylabel() == f"peak memory [{unit}]"
    heights = [bar.get_height() for bar in figures[0].axes[0].patches if isinstance(bar, Rectangle)]
    divisor = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[unit]
    assert heights == pytest.approx([peak / divisor for peak in [*predicted, *measured]])


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 8), (4, 3), (8, 2), (MOST_GENERATIONS, 8)])
def test_generations(count: int, stages: int, tmp_path: Path, figures: list[Figure]) -> None:
    generations = []
    for number in range(count):
        num_stages = 1 + (number + stages - 1) % stages
        predicted = None if number == 1 else [GIB + 977 * stage for stage in range(num_stages)]
        measured = None if number == 3 else [GIB - 10_000_000 * stage for stage in range(num_stages)]
        steps = (1000 * number, 1000 * number + 999)
        words, change = (
            ("3 members begin", ""),
            ("machine-17-2, machine-18-1 lost", "lost"),
            ("a-1 joined", "joined"),
        )[number % 3]
        capacity = [int(1.2 * GIB)] * num_stages
        generations.append(GenerationPeaks(number + 7, steps, words, change, predicted, measured, capacity))
    draw_generations(tmp_path / "x.png", TITLE, generations)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    texts = [text for text, _ in visible_texts(figures[0])]
    assert len([text for text in texts if text.startswith(("generation ", *"0123456789")) and "\n" in text]) == (
        count if count <= 8 else 0
    )
    assert ("a device lost" in texts) == (count > 1)
    bars = [patch for patch in figures[0].axes[0].patches if isinstance(patch, Rectangle) and patch.get_height() > 0.5]
    heights = sorted(bar.get_height() for bar in bars if bar.get_height() != 1)  # not the shading of every second one
    peaks = [peak for row in generations for peak in (*(row.predicted or ()), *(row.measured or ()))]
    wanted = [peak / GIB for peak in peaks if peak != GIB]
    assert heights == pytest.approx(sorted(wanted))


def test_a_capacity_far_above_is_not_drawn() -> None:
    assert shows_capacity([16 * GIB], [7 * GIB])
    assert not shows_capacity([80 * GIB], [7 * GIB])
    assert not shows_capacity(None, [7 * GIB])
