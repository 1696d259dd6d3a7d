"""Real members whose layers are compiled: a crash and a morph change no bit of what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.elastic.backend import nudged
from tests.elastic.live import Cradle, Live, check, config_of, describe, truth_of
from varuna_capslog.rig.faults import Fault

COMPILED: dict[str, Any] = {"train": {"compile": nudged.__name__}, "data": {"even": [4, 6]}}
"""Of one size, since every process compiles every layer for each."""
STEPS = 10


def test_layers_that_move_are_compiled_where_they_come_to(cradle: Cradle, tmp_path: Path) -> None:
    """One is killed in step 3, so that the other has layers that it had not compiled; a newcomer takes some at step
    5.
    """
    alone = truth_of(tmp_path / "alone", STEPS, **COMPILED)
    faults = [Fault("m1", "action 3", "kill", 3), Fault("m0", "compute", "wait", 5, "five")]
    live = Live(cradle, config_of(tmp_path / "run", 2, steps=STEPS, **COMPILED), faults=faults)
    live.when("five")
    live.until_asked(live.join())
    live.go("five")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": -9, "m2": 0}, describe(outcome)
    assert outcome.kinds().count("morph") == 2, describe(outcome)
    check(outcome, alone, STEPS)
