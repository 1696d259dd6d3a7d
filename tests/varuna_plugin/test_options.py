"""What a user may configure, and what is refused before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.errors import CapslogError
from varuna_capslog.plan import Plan, Stage, write_plan
from varuna_capslog.varuna_plugin import options


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(options.CUTS_VARIABLE, raising=False)
    options.reset()
    yield
    options.reset()


def test_without_a_word_the_split_is_varunas_own() -> None:
    assert options.current().cuts_for(6, 3) == (0, 2, 4)
    # the rest goes to the last stage
    assert options.current().cuts_for(6, 4) == (0, 1, 2, 3)
    with pytest.raises(CapslogError, match="3 pieces, but 4 stages"):
        options.current().cuts_for(3, 4)


def test_a_list_a_plan_and_a_plan_file_mean_the_same(tmp_path: Path) -> None:
    plan = Plan(num_layers=9, cuts=(0, 3, 7))
    write_plan(tmp_path / "plan.json", plan)
    for cuts in ([0, 3, 7], (0, 3, 7), plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        plugin.configure(cuts=cuts)
        assert options.current().cuts_for(9, 3) == (0, 3, 7)
    plugin.configure()
    assert options.current().cuts is None


def test_a_plan_for_another_model_or_world_is_refused() -> None:
    plugin.configure(cuts=Plan(num_layers=9, cuts=(0, 3, 7)))
    with pytest.raises(CapslogError, match="the plan is for 9 layers, but the model has 8 pieces"):
        options.current().cuts_for(8, 3)
    with pytest.raises(CapslogError, match="make 3 stages, but Varuna was started with 2"):
        options.current().cuts_for(9, 2)


def test_what_varuna_cannot_run_is_refused() -> None:
    twice = Plan(num_layers=2, cuts=(0, 1), placed=(Stage(0, ((0, 1),), (0,)), Stage(0, ((1, 2),), (0,))))
    with pytest.raises(CapslogError, match="several stages on a rank"):
        plugin.configure(cuts=twice)
    recompute = {"1": "recompute"}
    actions = (Stage(0, ((0, 1),), (0,)), Stage(0, ((1, 2),), (1,), memory_actions=recompute))
    with pytest.raises(CapslogError, match="memory actions"):
        plugin.configure(cuts=Plan(num_layers=2, cuts=(0, 1), placed=actions))
    for wrong in ({"cuts": [0, 1.5]}, {"cuts": []}, {"loss": "max"}, {"timeout_seconds": 0}):
        with pytest.raises(CapslogError):
            plugin.configure(**wrong)  # type: ignore[arg-type]


def test_the_environment_speaks_where_the_script_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(options.CUTS_VARIABLE, "0, 4")
    assert options.current().cuts == (0, 4)
    write_plan(tmp_path / "p.json", Plan(num_layers=5, cuts=(0, 2)))
    monkeypatch.setenv(options.CUTS_VARIABLE, str(tmp_path / "p.json"))
    assert (options.current().cuts, options.current().num_pieces) == ((0, 2), 5)
    plugin.configure(cuts=[0, 1])
    assert options.current().cuts == (0, 1)
