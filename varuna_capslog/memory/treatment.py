"""What one call of a stage holds and needs at each of its actions, under the stage's memory intervals.

A stage's layers fall into segments: those that no interval names keep their graph, the others run again or leave the
device. `fold` adds these numbers up over the calls of a rank; nothing here knows positions.

Where a profile knows the tensors of every cut, one that several of a call's segments hold counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.plans.parts import MemoryInterval, pieces_of

__all__ = ["Treatment", "kept_whole", "treated"]


@dataclass(frozen=True)
class Treatment:
    """Bytes of one call of a stage. "Beside" means: beside what was there when the action began.

    forward: of F, beside; its inputs were there. held: what F leaves, without what it hands on.
    shared: the part of the outputs that is among `held`, and of the inputs (`input_kept`).
    away: the part of `held` that O takes off the device; back_at_recompute, back_at_backward: what returns at R or B
        where no L brings it before.
    recompute: of R, beside, after what returns; grown: what R adds to what is held; input_kept_then: as `input_kept`,
        after R.
    backward, first_backward: of B, everything of this call included, the gradients of the outputs as well; the latter
        where it makes the parameters' gradients.
    """

    forward: int
    held: int
    shared: int
    input_kept: int
    away: int
    back_at_recompute: int
    back_at_backward: int
    recompute: int
    grown: int
    input_kept_then: int
    backward: int
    first_backward: int


def kept_whole(ranges: RangeBytes, first: int, end: int) -> Treatment:
    """A call that keeps the graph of the whole stage."""
    if not _wanted(ranges, end):
        return _without_backward(ranges, first, end)
    saved = ranges.saved(first, end)
    kept = _graph_input(ranges, first, end)
    return Treatment(
        forward=max(0, ranges.forward(first, end) - ranges.crossing[first]),
        held=saved,
        shared=ranges.shared(first, end) if end < ranges.num_layers else 0,
        input_kept=kept,
        away=0,
        back_at_recompute=0,
        back_at_backward=0,
        recompute=0,
        grown=0,
        input_kept_then=kept,
        backward=ranges.backward(first, end),
        first_backward=ranges.backward(first, end, makes_gradients=True),
    )


def treated(
    ranges: RangeBytes, first: int, end: int, intervals: Sequence[MemoryInterval], recomputed: bool
) -> Treatment:
    """A call of a stage whose intervals apply.

    recomputed: the list has an R for the call, which runs the last recompute interval again; else B does.
    """
    if not intervals:
        return kept_whole(ranges, first, end)
    if not _wanted(ranges, end):
        return _without_backward(ranges, first, end)
    segments = pieces_of(first, end, intervals)
    overlaps = _overlaps(ranges, segments)
    held = [
        ranges.crossing[one.first] - overlap if one.recomputes else _saved(ranges, one, overlap)
        for one, overlap in zip(segments, overlaps, strict=True)
    ]
    away = [size if one.offloads else 0 for size, one in zip(held, segments, strict=True)]
    if end == ranges.num_layers and away[-1] and not segments[-1].recomputes:
        away[-1] = max(0, away[-1] - ranges.crossing[end])  # what the loss reads stays
    again = max((number for number, one in enumerate(segments) if one.recomputes), default=-1)
    forward = before = 0
    for size, one, overlap in zip(held, segments, overlaps, strict=True):
        work = ranges.bare(one.first, one.end) if one.recomputes else ranges.forward(one.first, one.end)
        forward = max(forward, before + work - overlap)
        before += size
    last = segments[-1]
    shared = 0
    if end < ranges.num_layers and not last.offloads:
        shared = ranges.passed(last.first, end) if last.recomputes else ranges.shared(last.first, end)
    # every tensor that enters a recomputed first segment is kept as it is; what was away is another tensor when back
    own = 0 if segments[0].offloads else _graph_input(ranges, first, segments[0].end)
    input_kept = ranges.crossing[first] if segments[0].recomputes and not segments[0].offloads else own
    rerun = grown = back = 0
    if recomputed and again >= 0:
        one = segments[again]
        inputs = ranges.crossing[one.first]
        rerun = max(0, ranges.forward(one.first, one.end) - inputs)
        grown = _saved(ranges, one, overlaps[again]) - held[again]
        back = away[again]
        held = [*held[:again], held[again] + grown, *held[again + 1 :]]
    ready = again if recomputed else -1
    return Treatment(
        forward=max(0, forward - ranges.crossing[first]),
        held=before,
        shared=shared,
        input_kept=input_kept,
        away=sum(away),
        back_at_recompute=back,
        back_at_backward=sum(away) - back,
        recompute=rerun,
        grown=grown,
        input_kept_then=own if recomputed and again == 0 else input_kept,
        backward=_backward(ranges, segments, (held, overlaps), ready, False),
        first_backward=_backward(ranges, segments, (held, overlaps), ready, True),
    )


def _backward(
    ranges: RangeBytes,
    segments: Sequence[MemoryInterval],
    kept: tuple[Sequence[int], Sequence[int]],
    ready: int,
    makes_gradients: bool,
) -> int:
    """B goes through the segments from the last to the first; each is rebuilt where it must be.

    kept: what each segment holds, and `_overlaps`.
    ready: the segment that R has run again.
    """
    most = made = 0
    for number in range(len(segments) - 1, -1, -1):
        one, rest, overlap = segments[number], sum(kept[0][:number]), kept[1][number]
        graph = ranges.saved(one.first, one.end) - _saved(ranges, one, overlap)
        work = ranges.backward(one.first, one.end, makes_gradients) - graph
        if one.recomputes and number != ready:
            work = max(work, ranges.forward(one.first, one.end) + _gradient(ranges, one.end) - overlap)
        most = max(most, rest + made + work)
        made += ranges.made(one.first, one.end) if makes_gradients else 0
    return most


def _overlaps(ranges: RangeBytes, segments: Sequence[MemoryInterval]) -> list[int]:
    """For each segment, the part of its inputs that segments before it hold as well."""
    found, inputs, before = [], -1, None
    for one in segments:
        overlap = 0
        if before is not None and not before.offloads and not before.recomputes:
            overlap = ranges.shared(before.first, before.end)
        if inputs >= 0:
            overlap = max(overlap, ranges.passed(inputs, one.first))
        found.append(0 if one.offloads else overlap)
        if one.recomputes and not one.offloads:
            inputs = one.first
        before = one
    return found


def _saved(ranges: RangeBytes, one: MemoryInterval, overlap: int) -> int:
    """What the graph of a segment keeps, without what segments before it hold."""
    kept = _graph_input(ranges, one.first, one.end)
    return ranges.saved(one.first, one.end) - max(0, min(overlap, overlap + kept - ranges.crossing[one.first]))


def _wanted(ranges: RangeBytes, end: int) -> bool:
    """Whether the stage has a backward: its outputs carry gradients, or it computes the loss."""
    return end == ranges.num_layers or ranges.carries[end]


def _without_backward(ranges: RangeBytes, first: int, end: int) -> Treatment:
    """Frozen layers: F keeps nothing, R and B do nothing."""
    forward = max(0, ranges.bare(first, end) - ranges.crossing[first])
    return Treatment(forward, *([0] * 11))


def _graph_input(ranges: RangeBytes, first: int, end: int) -> int:
    return min(ranges.read_with_gradient(first, end), ranges.saved(first, end))


def _gradient(ranges: RangeBytes, cut: int) -> int:
    return 0 if cut == ranges.num_layers else ranges.gradient[cut]
