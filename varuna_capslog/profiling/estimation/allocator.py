"""A model of torch's CUDA caching allocator: the bytes that it reserves for a sequence of allocations.

Plain Python on numbers: no device, no torch. Rules and constants are those of torch 2.15 (the constants in its
installed header c10/core/AllocatorConfig.h, the rules of c10/cuda/CUDACachingAllocator.cpp), with default settings and
one stream:

- sizes are rounded up to 512 bytes; blocks up to 1 MiB come from the small pool, larger blocks from the large pool;
- the pool's smallest free block that is large enough is taken, of blocks of equal size the one at the lowest address;
- if no block is large enough, the device gives a new segment: 2 MiB for the small pool; for the large pool 20 MiB if
  the size is below 10 MiB, else the size rounded up to 2 MiB;
- a block is split if more than 1 MiB (small pool: 512 bytes or more) would be left; else it is used whole, and its
  surplus counts as allocated;
- a freed block joins free neighbours of its segment. Only where a new segment does not fit on the device, all idle
  segments are returned to it.

So the bytes reserved on a device with enough memory are an upper bound of a run's need; `least_capacity` computes the
need itself.

With `expandable_segments:True` (PYTORCH_ALLOC_CONF) each pool is one range of addresses that grows at its end, in pages
of 2 MiB in the small pool and 20 MiB in the large pool; a free block at the end counts towards the request. The rest of
a block is split off if it has 512 bytes or more. The free block at the end is taken only if no other is large enough.
Freed pages stay mapped, since no device runs out of memory here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError, DoesNotFit

__all__ = [
    "LARGE_SEGMENT",
    "AllocatorPeaks",
    "CachingAllocator",
    "Event",
    "least_capacity",
    "replay",
    "round_up",
    "rounded",
]

Event = tuple[int, int]
"""(key, bytes above 0) for an allocation, (key, 0) for its release, after which the key may be used again."""

_MIB = 1 << 20
_SMALLEST_BLOCK = 512
_SMALL_REQUEST = 1 * _MIB
_SMALL_SEGMENT = 2 * _MIB
LARGE_SEGMENT = 20 * _MIB
"""Bytes of a segment for blocks of 1 to 10 MiB, the last of which may be nearly empty."""
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_STEP = 2 * _MIB
_SMALL_ADDRESSES = 1 << 50
"""Address at which the small pool's expandable segment begins, far above the large pool's segment."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """Peaks of allocated and reserved bytes, and the number of segments.

    `allocated_bytes` is the value of `torch.cuda.max_memory_allocated`: whole blocks, not requests. `remainder_bytes`
    is the part not requested: the surplus of blocks beyond their requests, rounded up to 512 bytes.
    """

    allocated_bytes: int
    reserved_bytes: int
    segments: int
    remainder_bytes: int


@dataclass(eq=False)
class _Block:
    """Part of a segment, and its neighbours in the segment."""

    address: int
    size: int
    small: bool
    remainder: int = 0
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Allocator, empty at first. expandable: follow the rules of expandable segments. capacity: most bytes of all
    segments, ignored with expandable segments; None: no limit.

    Attributes:
        allocated_bytes, reserved_bytes, segments: current values.
    """

    def __init__(self, expandable: bool = False, capacity: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.segments = 0
        self._remainder = 0
        self._peak_allocated = self._peak_remainder = 0
        self._given: dict[int, _Block] = {}
        # pool (small or not) -> (size, address) of its free blocks, sorted; and address -> free block
        self._order: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free_at: dict[int, _Block] = {}
        self._expandable, self._capacity = expandable, capacity
        self._next_address = 0
        # pool -> the block at the end of its expandable segment
        self._last: dict[bool, _Block] = {}

    @property
    def peaks(self) -> AllocatorPeaks:
        """Peaks so far; the reserved bytes are the current ones, which without a capacity are the peak."""
        return AllocatorPeaks(self._peak_allocated, self.reserved_bytes, self.segments, self._peak_remainder)

    def allocate(self, key: int, num_bytes: int) -> None:
        """Allocate `num_bytes`, above 0, under a free key. Raises CapslogError for a key in use or another size, and
        DoesNotFit where no segment of the capacity has room.
        """
        if key in self._given:
            raise CapslogError(f"key {key} is allocated twice; release it in between")
        if num_bytes <= 0:
            raise CapslogError(f"{num_bytes} bytes asked for under key {key}; an allocation must be larger than 0")
        size = rounded(num_bytes)
        small = size <= _SMALL_REQUEST
        order = self._order[small]
        place = bisect_left(order, (size, 0))
        if place + 1 < len(order) and self._free_at[order[place][1]] is self._last.get(small):
            place += 1
        if place < len(order):
            block = self._free_at.pop(order.pop(place)[1])
        else:
            block = (self._grown if self._expandable else self._new_segment)(size, small)
        remaining = block.size - size
        if remaining >= _SMALLEST_BLOCK if small or self._expandable else remaining > _SMALL_REQUEST:
            remainder = _Block(block.address + size, remaining, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.size, block.after = size, remainder
            if self._last.get(small) is block:
                self._last[small] = remainder
            self._offer(remainder)
        self._given[key] = block
        block.remainder = block.size - size
        self._remainder += block.remainder
        self.allocated_bytes += block.size
        if self.allocated_bytes > self._peak_allocated:
            self._peak_allocated, self._peak_remainder = self.allocated_bytes, self._remainder

    def release(self, key: int) -> None:
        """Free a block. Raises CapslogError where the key holds nothing."""
        block = self._given.pop(key, None)
        if block is None:
            raise CapslogError(f"key {key} is released, but nothing is allocated under it")
        self.allocated_bytes -= block.size
        self._remainder -= block.remainder
        before, after = block.before, block.after
        if before is not None and before.address in self._free_at:
            self._withdraw(before)
            block = self._joined(before, block)
        if after is not None and after.address in self._free_at:
            self._withdraw(after)
            block = self._joined(block, after)
        self._offer(block)

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            length = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            length = LARGE_SEGMENT
        else:
            length = round_up(size, _SEGMENT_STEP)
        if self._capacity is not None and self.reserved_bytes + length > self._capacity:
            self._return_idle_segments()
            if self.reserved_bytes + length > self._capacity:
                raise DoesNotFit(
                    f"a segment of {length} bytes does not fit beside {self.reserved_bytes} of {self._capacity}; give "
                    "the device more memory"
                )
        # segments have consecutive addresses, but blocks never join across their borders
        block = _Block(self._next_address, length, small)
        self._next_address += length
        self.reserved_bytes += length
        self.segments += 1
        return block

    def _return_idle_segments(self) -> None:
        for block in list(self._free_at.values()):
            if block.before is None and block.after is None:
                self._withdraw(block)
                self.reserved_bytes -= block.size
                self.segments -= 1

    def _grown(self, size: int, small: bool) -> _Block:
        """Return the block at the end of a pool's expandable segment, mapped until it is large enough."""
        page, last = _SMALL_SEGMENT if small else LARGE_SEGMENT, self._last.get(small)
        free = last is not None and last.address in self._free_at
        more = round_up(size - last.size if last is not None and free else size, page)
        self.reserved_bytes += more
        if last is not None and free:
            self._withdraw(last)
            last.size += more
            return last
        start = (_SMALL_ADDRESSES if small else 0) if last is None else last.address + last.size
        block = self._last[small] = _Block(start, more, small, before=last)
        if last is None:
            self.segments += 1
        else:
            last.after = block
        return block

    def _joined(self, before: _Block, after: _Block) -> _Block:
        """Return two neighbours joined to one block."""
        before.size += after.size
        before.after = after.after
        if before.after is not None:
            before.after.before = before
        if self._last.get(before.small) is after:
            self._last[before.small] = before
        return before

    def _offer(self, block: _Block) -> None:
        insort(self._order[block.small], (block.size, block.address))
        self._free_at[block.address] = block

    def _withdraw(self, block: _Block) -> None:
        order = self._order[block.small]
        del order[bisect_left(order, (block.size, block.address))]
        del self._free_at[block.address]


def replay(events: Iterable[Event], expandable: bool = False) -> AllocatorPeaks:
    """Return the peaks of an allocator that begins empty and executes `events` in order. `expandable`: see
    `CachingAllocator`. Raises CapslogError with the number of an event that cannot follow the earlier events.
    """
    allocator = CachingAllocator(expandable)
    _execute(allocator, events)
    return allocator.peaks


def _execute(allocator: CachingAllocator, events: Iterable[Event]) -> None:
    for number, (key, num_bytes) in enumerate(events):
        try:
            if num_bytes == 0:
                allocator.release(key)
            else:
                allocator.allocate(key, num_bytes)
        except DoesNotFit:
            raise
        except CapslogError as error:
            raise CapslogError(f"event {number}: {error}") from None


def least_capacity(runs: Sequence[Sequence[Event]], floor: int = 0) -> int:
    """Return the fewest bytes, at least `floor` and up to 1 % too many, of a device on which an allocator, empty at
    first, can execute each of the runs. Raises CapslogError as `replay`.
    """
    if floor and _fit_in(runs, floor):
        return floor
    peaks = [replay(run) for run in runs]
    high = max((peak.reserved_bytes for peak in peaks), default=0)
    low = max([floor, *(peak.allocated_bytes - 1 for peak in peaks)])  # too few bytes
    while high - low > low // 100 + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fit_in(runs, middle) else (middle, high)
    return high


def _fit_in(runs: Sequence[Sequence[Event]], capacity: int) -> bool:
    try:
        for run in runs:
            _execute(CachingAllocator(capacity=capacity), run)
    except DoesNotFit:
        return False
    return True


def rounded(num_bytes: int) -> int:
    """Return the bytes of the block for a request: the next multiple of 512."""
    return round_up(num_bytes, _SMALLEST_BLOCK)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step
