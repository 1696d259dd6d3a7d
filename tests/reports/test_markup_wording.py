"""Numbers in readable form, and text that stays text."""

from __future__ import annotations

import json

import pytest

from varuna_capslog.reports import markup, plots
from varuna_capslog.reports.markup import Box, duration, moment, percent, plain, plural, significant
from varuna_capslog.reports.plots import Curve, shorten
from varuna_capslog.reports.style import byte_unit, second_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\N{EN DASH}"),
        (0.0, "0 µs"),
        (2.5e-5, "25.0 µs"),
        (0.0123, "12.3 ms"),
        (4.567, "4.57 s"),
        (200.2, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.05, "0.05"), (0.4712, "0.471"), (14.0, "14.0"), (1234.5, "1234"), (2e7, "2.00e+07")],
)
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text


def test_words() -> None:
    assert plural(1, "step") == "1 step"
    assert plural(1200, "step") == "1,200 steps"
    assert plural(2, "microbatch", "es") == "2 microbatches"
    assert percent(-0.048) == "-4.8 %"
    assert moment(0) == "1970-01-01 00:00:00"
    assert [moment(seconds) for seconds in (-1e12, 1e15, 1e308)] == ["\N{EN DASH}"] * 3
    assert plain({"shape": [1, 3], "lr": 0.5, "name": None}) == "shape [1, 3], lr 0.5, name \N{EN DASH}"


def test_units() -> None:
    assert byte_unit([1023]) == (1, "B")
    assert byte_unit([5, -3 * 2**30]) == (2**30, "GiB")
    assert second_unit(0.5) == (1e-3, "ms")
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("abc", 3) == "abc"


def test_text_from_a_run_is_never_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    made_of_it = [
        markup.note(evil),
        markup.code(evil),
        markup.join("a", evil),
        markup.table("t", [evil], [[evil]]),
        markup.facts("f", {evil: evil}),
        markup.figure(plots.curves([Curve(evil, [1], [2], "red")], "x", "y"), evil, evil),
        markup.gallery([markup.picture("", 1, 1, evil, [Box((0, 0, 1, 1), evil, 0.5, "red")])]),
        markup.folded(evil, []),
        markup.described(evil, evil),
        markup.page(evil, evil, []),
    ]
    for made in made_of_it:
        assert "<img src=x" not in made
        assert "&lt;img" in made
    text = markup.script_json({"</script><!--": "<b>&"})
    assert not set("<>&") & set(text), "nothing in it ends the script or begins a comment"
    assert json.loads(text) == {"</script><!--": "<b>&"}
    assert plots.label(evil, 99) == '&lt;img src=x onerror="alert(1)"&gt;', "plotly takes names for a kind of HTML"
    assert markup.join(markup.code("x"), "<") == "<code>x</code>&lt;"
