"""Headroom stated beyond a stage's peak: runs of several sizes through the allocator model, and the assumed parts."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.profiling.estimation.allocator import LARGE_SEGMENT, Event, replay
from varuna_capslog.profiling.estimation.headroom import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    LEAST_FACTOR,
    UNSEEN_PART,
    StepTrace,
    context_bytes,
    cublas_bytes,
    fragmentation,
    least_bytes,
    run_of_steps,
    runs_of_sizes,
    state_headroom,
)

MIB = 1 << 20


def step(*sizes_mib: int, weights: int = 30) -> list[Event]:
    """Return weights that stay, then blocks that are allocated in turn and released together; the last one is
    forgotten.
    """
    events = [(0, weights * MIB)]
    events += [(key, size * MIB) for key, size in enumerate(sizes_mib, start=1)]
    return events + [(key, 0) for key in range(1, len(sizes_mib))]


def trace(*sizes_mib: int) -> StepTrace:
    events = step(*sizes_mib)
    return StepTrace(30 * MIB + sum(sizes_mib) * MIB, events)


def reserved_bytes(traces: list[StepTrace], expandable: bool = False) -> int:
    return max(replay(run, expandable).reserved_bytes for run in runs_of_sizes(traces))


def test_steps_follow_one_another_and_weights_stay():
    small, large = step(12, 14), step(16, 20)
    run = run_of_steps([small, large], [0, 1, 0])
    live: dict[int, int] = {}
    held = []
    for key, size in run:
        if size:
            assert key not in live
            live[key] = size
        else:
            del live[key]
        held.append(sum(live.values()) // MIB)
    # the forgotten block is released when the next step begins
    assert held == [30, 42, 56, 44, 30, 46, 66, 50, 30, 42, 56, 44, 30]
    assert replay(run_of_steps([small], [0])).reserved_bytes == replay(small).reserved_bytes


def test_keys_may_come_again_inside_a_step():
    again = [(7, 30 * MIB), (8, 12 * MIB), (8, 0), (8, 14 * MIB), (8, 0)]
    assert [size // MIB for _, size in run_of_steps([again], [0, 0])] == [30, 12, 0, 14, 0, 12, 0, 14, 0]


def test_one_size_over_and_over_reserves_what_it_needs_once():
    assert reserved_bytes([trace(12, 14)]) == least_bytes([trace(12, 14)]) == 56 * MIB
    # 5 MiB blocks share a segment of 20
    assert reserved_bytes([trace(5, 5)]) == least_bytes([trace(5, 5)]) == (30 + 20) * MIB


def test_changing_sizes_reserve_more_than_any_one_of_them_and_give_it_back():
    """Blocks of 12 and 14 MiB are of no use to a step that needs 16 and 20."""
    sizes = [trace(12, 14), trace(10, 18), trace(16, 20)]
    run = run_of_steps([trace.events for trace in sizes], [0, 2])
    # by hand: 12, 14 and 18 are reserved and too small or fully in use, so that 16 and 20 each need a new segment
    assert replay(run).reserved_bytes == (30 + 12 + 14 + 16 + 20) * MIB
    assert reserved_bytes(sizes) == reserved_bytes(sizes) >= replay(run).reserved_bytes
    # by hand: the segment of 18 takes the 16, and for the 20 all that is idle is returned
    assert (30 + 18 + 20) * MIB <= least_bytes(sizes) <= 1.01 * (30 + 18 + 20) * MIB


def test_the_mildest_of_the_largest_stages_decides_but_for_a_floor():
    tight, gappy = [trace(200, 200)], [trace(12, 5, 400, 11)]
    assert fragmentation([tight]) == fragmentation([gappy, tight]) == LEAST_FACTOR
    whole = StepTrace(100 * MIB, [(key, 16 * MIB) for key in range(10)])  # of a peak that is 60 MiB too low
    assert fragmentation([[whole]]) == pytest.approx((160 - 20) / 100)
    assert fragmentation([[whole], tight]) == LEAST_FACTOR


def test_cuda_states_every_part():
    stages = [[trace(12, 14)], [trace(12, 14), trace(16, 20)]]
    stated = state_headroom("cuda", "gloo", stages)
    # bytes by which Hopper's workspaces exceed the 8.125 MiB in the peak, for each of two threads
    cublas = 2 * (32 * MIB - 8519680) + LARGE_SEGMENT
    assert stated["fixed_bytes"] == CONTEXT_BYTES + cublas
    assert stated["fragmentation"] == fragmentation(stages) == LEAST_FACTOR
    # two numbers are the sum and the factor of the parts, and each part names its source
    parts = stated["parts"]
    assert sum(part.get("bytes", 0) for part in parts.values()) == stated["fixed_bytes"]
    assert parts["fragmentation"]["factor"] == stated["fragmentation"]
    assert "up to 2 sizes" in parts["fragmentation"]["known"]
    assert all(part["known"] for part in parts.values())
    assert parts["context"]["known"] == "assumed"
    assert state_headroom("cuda", "nccl", stages)["fixed_bytes"] == CONTEXT_BYTES + cublas + 4 * COMMUNICATOR_BYTES
    for kind in ("a4000", "h200"):  # their peak includes all workspaces
        assert state_headroom("cuda", "gloo", stages, kind)["fixed_bytes"] == context_bytes(kind) + LARGE_SEGMENT
    assert context_bytes("h200") == 771 * MIB > context_bytes("a4000") == CONTEXT_BYTES


def test_expandable_segments_reserve_less():
    """Expected by hand: 12 and 14 MiB, then 16 and 20: the default keeps a segment for each, the other reuses one
    range.
    """
    sizes = [trace(12, 14), trace(10, 18), trace(16, 20)]
    # weights of 30 and steps of 36 MiB: 66, in pages of 20
    assert reserved_bytes(sizes, expandable=True) == 80 * MIB
    assert reserved_bytes(sizes) > 1.3 * 66 * MIB


def test_stages_smaller_than_a_segment_add_no_more_than_one() -> None:
    """A factor of 170 for a model of 12 kB was refused by the profile's own check, and would grow with the peak."""
    tiny = StepTrace(12_288, [(0, 8192), (1, 4096), (1, 0)])
    stated = state_headroom("cuda", "gloo", [[tiny]])
    assert stated["fragmentation"] == LEAST_FACTOR
    assert stated["fixed_bytes"] == CONTEXT_BYTES + cublas_bytes("") + LARGE_SEGMENT
    assert reserved_bytes([tiny]) == 2 * MIB < LARGE_SEGMENT


def test_the_cpu_has_no_segments():
    stated = state_headroom("cpu", "gloo", [[trace(5, 5)]])
    assert (stated["fixed_bytes"], stated["fragmentation"]) == (0, 1 + UNSEEN_PART)
    assert "no segments" in stated["parts"]["basis"]


def test_planners_read_what_is_stated():
    stated = state_headroom("cuda", "gloo", [[trace(5, 5)]])
    profile = Profile((LayerProfile("only", 1),), conditions={"headroom": stated})
    headroom = Headroom.of(profile)
    assert headroom == (CONTEXT_BYTES + cublas_bytes("") + LARGE_SEGMENT, LEAST_FACTOR)
    assert headroom.device(headroom.usable(1 << 30)) <= 1 << 30
    with pytest.raises(CapslogError, match="fixed_byts"):
        Headroom.of(Profile((LayerProfile("only", 1),), conditions={"headroom": {"fixed_byts": 1}}))
