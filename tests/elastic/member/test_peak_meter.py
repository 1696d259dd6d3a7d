"""Peaks of elastic runs: those of a run whose members never change, once per generation, and no ballot harmed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.rig.faults import Fault
from varuna_capslog.training.peak_meter import PeakMeter


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


def test_a_ballot_comes_out_as_it_went_in() -> None:
    meter = PeakMeter(torch.device("cpu"))
    meter.begin(1)
    plain = (b"", b'{"finite":true}', b"12", b'{"why":"a|b"}')
    assert meter.opened(plain) == (plain, None)
    assert meter.sealed(b"x") == b"x"  # nothing was measured yet
    meter._steps, meter._bytes = meter._at, 77
    assert meter.opened([meter.sealed(ballot) for ballot in plain]) == (plain, [77] * 4)
    # peaks of some are no peaks of all, but their ballots count
    assert meter.opened([meter.sealed(b""), b'{"finite":true}']) == ((b"", b'{"finite":true}'), None)


@pytest.mark.parametrize(("generation", "step"), [(1, 2), (2, 5), (7, 5)])
def test_which_step_is_measured(generation: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        layers = ()
        optimizer = None

    meter = PeakMeter(torch.device("cpu"))
    monkeypatch.setattr("varuna_capslog.training.peak_meter.resident_tensors", lambda layers, optimizer: [])
    meter.begin(generation)
    measured = []
    for number in range(1, 9):
        with meter.computing(Nothing()) as due:  # type: ignore[arg-type]
            kept = torch.ones(1000)
        if due:
            measured.append(number)
            assert meter._bytes is not None
            assert meter._bytes >= kept.nbytes
        assert (meter.sealed(b"") != b"") == due
        with meter.applying(Nothing()):  # type: ignore[arg-type]
            pass
    assert measured == [step]
