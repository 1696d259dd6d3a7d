"""Real members, lost, leaving and joining at chosen points: the run is the uninterrupted one to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from varuna_capslog.elastic.rig.faults import Fault


@pytest.mark.parametrize("member", ["m0", "m1", "m2"])
def test_a_member_killed_in_the_middle_of_a_step_costs_that_step_only(
    cradle: Cradle, truth: Truth, tmp_path: Path, member: str
) -> None:
    live = Live(cradle, config_of(tmp_path, 3), faults=[Fault(member, "action 7", count=5)])
    outcome = live.finish()
    assert outcome.status[member] == -9
    assert sorted(outcome.status.values()) == [-9, 0, 0], describe(outcome)
    assert outcome.kinds().count("morph") == 1
    check(outcome, truth)


@pytest.mark.parametrize("shadows", [True, False], ids=["ahead", "at the boundary"])
def test_a_member_that_leaves_costs_no_step(cradle: Cradle, truth: Truth, tmp_path: Path, shadows: bool) -> None:
    config = config_of(tmp_path, 3, elastic={"shadows": shadows})
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.leave("m0")
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert len(outcome.rows) == 12  # no step was made twice
    assert outcome.kinds().count("morph") == 1
    check(outcome, truth)


def test_a_member_that_joins_takes_layers_over(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    live = Live(cradle, config_of(tmp_path, 2), faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.join()
    live.until_asked("m2")
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert outcome.rows[-1]["world_size"] == 3
    assert len(outcome.rows) == 12
    check(outcome, truth)
