"""The peak against programs whose peak can be counted by hand, and the bytes that a stage's meter counts."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor

from varuna_capslog.engine.probe import CPU_SOURCE, PeakProbe, StageMeter, held_inputs, storage_bytes, storages_of

CPU = torch.device("cpu")
MIB = 1 << 20
SLACK = 4096  # scalars and the like


def block(mebibytes: int) -> Tensor:
    return torch.empty(mebibytes * MIB // 4)


def test_known_tensors_are_counted_to_the_byte() -> None:
    with PeakProbe(CPU) as probe:
        first = block(3)
        del first
        second, third = block(1), block(1)
    assert probe.peak_bytes == 3 * MIB
    assert probe.peak_source == CPU_SOURCE == "cpu allocator events"
    del second, third


def test_held_storages_count_once_and_other_old_memory_not_at_all() -> None:
    held, unknown = block(5), block(7)
    with PeakProbe(CPU, [held, held[10:], held.view(2, -1)]) as probe:
        new = block(2)
    assert probe.peak_bytes == 7 * MIB
    del new, unknown


def test_an_autograd_step_has_the_peak_counted_by_hand() -> None:
    x = block(4).fill_(0.5).requires_grad_()
    with PeakProbe(CPU, [x]) as probe:
        y = x.exp()  # x, y: 8 MiB; exp saves y
        z = y * 2  # x, y, z: 12 MiB; nothing is saved
        total = z.sum()
        del z
        # backward of exp: x, y, the gradient of y (expanded times 2) and the gradient of x: 16 MiB
        total.backward()
    assert 16 * MIB <= probe.peak_bytes <= 16 * MIB + SLACK
    del y


def test_releases_of_memory_from_before_the_block_do_not_corrupt_the_peak() -> None:
    with PeakProbe(CPU):
        tracked, unknown = block(4), block(8)  # the allocator knows their sizes: it reports their release
    before = block(16)  # here it does not
    with PeakProbe(CPU, [tracked]) as probe:
        del unknown, before
        first = block(1)  # tracked, first: 5 MiB
        del tracked
        second = block(2)  # first, second: 3 MiB
    assert probe.peak_bytes == 5 * MIB
    del first, second


def test_another_python_threads_memory_is_left_out_as_a_whole() -> None:
    made: list[Tensor] = []
    with PeakProbe(CPU) as probe:
        thread = threading.Thread(target=lambda: made.append(block(8)))
        thread.start()
        thread.join()
        first = block(2)
        made.clear()  # its release here must not be subtracted from the count
        second = block(2)
    assert probe.peak_bytes == 4 * MIB
    del first, second


def test_threads_of_one_operation_are_seen() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.rand(1024, 1024, requires_grad=True)
        with PeakProbe(CPU, [x]) as probe:
            (x @ x).relu().sum().backward()
    finally:
        torch.set_num_threads(threads)
    # x, the gradient of x @ x, and the contribution of each of the two factors to the gradient of x
    assert 16 * MIB <= probe.peak_bytes <= 16 * MIB + SLACK


def test_the_peak_is_there_after_an_exception_too() -> None:
    probe = PeakProbe(CPU)
    with pytest.raises(ZeroDivisionError), probe:
        block(3 // (block(3).numel() - 3 * MIB // 4))
    assert probe.peak_bytes == 3 * MIB


def test_probes_can_follow_each_other() -> None:
    peaks = []
    for size in (1, 2, 3):
        with PeakProbe(CPU) as probe:
            block(size)
        peaks.append(probe.peak_bytes)
    assert peaks == [MIB, 2 * MIB, 3 * MIB]


def test_storage_bytes_counts_views_once() -> None:
    x = block(2)
    assert storage_bytes([x, x[1:], x.view(2, -1), block(1)]) == 3 * MIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_peaks_come_from_the_allocator() -> None:
    device = torch.device("cuda", 0)
    with PeakProbe(device) as probe:
        x = torch.empty(8 * MIB // 4, device=device)
    assert probe.peak_bytes >= 8 * MIB
    assert probe.peak_source == "cuda allocator"
    del x


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
    with contextlib.suppress(StopIteration), meter.saving(storages_of([weight.detach()]), lambda: [x]):
        kept = (x @ weight).exp()  # saves x, weight and its own result
        raise StopIteration
    assert meter.saved_bytes == x.nbytes + kept.nbytes
    with meter.saving([], lambda: None):  # leaves nothing behind
        (x @ weight).exp()
    assert meter.saved_bytes == x.nbytes + kept.nbytes


def test_what_a_forward_frees_again_is_not_saved() -> None:
    """It counted, and once with another storage that came to its place: an estimate had other bytes each time."""
    meter, x = StageMeter(CPU, list), torch.randn(1000, requires_grad=True)
    with meter.saving([], tuple):
        doubled = x * 2
        kept = doubled.square()  # saves what it squares
        for size in (1000, 500, 250):
            (x[:size] * 2).square()
            x[:size].exp()  # saves its own result, which nothing uses
    assert kept.requires_grad
    assert meter.saved_bytes == doubled.nbytes


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
