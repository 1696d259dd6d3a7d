"""Peaks of elastic runs: equal to those of a run whose members never change, once per generation."""

from __future__ import annotations

from pathlib import Path

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from tests.rig.faults import Fault
from varuna_capslog.plans.plan import read_plan


def test_every_generation_that_lasts_tells_its_peaks_once(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    live = Live(cradle, config_of(tmp_path, 3), faults=[Fault("m1", "compute", "kill", 5)])
    outcome = live.finish()
    check(outcome, truth)
    told = {row["step"]: row for row in outcome.rows if "peak_bytes" in row}
    # the first generation in its second step, the next, which begins with step 5, in its fifth
    assert sorted(told) == [2, 9], describe(outcome)
    for row in told.values():
        cuts = read_plan(tmp_path / f"plan-{row['generation']}.json").cuts
        assert len(row["peak_bytes"]) == len(cuts)
        assert min(row["peak_bytes"]) > 0
        assert row["peak_source"] == "cpu allocator events"
        assert row["peak_input"].keys() == {"x", "sizes"}
