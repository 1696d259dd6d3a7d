"""The user's settings, and those that are refused before anything is built."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog.varuna_plugin as plugin
from tests.planning import asking
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile
from varuna_capslog.varuna_plugin import options


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(options.CUTS_VARIABLE, raising=False)
    options.configure()
    yield
    options.configure()


def test_without_a_word_the_split_is_varunas_own() -> None:
    assert options.current().cuts_for(6, 3) == (0, 2, 4)
    # the rest goes to the last stage
    assert options.current().cuts_for(6, 4) == (0, 1, 2, 3)
    with pytest.raises(CapslogError, match="3 pieces, but 4 stages"):
        options.current().cuts_for(3, 4)


def test_a_list_a_plan_and_a_plan_file_mean_the_same(tmp_path: Path) -> None:
    plan = Plan.of_cuts(num_layers=9, cuts=(0, 3, 7))
    write_plan(tmp_path / "plan.json", plan)
    for cuts in ([0, 3, 7], (0, 3, 7), plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        plugin.configure(cuts=cuts)
        assert options.current().cuts_for(9, 3) == (0, 3, 7)
    plugin.configure()
    assert options.current().cuts is None


def test_a_plan_for_another_model_or_world_is_refused() -> None:
    plugin.configure(cuts=Plan.of_cuts(num_layers=9, cuts=(0, 3, 7)))
    with pytest.raises(CapslogError, match="the plan is for 9 layers, but the model has 8 pieces"):
        options.current().cuts_for(8, 3)
    with pytest.raises(CapslogError, match="make 3 stages, but Varuna was started with 2"):
        options.current().cuts_for(9, 2)


def test_what_varuna_cannot_run_is_refused() -> None:
    for wrong in ({"cuts": [0, 1.5]}, {"cuts": []}, {"loss": "max"}, {"timeout_seconds": 0}):
        with pytest.raises(CapslogError):
            plugin.configure(**wrong)  # type: ignore[arg-type]


def test_the_environment_speaks_where_the_script_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(options.CUTS_VARIABLE, "0, 4")
    assert options.current().cuts == (0, 4)
    write_plan(tmp_path / "p.json", Plan.of_cuts(num_layers=5, cuts=(0, 2)))
    monkeypatch.setenv(options.CUTS_VARIABLE, str(tmp_path / "p.json"))
    assert (options.current().cuts, options.current().num_pieces) == ((0, 2), 5)
    plugin.configure(cuts=[0, 1])
    assert options.current().cuts == (0, 1)


# -- searched on the spot


def sized(bytes_per_layer: list[int], microbatch_size: int | None = None) -> Profile:
    """Return a profile whose stages take the sum of their layers' bytes."""
    conditions = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
    rows = [LayerProfile(f"piece {i}", size, size if i else None) for i, size in enumerate(bytes_per_layer)]
    return Profile(tuple(rows), conditions=conditions)


LAYERS = [50, 10, 10, 10, 10, 30, 30]


def test_cuts_are_searched_for_as_many_stages_as_varuna_has(tmp_path: Path) -> None:
    profile = sized(LAYERS)
    write_profile(tmp_path / "profile.json", profile)
    for source in (profile, tmp_path / "profile.json", str(tmp_path / "profile.json")):
        plugin.configure(profile=source)
        for stages in (1, 2, 3, 4):
            cuts = options.current().cuts_for(7, stages)
            cut_lists = [(0, *inner) for inner in itertools.combinations(range(1, 7), stages - 1)]
            best = min(max(sum(LAYERS[a:b]) for a, b in itertools.pairwise((*cut, 7))) for cut in cut_lists)
            assert max(sum(LAYERS[a:b]) for a, b in itertools.pairwise((*cuts, 7))) == best
    # another planner, other cuts: equally many layers
    plugin.configure(profile=profile, planner="varuna")
    assert options.current().cuts_for(7, 3) == asking.plan(profile, 3, planner="varuna").cuts != cuts


def test_what_does_not_fit_is_said_before_anything_is_built() -> None:
    with pytest.raises(DoesNotFit, match=r"stage \d needs 60 B of 55 B"):
        plugin.configure(profile=sized(LAYERS), devices=3, capacity=55)
    plugin.configure(profile=sized(LAYERS), capacity="60B")
    assert options.current().cuts_for(7, 3)
    plugin.configure(profile=sized(LAYERS), capacity=80)
    with pytest.raises(DoesNotFit, match="2 device"):
        options.current().cuts_for(7, 1)
    # a small device takes the small end
    plugin.configure(profile=sized([10, 10, 10, 10]), capacity="10B,30B")
    assert options.current().cuts_for(4, 2) == (0, 1)


def test_a_profile_for_another_model_size_or_world_is_refused() -> None:
    plugin.configure(profile=sized(LAYERS), devices=3)
    with pytest.raises(CapslogError, match="the profile is of 7 layers, but the model has 6 pieces"):
        options.current().cuts_for(6, 3)
    with pytest.raises(CapslogError, match="devices=3, but Varuna was started with 2 stages"):
        options.current().cuts_for(7, 2)
    plugin.configure(profile=sized(LAYERS, microbatch_size=2), capacity=1000)
    search = options.current().search
    assert search is not None
    search.check_microbatch(2)
    with pytest.raises(CapslogError, match="holds for microbatches of 2, not of 4"):
        search.check_microbatch(4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": sized(LAYERS), "cuts": [0, 1]}, "leave one out"),
        ({"devices": 2}, "belong to a profile"),
        ({"profile": sized(LAYERS), "planner": "best"}, "best"),
        ({"profile": sized(LAYERS), "memory": "none"}, "none"),
        ({"profile": "nowhere.json"}, "nowhere.json"),
        ({"profile": sized(LAYERS), "capacity": "much"}, "much"),
        ({"stages_of_interest": []}, "stages_of_interest is empty"),
        ({"stages_of_interest": [-1]}, "stages_of_interest"),
    ],
)
def test_mistakes_in_what_is_searched_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        plugin.configure(**wrong)
