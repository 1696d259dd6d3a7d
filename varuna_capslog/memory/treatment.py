"""Bytes that one call of a stage holds and needs at each of its actions, under the stage's memory intervals.

A stage's layers form segments: layers outside every interval keep their graph, the others run again or are offloaded.
`fold` adds these numbers up over the calls of a rank; this file knows no positions.

Where a profile knows the tensors of every cut, a tensor that several of a call's segments hold counts once, on the
device and, where a call's O moves them together, in the host tier. Tensors that come back are copies, apart from those
that stayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import Before, Beside, CallSegment, Sums
from varuna_capslog.plans.parts import KEEP, MemoryInterval, pieces_of

__all__ = ["TreatedHalves", "Treatment", "treated"]


@dataclass(frozen=True)
class Treatment:
    """Bytes of one call of a stage. "Additional" bytes do not count those that were there when the action began.

    forward: additional bytes of F; its inputs were there. behind: the same without its first segment, at whose end the
        inputs that are not kept are freed. held: bytes that remain after F, without the outputs that it passes on.
    shared: the part of the outputs that is among `held`; input_kept: that of the inputs.
    away: the part of `held` that O moves off the device; host: bytes that are then in the host tier and come back, at L
        or else at the next R or B. Without an O they have left when F ends.
    recompute: additional bytes of R, after what returns; grown: held bytes that R adds; input_kept_then: as
        `input_kept`, after R.
    backward, first_backward: of B, with everything of this call, the gradients of the outputs as well; the latter where
        it makes the parameters' gradients.
    halves: of I and W, where the backward is split.
    """

    forward: int
    behind: int = 0
    held: int = 0
    shared: int = 0
    input_kept: int = 0
    away: int = 0
    host: int = 0
    recompute: int = 0
    grown: int = 0
    input_kept_then: int = 0
    backward: int = 0
    first_backward: int = 0
    halves: TreatedHalves | None = None


@dataclass(frozen=True)
class TreatedHalves:
    """Bytes of a call whose backward is split.

    inputs: of I, with everything of this call, the gradients of the outputs as well. between: what remains after I.
    weights, first_weights: of W, with everything of this call; the latter where it makes the parameters' gradients.
    """

    inputs: int = 0
    between: int = 0
    weights: int = 0
    first_weights: int = 0


def treated(
    ranges: RangeBytes,
    pieces: Sequence[tuple[int, int]],
    intervals: Sequence[MemoryInterval],
    recomputed: bool = False,
    later: bool = False,
    whole: bool = False,
    split: bool = False,
) -> Treatment:
    """Return the bytes of a call of a stage with these ranges of layers and these intervals.

    recomputed: the list has an R for the call, which runs the last recompute interval again; else B does.
    later: the list has an O for the call, until which all stays; else each segment leaves when F has run it.
    whole: the backward follows at once: nothing goes to the host tier, and the last segment keeps its graph; the
        others run again in B where their intervals require it. (The ends of graphs do not change.)
    split: the backward is in two halves.

    Raises CapslogError where the profile does not tell the halves of a split one.
    """
    first, end = pieces[0][0], pieces[-1][1]
    if end < ranges.num_layers and not ranges.carries[end]:  # frozen layers: F keeps nothing, R and B do nothing
        halves = TreatedHalves() if split else None
        return Treatment(max(0, max(ranges.bare(*piece) for piece in pieces) - ranges.crossing[first]), halves=halves)
    segments = _segments(ranges, pieces, intervals, (whole, split))
    start, last = segments[0][0], segments[-1][0]
    shared = 0
    if end < ranges.num_layers and not last.part.offloads:
        part = last.part
        shared = ranges.inputs_kept(part.first, end, end) if part.recomputes else ranges.shared(part.first, end)
    # every input of a recomputed first segment is kept as it is; an offloaded input comes back as another tensor
    input_read = start.read if start.kept and not start.part.offloads else 0
    input_kept = start.stays if start.part.recomputes else input_read
    again = max(
        (number for number, (segment, _) in enumerate(segments) if segment.kept and segment.part.recomputes), default=-1
    )
    again = again if recomputed else -1
    sums, works = Sums(), []
    for number, (segment, beside) in enumerate(segments):
        sums = sums._replace(forward=0).behind(segment, beside, later, number == again)
        works.append(sums.forward)
    rerun = grown = 0
    if again >= 0:
        segment, beside = segments[again]
        rerun, grown = (
            segment.rerun(),
            segment.rebuilt(beside, later) - segment.waits(beside) - segment.returned(beside, later),
        )
    halves = TreatedHalves(*map(int, (sums.inputs, sums.between, sums.weights, sums.first_weights)))
    return Treatment(
        forward=max(0, *(int(size) - ranges.crossing[first] for size in works)),
        behind=max(0, 0, *(int(size) - ranges.crossing[first] for size in works[1:])),
        held=int(sums.held),
        shared=shared,
        input_kept=input_kept,
        away=int(sums.held - sums.waits),
        host=int(sums.host),
        recompute=int(rerun),
        grown=int(grown),
        input_kept_then=input_read if again == 0 else input_kept,
        backward=int(sums.backward),
        first_backward=int(sums.first_backward),
        halves=halves if split else None,
    )


def _segments(
    ranges: RangeBytes,
    pieces: Sequence[tuple[int, int]],
    intervals: Sequence[MemoryInterval],
    how: tuple[bool, bool],
) -> list[tuple[CallSegment, Beside]]:
    """Return the segments, each with the part of its inputs that segments before it hold.

    how: `whole` and `split` as above.
    """
    at_once, split = how
    segments, before, last = [], Before(), pieces[-1][1]
    for part in _parts(pieces, intervals):
        if at_once:
            kind = "recompute" if part.recomputes and part.end != last else KEEP
            part = MemoryInterval(part.first, part.end, kind)
        segment = CallSegment.of(ranges, part, split)
        segments.append((segment, before.beside(ranges, part.first) if segment.kept else Beside()))
        before = before.behind(part, segment.kept)
    return segments


def _parts(pieces: Sequence[tuple[int, int]], intervals: Sequence[MemoryInterval]) -> Iterator[MemoryInterval]:
    """Yield the intervals and kept pieces of all ranges, in order."""
    for first, end in pieces:
        yield from pieces_of(
            first, end, [interval for interval in intervals if first <= interval.first and interval.end <= end]
        )
