"""Pictures of memory for small and large runs: no label overlaps another, and bars show the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.reports.legible import TITLE, assert_legible, assert_titled
from tests.sweeps import some
from varuna_capslog.profiles.record import LayerProfile
from varuna_capslog.reports.memory import (
    GenerationPeaks,
    draw_layers,
    plot_generations,
    plot_stage_peaks,
    shows_capacity,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("layers", "cuts"),
    some(
        [
            (1, [0]),
            (4, [0]),
            (4, [0, 1, 2, 3]),
            (24, [0, 1, 2, 3, 4, 5, 6, 20]),
            (100, [0, 50]),  # the most of which all are named
            (130, [0, 60]),
            (48, [0, 2, 4, 7, 11, 17, 24, 34]),
        ],
        6,
    ),
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


@pytest.mark.parametrize("stages", [1, 40])
@pytest.mark.parametrize("size", [3_000, 5 * 2**20, 700 * GIB])
def test_stage_peaks(stages: int, size: int) -> None:
    planned = [size + size * stage // 20 for stage in range(stages)]
    measured = [peak + peak // 50 for peak in planned]
    drawn = plot_stage_peaks(planned, measured, [measured[0] + size // 40] * stages)
    unit = {3_000: "KiB", 5 * 2**20: "MiB", 700 * GIB: "GiB"}[size]
    assert drawn["layout"]["yaxis"]["title"]["text"] == f"peak memory [{unit}]"
    divisor = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[unit]
    bars = {trace["name"]: trace["y"] for trace in drawn["data"]}
    assert bars["planned"] == pytest.approx([peak / divisor for peak in planned])
    assert bars["measured"] == pytest.approx([peak / divisor for peak in measured])
    assert len(bars["capacity"]) == stages


def test_generations() -> None:
    rows: list[tuple[int, str, list[int] | None, list[int] | None]] = [
        (7, "", [2 * GIB, GIB], [2 * GIB, GIB]), (8, "lost", None, [3 * GIB]), (9, "joined", [GIB, GIB], None),
    ]  # fmt: skip
    generations = [
        GenerationPeaks(number, (10 * number, 10 * number + 9), "why", change, planned, measured, None)
        for number, change, planned, measured in rows
    ]
    drawn = plot_generations(generations)
    assert {trace["name"]: trace["y"] for trace in drawn["data"]} == {
        "planned": [2, 1, None, 1, 1], "measured": [2, 1, 3, None, None],
    }  # fmt: skip
    outer, inner = drawn["data"][0]["x"]
    assert outer[1:4] == [
        "7<br>steps 70\N{EN DASH}79",
        "8: lost<br>steps 80\N{EN DASH}89",
        "9: joined<br>steps 90\N{EN DASH}99",
    ]
    assert inner == ["stage 0", "stage 1", "stage 0", "stage 0", "stage 1"]


def test_a_capacity_far_above_is_not_drawn() -> None:
    assert shows_capacity([16 * GIB], [7 * GIB])
    assert not shows_capacity([80 * GIB], [7 * GIB])
    assert not shows_capacity(None, [7 * GIB])
