"""The command that measures ways to compute layers: its candidates, its log, and the config that it writes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_variant_search import random_variants
from tests.start.test_choices_chosen_variants import config_of
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.cli import program
from varuna_capslog.config.reading import Config, dump_config, load_config
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.start import collage_start
from varuna_capslog.start.collage_start import Collaged, MeasuredChoice, _Log, collage, second_level
from varuna_capslog.variants import registry
from varuna_capslog.variants.registry import known_variants

pytestmark = pytest.mark.usefixtures("kept_here")


@pytest.fixture
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and attention alone, so that there are few runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    variants = known_variants()
    monkeypatch.setattr(registry, "_registered", {name: variants[name] for name in ("eager", "sdpa")})


class Whole:
    """Seconds by a rule; counts the choices that it is asked for."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[dict[int, str]] = []

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def seconds(self, choices: Sequence[Mapping[int, str]], rounds: int = 1) -> list[list[float]]:
        self.asked += [dict(choice) for choice in choices]
        return [[2.0 - 0.5 * len(choice)] * rounds for choice in choices]


def test_the_candidates_and_the_config_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(config: Config, workers: int, variants: str) -> Profile:
        profile = random_variants(random.Random(0), 4, [0, 1, 1, 0])
        rows = [
            row if row.variant is None else replace(row, variant=row.variant.replace("v0", "sdpa"))
            for row in profile.observations
        ]
        return replace(profile, observations=tuple(rows))

    monkeypatch.setattr(collage_start, "WholeRuns", Whole)
    monkeypatch.setattr(collage_start, "profile_config", measured)
    path, written = tmp_path / "config.yaml", tmp_path / "chosen.yaml"
    path.write_text(dump_config(config_of(tmp_path, "close", None, source="measured")))
    monkeypatch.setattr("sys.argv", ["capslog", "variants", str(path), "-o", str(written), "--rounds", "2"])
    with pytest.raises(SystemExit) as ended:
        program()
    shown = capsys.readouterr().out
    assert ended.value.code == 0, shown
    assert "sdpa wherever it can" in shown
    assert "level 1" in shown
    assert load_config(written).variants == {"#1": "sdpa", "#2": "sdpa"}
    with pytest.raises(CapslogError, match="leave variants out of the config, and set numerics"):
        collage(config_of(tmp_path, "same"))


def test_nothing_is_measured_twice() -> None:
    timer, first = Whole(), {1: "sdpa"}
    choices = [{1: "sdpa"}, {1: "sdpa", 2: "sdpa"}]
    ratios = _Log(timer, first, "sha256:abc").ratios(choices)  # type: ignore[arg-type]
    assert ratios == [1.0, 1.0 / 1.5]
    assert timer.asked == [first, *choices]
    again = _Log(timer, first, "sha256:abc").ratios([choices[1], {}])  # type: ignore[arg-type]
    assert again == [1.0 / 1.5, 2.0 / 1.5]
    assert timer.asked[3:] == [first, {}]


def test_a_gain_within_two_hundredths_is_none() -> None:
    profile = Profile((LayerProfile("layer", 1),))
    plain = MeasuredChoice("as configured", {}, 1.0, (1.0, 2.0, 1.0))
    for seconds, best in (((0.99, 1.98, 0.5), "as configured"), ((0.97, 1.9, 1.5), "sdpa")):
        collaged = Collaged((plain, MeasuredChoice("sdpa", {0: "sdpa"}, 1.0, seconds)), profile)
        assert collaged.best.name == best


def test_the_second_level_takes_back_what_the_first_gave() -> None:
    """Level 1 gave the variant to every layer; measured whole, it pays in one run of neighbours alone."""
    asked: list[dict[int, str]] = []

    def ratios(choices: Sequence[Mapping[int, str]]) -> list[float]:
        asked.extend(dict(choice) for choice in choices)
        return [1 + 0.1 * len({0, 3} & choice.keys()) - 0.3 * ({1, 2} <= choice.keys()) for choice in choices]

    first, without = dict.fromkeys(range(4), "channels-last") | {5: "sdpa"}, {5: "sdpa"}
    chosen = second_level(ratios, first, without, range(4), "channels-last", seed=0, generations=6)
    assert chosen == {1: "channels-last", 2: "channels-last", 5: "sdpa"}
    assert first in asked
    assert len(asked) == len({str(choice) for choice in asked})
