"""A report in a real browser: it holds on a phone, breaks no word, shows no exception's text and asks the network for
nothing. Its last run stands in `benchmarks/pictures/README.md`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.browser import browser_missing, open_browser
from tests.reports.runs import make_profile, write_run
from varuna_capslog.profiles.record import write_profile
from varuna_capslog.reports.page import write_comparison, write_report
from varuna_capslog.reports.run import read_run

EXCEPTION = "Traceback|(Error|Exception): |unknown schedule|<class |object at 0x|NaN|undefined"
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = r"""
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), broken = [];
while (walk.nextNode()) {
  if (walk.currentNode.parentElement.closest("script, style, pre, .main-svg")) continue;
  for (const text of walk.currentNode.data.matchAll(/\S+/g)) {
    if (text[0].length > 30) continue;
    for (const word of text[0].matchAll(/[^-\/\u2013]+/g)) {
      const place = document.createRange(), begin = text.index + word.index;
      place.setStart(walk.currentNode, begin);
      place.setEnd(walk.currentNode, begin + word[0].length);
      if (new Set([...place.getClientRects()].map((part) => Math.round(part.top))).size > 1) broken.push(word[0]);
    }
  }
}
return broken;
"""
"""Words that stand on several lines; a space, a hyphen and a slash end a word. More than 30 characters without a space
may break anywhere."""


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """Write the page of a run with long and hostile names, and its comparison with another run."""
    evil = '</script><!--<img src="https://example.org/x">'
    runs = [tmp_path / name for name in ("run", "another-run-of-the-same-model")]
    for run_dir in runs:
        write_run(run_dir, num_layers=24, stages=4, steps=60, evaluations=3, microbatches=4)
    profile = make_profile(24)
    layers = [dataclasses.replace(layer, name=f"{evil}.{layer.name}") for layer in profile.layers]
    write_profile(runs[0] / "profile.json", dataclasses.replace(profile, layers=tuple(layers), model=evil))
    confusion = {"classes": ["a", evil], "score": 0.5, "overlap": 0.5, "counts": [[3, 1, 0], [0, 2, 4], [5, 0, 0]]}
    curves = {"AP": None, "recall": [0, 0.5, 1], "precision": {"a": [1, 0.5, 0], evil: [1, 1, 0]}}
    (runs[0] / "detection-curves.json").write_text(json.dumps(curves | {"confusion": confusion}))
    return [write_report(runs[0]), write_comparison([read_run(run_dir) for run_dir in runs])]


@pytest.mark.skipif(browser_missing() is not None, reason=str(browser_missing()))
def test_a_report_holds_in_a_browser(pages: list[Path]) -> None:
    with open_browser() as browser:
        for page, width in ((pages[1], 390), (pages[0], 390), (pages[0], 1280)):
            browser.look(width)
            browser.show(page)
            assert browser.run(WIDE) <= 0, f"{page.name} scrolls sideways at {width} px"
            assert browser.run(BROKEN) == []
            assert browser.run(f"return document.body.innerText.match(/{EXCEPTION}/)") is None
            assert browser.run("return document.images.length") == 0, "a name became an element"
            assert browser.run("return performance.getEntriesByType('resource').length") == 0
        assert browser.run("return getComputedStyle(document.body).color") == "rgb(34, 48, 60)"
        browser.look(390, dark=True)
        assert browser.run("return getComputedStyle(document.body).color") == "rgb(223, 229, 234)"
        assert browser.complaints() == []
