"""Which step is measured, and that peaks travel with the ballots of a vote without harm to any ballot."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.training.peak_meter import PeakMeter


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
