"""Real members, lost, leaving and joining at chosen points: the results equal the uninterrupted run's to the last bit.

A sample of the scenarios that `benchmarks/morph/faults/` runs in full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import varuna_capslog as capslog
from tests.elastic import scenarios
from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from tests.elastic.scenarios import Scenario
from tests.rig.faults import Fault


@pytest.mark.parametrize("shadows", [True, False], ids=["ahead", "at the boundary"])
def test_a_member_that_leaves_costs_no_step(cradle: Cradle, truth: Truth, tmp_path: Path, shadows: bool) -> None:
    config = config_of(tmp_path, 3, elastic={"shadows": shadows})
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.leave("m0")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert len(outcome.rows) == 12  # no step was made twice
    assert outcome.kinds().count("morph") == 1
    check(outcome, truth)


def test_a_member_that_joins_takes_layers_over(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    live = Live(cradle, config_of(tmp_path, 2), faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.until_asked(live.join())
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert outcome.rows[-1]["world_size"] == 3
    assert len(outcome.rows) == 12
    check(outcome, truth)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenarios.kill_in_a_step(3, 1, "m1", "action 7"), id="in the middle of a step"),
        pytest.param(scenarios.kill_in_a_step(3, 1, "m0", "applying"), id="the writer before it writes"),
        pytest.param(scenarios.kill_in_a_step(2, 2, "m3", "vote"), id="one of two replicas before the vote"),
        pytest.param(scenarios.kill_in_a_step(3, 1, "m2", "voted", protection="async"), id="copies a step behind"),
        pytest.param(scenarios.kill_in_a_change("leave", "m1", "prepared"), id="the leaving one on its way"),
        pytest.param(scenarios.kill_in_a_change("crash", "m0", "gathered"), id="another one during a recovery"),
        pytest.param(scenarios.kill_in_a_change("join", "m3", "adopted"), id="a newcomer that was just let in"),
        pytest.param(scenarios.kill_several_at_once(2, "m1", "m2"), id="two neighbours at once"),
        pytest.param(scenarios.stopped_then_continued, id="one that stands still and wakes up"),
        pytest.param(scenarios.one_leaves_after_the_other, id="a second notice on the way"),
        pytest.param(scenarios.one_leaves_while_all_wait, id="one leaves while all wait"),
        pytest.param(scenarios.one_leaves_before_it_is_let_in, id="one leaves before it is let in"),
        pytest.param(scenarios.everybody_leaves, id="everybody leaves"),
        pytest.param(scenarios.store_lost_at_a_change, id="the store is lost"),
        pytest.param(scenarios.voted_down, id="a step is voted down"),
        pytest.param(scenarios.full_disk_while_persisting, id="the disk is full"),
    ],
)
def test_whatever_happens_the_run_is_the_uninterrupted_one(
    cradle: Cradle, truth: Truth, tmp_path: Path, scenario: Scenario
) -> None:
    assert scenario(cradle, truth, tmp_path) is not None, "the fault was not met"


def test_generations_leave_nothing_behind(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    outcome = scenarios.many_changes(cradle, truth, tmp_path, count=8)
    assert len(outcome.notes["tasks"]) == 5


def test_callbacks_hear_an_elastic_run_and_stop_it(tmp_path: Path, forked_servers: None) -> None:
    rows: list[dict[str, Any]] = []
    saved: list[int] = []

    def on_step(row: dict[str, Any]) -> object:
        rows.append(row)
        return capslog.STOP if row["step"] == 3 else None

    config = config_of(tmp_path, 2, steps=1000, train={"checkpoint_every": 2, "checkpoint_keep": 100})
    done = capslog.train(config, on_step=on_step, on_checkpoint=lambda row: saved.append(row["step"]), show=False)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["world_size"] for row in rows} == {2}
    assert 3 <= len(rows) == len(done.losses) < 100
    assert saved == sorted({*range(2, len(rows) + 1, 2), len(rows)}), "the last step is saved, too"
