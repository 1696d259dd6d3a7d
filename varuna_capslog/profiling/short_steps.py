"""Chooses the ranks of a pipeline, and numbers of microbatches, that show the peaks of a whole step.

A rehearsal runs every rank's program on fake tensors; for 32 ranks and 32 microbatches that takes longer than all other
work on a plan. Where messages wait in host memory, the bytes on a rank's device depend only on its program. So a rank's
short step, of a few microbatches, has the peak of the whole step if both have the same moments (`_Moment`), and two
ranks with equal layers and moments have the same peak.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from varuna_capslog.engine.layers import tracking_modules
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import EngineOptions
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.profiling.estimation.allocator import Event, replay, rounded
from varuna_capslog.profiling.stretched_steps import Doing, doing_of
from varuna_capslog.schedules.lower import Instruction, Recv, lower

__all__ = ["Sample", "ShortSteps"]

_SHORT = range(2, 17)
"""Microbatches of a short step: the first makes the gradients, the next add to them. More would save too little."""
_WINDOW = 5
"""Number of preceding instructions in a moment: what an action leaves is freed by the next action at the latest."""

_FORWARD: Doing = ("act", "F")
_ALIKE = 3
"""Least number of forwards with equal moments; their differences show what a rank keeps of every microbatch."""
_KEPT_BLOCK = 512
_MOST_KEPT = 1 << 20
"""Most bytes kept of a microbatch: blocks up to this size have a pool of their own and the request's rounded size."""


class _Moment(NamedTuple):
    """State of a rank at an instruction, equal for equal moments; and the numbers of earlier forwards and backwards."""

    state: object
    doing: Doing
    forwards: int
    backwards: int


@dataclass(frozen=True)
class Sample:
    """Short step of a rank that keeps tensors of every microbatch until the end of the step.

    few, count: microbatches of the short step and of the whole step.
    more: for each instruction, how many more microbatches the whole step has passed at the last equal moment.
    forwards: positions of forwards with equal moments.
    """

    few: int
    count: int
    more: tuple[int, ...]
    forwards: tuple[int, ...]

    def peak_bytes(
        self,
        events: Sequence[Event],
        starts: Sequence[int],
        fewer: Callable[[], tuple[Sequence[Event], Sequence[int]]] | None = None,
    ) -> int | None:
        """Return the peak of the whole step; None where the short step does not show it: the kept bytes are many or
        differ between microbatches, the peak is at an end of the step that depends on the number of microbatches, or
        the engine leaves out gradients that no layer needs.

        events: of the short step. starts: number of events before each instruction. fewer: rehearses the step with one
        microbatch less, to compare the ends of both; None: a peak at the end has no answer.
        """
        if len(starts) != len(self.more):
            return None
        live = list(accumulate(_changes(events), initial=0))
        steps = {live[starts[after]] - live[starts[at]] for at, after in pairwise(self.forwards)}
        kept_bytes = steps.pop()
        if steps or not 0 <= kept_bytes <= _MOST_KEPT:
            return None
        end = starts[-1]  # the last instruction; the sums over kept tensors, and the update, follow
        before = self._with_kept(events[:end], starts, kept_bytes)
        peak = replay(before).allocated_bytes
        at_the_end = [(_OF_END, _SPARE * self.count * max(kept_bytes, _KEPT_BLOCK)), *events[end:]]
        if replay([*before, *at_the_end]).allocated_bytes == peak:
            return peak
        # each kept tensor has a block at least; sums over those of all microbatches must fit into one
        if fewer is None or self.count * _FLOAT64_BYTES * kept_bytes > _KEPT_BLOCK**2:
            return None
        ending = self._whole_ending(events, end, *fewer(), kept_bytes)
        return None if ending is None else replay([*before, *ending]).allocated_bytes

    def _whole_ending(
        self, events: Sequence[Event], end: int, fewer: Sequence[Event], starts: Sequence[int], kept_bytes: int
    ) -> list[Event] | None:
        """Return the events of the whole step from its last instruction on; None where they depend on the number of
        microbatches by more than the release of what each of them keeps. end: number of events before.

        fewer, starts: events of the step with one microbatch less, and their numbers before each instruction.
        """
        blocks, shorter = _blocks_from(events, end), _blocks_from(fewer, starts[-1])
        pairs = enumerate(zip(blocks, shorter, strict=False))
        same = next((place for place, (block, other) in pairs if block != other), len(shorter))
        more = len(blocks) - len(shorter)
        if more < 0 or blocks[:same] + blocks[same + more :] != shorter:
            return None
        sizes = {key: num_bytes for key, num_bytes in events if num_bytes}
        kept = [sizes[key] for key, num_bytes in events[end + same : end + same + more] if not num_bytes]
        if len(kept) < more or sum(map(rounded, kept)) != kept_bytes:
            return None
        if self.count * sum(max(size, _FLOAT64_BYTES) for size in kept) > _KEPT_BLOCK:
            return None
        further = [(_OF_END - place, 0) for place in range(1, self.more[-1] + 1) if kept_bytes]
        return [*events[end : end + same], *further, *events[end + same :]]

    def _with_kept(self, events: Sequence[Event], starts: Sequence[int], kept_bytes: int) -> list[Event]:
        """Return the events with blocks added for the tensors that the whole step's further microbatches keep."""
        filled, blocks = list(events[: starts[0]]), 0
        for start, end, wanted in zip(starts, [*starts[1:], len(events)], self.more, strict=True):
            change = wanted - blocks if kept_bytes else 0
            filled += [(_OF_END - wanted + place, kept_bytes) for place in range(change)]
            filled += [(_OF_END - blocks + place, 0) for place in range(-change)]
            filled += events[start:end]
            blocks += change
        return filled


def _blocks_from(events: Sequence[Event], end: int) -> list[tuple[str, int]]:
    """Return the allocations and releases from event number `end` on, by sizes instead of keys."""
    sizes = {key: rounded(num_bytes) for key, num_bytes in events if num_bytes}
    blocks, numbers = list[tuple[str, int]](), dict[int, int]()
    for key, num_bytes in events[end:]:
        if num_bytes:
            numbers[key] = len(numbers)
            blocks.append(("allocated", rounded(num_bytes)))
        elif key in numbers:
            blocks.append(("released", numbers[key]))
        else:
            blocks.append(("released earlier", sizes[key]))
    return blocks


_FLOAT64_BYTES = 8
"""Least bytes counted for a kept number, since numbers may be summed as float64."""
_OF_END = -(1 << 40)
"""Key below the keys of all events of a step."""
_SPARE = 2
"""Factor on the kept bytes, for the sums over microbatches at the end of the step."""


def _changes(events: Iterable[Event]) -> Iterator[int]:
    sizes: dict[int, int] = {}
    for key, num_bytes in events:
        if num_bytes:
            sizes[key] = rounded(num_bytes)
            yield sizes[key]
        else:
            yield -sizes.pop(key)


class ShortSteps:
    """Short steps of one pipeline of one stage per rank.

    options: of the whole step, which has one accumulation block.
    inputs_wait: True where the inputs or graphs of microbatches in flight wait on the device.
    """

    def __init__(self, chain: Chain, layout: Layout, options: EngineOptions, inputs_wait: bool) -> None:
        self._chain, self._layout, self._options, self._inputs_wait = chain, layout, options, inputs_wait
        self._programs = cache(self._lowered)

    @staticmethod
    def apply_to(layout: Layout, options: EngineOptions) -> bool:
        """True for one pipeline of one stage per rank, without offloading, explicit action lists or direct routes."""
        one_each = [stage.rank for stage in layout.stages] == list(range(len(layout.stages)))
        plain = all(stage.grain == 1 and not stage.offloads for stage in layout.stages)
        listed = options.actions is not None or layout.direct
        return one_each and plain and not listed and options.num_blocks == layout.num_blocks == 1

    def microbatches(self, rank: int) -> int:
        """Return the smallest number of microbatches whose step has all moments of the rank's whole step; the whole
        step's number for a rank that keeps tensors of every microbatch until the end of the step (parts of the loss, or
        running statistics).
        """
        count = self._options.num_microbatches
        if self._collects(rank):
            return count
        wanted = self._moments(rank, count)
        return next((few for few in _SHORT if few < count and self._moments(rank, few) == wanted), count)

    def program(self, rank: int) -> Sequence[Instruction] | None:
        """Return the rank's program with `microbatches(rank)`; None for a rank that keeps tensors of a microbatch until
        the end of the step, or shares parameters with another rank.
        """
        if self._collects(rank) or self.doings(rank) is None:
            return None
        return self._programs(self.microbatches(rank))[rank]

    def doings(self, rank: int) -> object:
        """Return a key: ranks with equal keys and equal layers have equal peaks. None for a rank that shares parameters
        with another rank, since these exchange gradients.
        """
        layers, count = set(self._layout.layers_of(rank)), self._options.num_microbatches
        if any(layers & set(shared.layers) and set(shared.layers) - layers for shared in self._chain.shared):
            return None
        if self._collects(rank):
            return tuple(doing_of(instruction) for instruction in self._programs(count)[rank])
        return self._moments(rank, count)

    def _collects(self, rank: int) -> bool:
        layers = [self._chain.layers[index] for index in self._layout.layers_of(rank)]
        return layers[-1] is self._chain.layers[-1] or any(any(tracking_modules(layer.module)) for layer in layers)

    def _lowered(self, microbatches: int) -> list[list[Instruction]]:
        graph = self._layout.graph(microbatches, self._chain.edges)
        options = self._options
        rows = scheduled(options.schedule, self._layout.stages, graph, options)
        return lower(rows, None, graph).programs

    def sample(self, rank: int) -> Sample | None:
        """Return a short step with all moments of the whole step, for a rank that keeps tensors of every microbatch;
        None for other ranks, and if no step of `_SHORT` has them.
        """
        count = self._options.num_microbatches
        if not self._collects(rank):
            return None
        whole = self._course(rank, count)
        last = {moment.state: moment for moment in whole}
        for few in [few for few in _SHORT if few < count]:
            course = self._course(rank, few)
            alike = Counter(moment.state for moment in course if moment.doing == _FORWARD).most_common(1)
            if {moment.state for moment in course} != last.keys() or alike[0][1] < _ALIKE:
                continue
            forwards = tuple(place for place, moment in enumerate(course) if moment.state == alike[0][0])
            if any(course[after].forwards - course[at].forwards != 1 for at, after in pairwise(forwards)):
                continue
            more = [(last[at.state].forwards - at.forwards, last[at.state].backwards - at.backwards) for at in course]
            if all(forward == backward for forward, backward in more):
                return Sample(few, count, tuple(forward for forward, _ in more), forwards)
        return None

    def _moments(self, rank: int, microbatches: int) -> frozenset[object]:
        return frozenset(moment.state for moment in self._course(rank, microbatches))

    def _course(self, rank: int, microbatches: int) -> list[_Moment]:
        """Return the moments of all instructions in order."""
        moments, recent = [], deque[Doing](maxlen=_WINDOW)
        arrived, forwards, backwards, built = 0, 0, 0, 0
        program = self._programs(microbatches)[rank]
        for position, instruction in enumerate(program):
            doing = doing_of(instruction)
            waiting = forwards - backwards if self._inputs_wait else 0
            follows = doing_of(program[position + 1]) if position + 1 < len(program) else None
            state = tuple(recent), doing, follows, arrived, waiting, built, backwards > 0
            moments.append(_Moment(state, doing, forwards, backwards))
            recent.append(doing)
            kind = doing[1] if doing[0] == "act" else None
            if isinstance(instruction, Recv):
                arrived += 1
            elif kind in ("F", "B"):
                arrived = 0
            if kind == "F":
                forwards += 1
            elif kind == "R":
                built += 1
            elif kind == "B":
                backwards, built = backwards + 1, max(built - 1, 0)
        return moments
