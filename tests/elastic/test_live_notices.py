"""The ladder of notices on real members: a hint copies ahead, a deadline that is too short has a checkpoint written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.elastic.live import Cradle, Live, Outcome, Truth, check, config_of, describe
from tests.elastic.scenarios import Scenario, ended
from tests.rig.faults import Fault


def hinted_then_noticed(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Send a hint: the layers of m1 are copied ahead and kept current, no member leaves; then the notice, for which all
    is prepared.
    """
    points = [Fault("m0", "compute", "wait", step, f"step {step}") for step in (3, 8, 9)]
    sent = [Fault("m1", "shadow sent", "wait", count, f"sent {count}") for count in (1, 2, 3, 4)]
    live = Live(cradle, config_of(folder, 4, elastic={"redundancy": 0}), faults=[*points, *sent])
    live.when("step 3")
    live.tell("hint", "m1", deadline=None, source="test")
    live.until(lambda: live.heard("hint", "m1"), "the hint")
    live.go("step 3")
    for count in (1, 2, 3, 4):
        live.go(f"sent {count}")
    live.when("step 8")
    copied = sorted(path.name for path in (folder / "faults").glob("sent *.here"))
    assert copied, "nothing was copied on the hint"
    assert live.generation().number == 1, "somebody left on a hint"
    live.leave("m1")
    live.until(lambda: live.heard("notice", "m1"), "the notice")
    live.go("step 8")
    live.go("step 9")
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    assert sorted(path.name for path in (folder / "faults").glob("sent *.here")) == copied, "copied twice"
    (morph,) = (event for event in outcome.events if event["kind"] == "morph")
    outcome.notes["morph"] = morph
    return outcome


def deadline_that_cannot_be_met(redundancy: int, seconds: float) -> Scenario:
    """Return the scenario in which m1 has to leave within `seconds` and is killed before the others have its layers."""

    def scenario(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
        faults = [Fault("m0", "compute", "wait", 5, "five"), Fault("m1", "serve")]
        live = Live(cradle, config_of(folder, 3, elastic={"redundancy": redundancy}), faults=faults)
        live.when("five")
        live.tell("notice", "m1", urgent=True, deadline=time.time() + seconds, source="test")
        live.until(lambda: live.heard("notice", "m1"), "the notice")
        live.go("five")
        outcome = live.finish()
        check(outcome, truth)
        assert ended(outcome, "m1"), describe(outcome)
        outcome.notes["saved"] = [event["step"] for event in outcome.events if event["kind"] == "checkpoint"]
        outcome.notes["again"] = len(outcome.rows) - len(outcome.accepted())
        return outcome

    return scenario


def test_a_hint_copies_ahead_and_moves_nobody(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    assert hinted_then_noticed(cradle, truth, tmp_path).notes["morph"]["moved_bytes"] == 0


@pytest.mark.parametrize(
    ("redundancy", "seconds", "saved", "again"),
    [
        pytest.param(0, 0.5, [5, 12], 0, id="no time, no copies"),
        pytest.param(0, 60.0, [12], 5, id="time enough, and yet it is lost"),
        pytest.param(1, 0.5, [12], 0, id="no time, others have copies"),
    ],
)
def test_what_only_a_leaving_member_holds_is_on_disk_where_its_time_is_too_short(
    cradle: Cradle, truth: Truth, tmp_path: Path, redundancy: int, seconds: float, saved: list[int], again: int
) -> None:
    outcome = deadline_that_cannot_be_met(redundancy, seconds)(cradle, truth, tmp_path)
    assert outcome is not None
    assert outcome.notes == {"saved": saved, "again": again}, describe(outcome)
