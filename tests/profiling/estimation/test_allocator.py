"""Sequences worked by hand from the allocator's rules, and rules that hold for every sequence, checked against a plain
memory map that is searched byte by byte instead of kept in lists."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiling.estimation.allocator import AllocatorPeaks, CachingAllocator, Event, replay, rounded

KIB, MIB = 1 << 10, 1 << 20


def sizes(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # from 10 MiB on a segment of its own, rounded up to 2 MiB; a rest of up to 1 MiB stays with the block
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_one_request(asked: int, allocated: int, reserved: int) -> None:
    remainder = allocated - rounded(asked)
    assert replay([(0, asked)]) == AllocatorPeaks(allocated, reserved, 1, remainder)


def test_small_requests_share_a_segment_and_large_ones_another() -> None:
    events = [(key, 512 * KIB) for key in range(4)] + [(10, 6 * MIB), (11, 6 * MIB), (12, 6 * MIB)]
    assert replay(events) == AllocatorPeaks(20 * MIB, 22 * MIB, 2, 0)
    assert replay([*events, (13, 1)]) == AllocatorPeaks(20 * MIB + 512, 24 * MIB, 3, 0)


def test_fragmentation_is_reserved_but_of_no_use() -> None:
    """Two halves of one segment are free, but not side by side."""
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 6 * MIB)  # 0..6, 6..12, 12..18 and 2 MiB left of a 20 MiB segment
    allocator.release(0)
    allocator.release(2)  # joins the rest behind it: 6 and 8 MiB are free
    assert sizes(allocator) == (6 * MIB, 20 * MIB)
    allocator.allocate(3, 9 * MIB)
    assert sizes(allocator) == (15 * MIB, 40 * MIB)
    assert allocator.peaks == AllocatorPeaks(18 * MIB, 40 * MIB, 2, 0)


def test_neighbours_join_on_both_sides() -> None:
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 6 * MIB)
    for key in (0, 2, 1):
        allocator.release(key)
    allocator.allocate(3, 10 * MIB)
    allocator.allocate(4, 10 * MIB)
    assert sizes(allocator) == (20 * MIB, 20 * MIB)


def test_segments_do_not_join() -> None:
    events = [(0, 10 * MIB), (1, 10 * MIB), (0, 0), (1, 0), (2, 20 * MIB)]
    assert replay(events) == AllocatorPeaks(20 * MIB, 40 * MIB, 3, 0)


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Not the first: the 12 MiB request would otherwise split the 20 MiB segment and the next would find none."""
    events = [(0, 20 * MIB), (1, 12 * MIB), (0, 0), (1, 0), (2, 12 * MIB), (3, 20 * MIB)]
    assert replay(events) == AllocatorPeaks(32 * MIB, 32 * MIB, 2, 0)


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 6 * MIB)
    allocator.release(2)  # 8 MiB free behind
    allocator.allocate(2, 8 * MIB)
    allocator.release(2)
    allocator.release(0)  # 6 MiB free in front
    allocator.allocate(4, 5 * MIB)  # takes the 6 MiB whole: 1 MiB is not split off
    assert allocator.allocated_bytes == 12 * MIB
    allocator.release(4)
    allocator.release(1)  # everything is one block again
    allocator.allocate(5, 12 * MIB)
    assert sizes(allocator) == (12 * MIB, 20 * MIB)
    allocator.allocate(6, 8 * MIB)
    assert sizes(allocator) == (20 * MIB, 20 * MIB)


def test_a_large_rest_of_up_to_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 19 * MIB)
    assert sizes(allocator) == (20 * MIB, 20 * MIB)
    allocator.release(0)
    assert sizes(allocator) == (0, 20 * MIB)
    allocator.allocate(0, 19 * MIB - 512)
    assert sizes(allocator) == (19 * MIB - 512, 20 * MIB)
    assert allocator.peaks.remainder_bytes == MIB  # of the larger block


def test_pools_do_not_lend_to_each_other() -> None:
    events = [(0, 20 * MIB), (0, 0), (1, 1 * MIB)]
    assert replay(events) == AllocatorPeaks(20 * MIB, 22 * MIB, 2, 0)


def test_a_second_size_can_need_new_segments_though_enough_is_free() -> None:
    """What `headroom` is for: the same work at another size finds nothing that fits."""
    small = [(key, 12 * MIB) for key in range(4)] + [(key, 0) for key in range(4)]
    large = [(key, 16 * MIB) for key in range(3)] + [(key, 0) for key in range(3)]
    assert replay(small).reserved_bytes == replay(large).reserved_bytes == 48 * MIB
    assert replay(small + large) == AllocatorPeaks(48 * MIB, 96 * MIB, 7, 0)
    assert replay(large + small).reserved_bytes == 60 * MIB


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(0, 5), (0, 5)], "event 1: key 0 is allocated twice"),
        ([(0, 5), (1, 0)], "event 1: key 1 is released, but nothing"),
        ([(0, 5), (0, 0), (0, 0)], "event 2: key 0 is released, but nothing"),
        ([(0, -5)], "event 0: -5 bytes"),
    ],
)
def test_impossible_events_are_refused(events: list[Event], message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        replay(events)


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Any valid sequence, with sizes around all borders of the rules."""
    around = st.sampled_from([512, 1 * MIB, 2 * MIB, 8 * MIB, 10 * MIB, 18 * MIB, 20 * MIB, 31 * MIB])
    size = st.builds(lambda base, off: max(1, base + off), around, st.integers(-2 * MIB, 2 * MIB))
    events: list[Event] = []
    live: list[int] = []
    for key in range(draw(st.integers(1, 40))):
        while live and draw(st.booleans()):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), 0))
        events.append((key, draw(size)))
        live.append(key)
    return events


@dataclass
class Span:
    start: int
    end: int
    small: bool


class Map:
    """The oracle: per segment a list of taken spans; free blocks are found anew as the gaps between them.

    A gap is one block only because free neighbours always join, which is the rule under test.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.segments: list[Span] = []
        self.taken: dict[int, Span] = {}

    def gaps(self, small: bool) -> list[tuple[int, int]]:
        found = []
        for segment in self.segments:
            if segment.small is small:
                inside = sorted((s.start, s.end) for s in self.taken.values() if segment.start <= s.start < segment.end)
                edges = [segment.start, *(edge for span in inside for edge in span), segment.end]
                found += [(b - a, a) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        return found

    def allocate(self, key: int, asked: int) -> None:
        size = (asked + 511) // 512 * 512
        small = size <= MIB
        gap = min((gap for gap in self.gaps(small) if gap[0] >= size), default=None)
        if self.expandable:
            self.taken[key] = self.taken_by_growing(size, small)
            return
        if gap is None:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            start = self.segments[-1].end if self.segments else 0
            self.segments.append(Span(start, start + length, small))
            gap = (length, start)
        keep = gap[0] - size < (512 if small else MIB + 512)
        self.taken[key] = Span(gap[1], gap[1] + (gap[0] if keep else size), small)

    def taken_by_growing(self, size: int, small: bool) -> Span:
        """The pool's one segment grows by whole pages; what lies free at its end is used last, and used up first."""
        own = next((segment for segment in self.segments if segment.small is small), None)
        if own is None:
            start = 1 << 40 if small else 0
            own = Span(start, start, small)
            self.segments.append(own)
        inner = [gap for gap in self.gaps(small) if gap[0] >= size and gap[0] + gap[1] != own.end]
        at_end = [gap for gap in self.gaps(small) if gap[0] + gap[1] == own.end]
        if inner:
            begin = min(inner)[1]
        else:
            begin = at_end[0][1] if at_end else own.end
            page = 2 * MIB if small else 20 * MIB
            while own.end < begin + size:
                own.end += page
        return Span(begin, begin + size, small)


@pytest.mark.parametrize("expandable", [False, True])
@given(events=programs())
@settings(max_examples=150, deadline=None)
def test_any_sequence_agrees_with_a_map_of_memory(expandable: bool, events: list[Event]) -> None:
    allocator, oracle = CachingAllocator(expandable), Map(expandable)
    asked: dict[int, int] = {}
    most = remainder = 0
    for key, size in events:
        before = allocator.reserved_bytes
        if size:
            could = any(gap[0] >= rounded(size) for gap in oracle.gaps(rounded(size) <= MIB))
            allocator.allocate(key, size)
            oracle.allocate(key, size)
            asked[key] = size
            assert (allocator.reserved_bytes == before) == could  # freed memory is used before new is asked for
        else:
            allocator.release(key)
            del oracle.taken[key], asked[key]
        assert allocator.allocated_bytes == sum(span.end - span.start for span in oracle.taken.values())
        assert allocator.reserved_bytes == sum(span.end - span.start for span in oracle.segments)
        assert sum(asked.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
        if allocator.allocated_bytes > most:
            most = allocator.allocated_bytes
            remainder = most - sum(map(rounded, asked.values()))
    expected = AllocatorPeaks(most, allocator.reserved_bytes, len(oracle.segments), remainder)
    assert replay(events, expandable) == allocator.peaks == expected


def test_an_expandable_segment_grows_by_pages_and_uses_its_end() -> None:
    """By hand: 12 MiB map a page of 20; 8 of them are left, so that 14 more need one page more, and 6 are left."""
    assert replay([(0, 12 * MIB)], True) == AllocatorPeaks(12 * MIB, 20 * MIB, 1, 0)
    assert replay([(0, 12 * MIB), (1, 14 * MIB)], True) == AllocatorPeaks(26 * MIB, 40 * MIB, 1, 0)
    assert replay([(0, 12 * MIB), (1, 14 * MIB)]).reserved_bytes == 26 * MIB
    # what the small sizes leave is one range for the large ones
    small = [(key, 12 * MIB) for key in range(4)] + [(key, 0) for key in range(4)]
    large = [(key, 16 * MIB) for key in range(3)] + [(key, 0) for key in range(3)]
    assert replay(small + large).reserved_bytes == 96 * MIB
    assert replay(small + large, True).reserved_bytes == 60 * MIB


def test_the_end_of_an_expandable_segment_is_kept_for_what_fits_nowhere_else() -> None:
    """16 MiB are free inside and 14 at the end: 13 MiB go inside, though the end fits better."""
    allocator = CachingAllocator(expandable=True)
    for key, size in enumerate((16, 10)):
        allocator.allocate(key, size * MIB)
    allocator.release(0)
    allocator.allocate(2, 13 * MIB)
    allocator.allocate(3, 14 * MIB)
    assert sizes(allocator) == (37 * MIB, 40 * MIB)


@given(programs(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_released_segments_are_whole_again_in_whatever_order(events: list[Event], order: random.Random) -> None:
    allocator, oracle = CachingAllocator(), Map()
    live = set()
    for key, size in events:
        if size:
            allocator.allocate(key, size)
            oracle.allocate(key, size)
            live.add(key)
        else:
            allocator.release(key)
            del oracle.taken[key]
            live.remove(key)
    rest = sorted(live)
    order.shuffle(rest)
    for key in rest:
        allocator.release(key)
    reserved = allocator.reserved_bytes
    large = [segment.end - segment.start for segment in oracle.segments if not segment.small]
    for key, size in enumerate(sorted(large, reverse=True)):
        allocator.allocate(key, size)  # a whole segment each, where one cracked would be too small
    assert sizes(allocator) == (sum(large), reserved)
