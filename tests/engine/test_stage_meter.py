"""The stage meter by itself: what it counts, and that a forward which ends by an exception counts as well."""

from __future__ import annotations

import contextlib

import pytest
import torch

from varuna_capslog.engine.stage_meter import StageMeter, held_inputs

CPU = torch.device("cpu")


def test_the_peak_is_the_largest_of_all_blocks_with_what_is_there_before() -> None:
    resident, more = torch.ones(1000), torch.ones(500)
    meter = StageMeter(CPU, lambda: [resident])
    assert meter.peak_bytes is None
    for count in (300, 2000, 100):
        with meter.peak([more]):
            work = torch.empty(count)
            del work
    assert meter.peak_bytes == 4 * (1000 + 500 + 2000)
    assert meter.peak_source == "cpu allocator events"
    meter.count_static()
    assert meter.static_bytes == 4000


def test_what_a_forward_saves_counts_without_what_was_there() -> None:
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    meter = StageMeter(CPU, lambda: [weight.detach()])
    with contextlib.suppress(StopIteration), meter.saving([weight.detach()], lambda: [x]):
        kept = (x @ weight).exp()  # saves x, weight and its own result
        raise StopIteration
    assert meter.saved_bytes == x.nbytes + kept.nbytes
    with meter.saving([], lambda: None):  # leaves nothing behind
        (x @ weight).exp()
    assert meter.saved_bytes == x.nbytes + kept.nbytes


def test_every_duration_is_kept_by_name() -> None:
    meter = StageMeter(CPU, list)
    with pytest.raises(ValueError, match="broken"), meter.timing("forward"):
        raise ValueError("broken")
    with meter.timing("backward"):
        pass
    assert [len(meter.seconds[name]) for name in ("forward", "backward")] == [1, 1]
    assert min(meter.seconds["forward"] + meter.seconds["backward"]) >= 0


def test_held_inputs_are_loaded_at_once_and_given_as_copies() -> None:
    loaded = []

    def load(microbatch: int) -> dict[str, torch.Tensor]:
        loaded.append(microbatch)
        return {"x": torch.full((2,), float(microbatch))}

    held = held_inputs(load, [3, 4])
    assert loaded == [3, 4]
    held(3)["x"].zero_()
    assert torch.equal(held(3)["x"], torch.full((2,), 3.0))
    assert loaded == [3, 4]
