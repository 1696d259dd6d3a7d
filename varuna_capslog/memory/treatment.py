"""What one call of a stage holds and needs at each of its actions, under the stage's memory intervals.

A stage's layers fall into segments: those that no interval names keep their graph, the others run again or leave the
device. `fold` adds these numbers up over the calls of a rank; nothing here knows positions.

Where a profile knows the tensors of every cut, one that several of a call's segments hold counts once, on the device
and, where a call's O takes them together, in the host tier. What comes back is other tensors than what stayed.
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
    """Bytes of one call of a stage. "Beside" means: beside what was there when the action began.

    forward: of F, beside; its inputs were there. behind: the same without its first segment, at whose end what is not
        kept of the inputs is let go. held: what F leaves, without what it hands on.
    shared: the part of the outputs that is among `held`, and of the inputs (`input_kept`).
    away: the part of `held` that O takes off the device; host: what is then in the host tier and comes back, at L or
        else at the next R or B. Without an O it has left when F ends.
    recompute: of R, beside, after what returns; grown: what R adds to what is held; input_kept_then: as `input_kept`,
        after R.
    backward, first_backward: of B, everything of this call included, the gradients of the outputs as well; the latter
        where it makes the parameters' gradients.
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

    inputs: of I, everything of this call included, the gradients of the outputs as well, and what it leaves: between.
    weights, first_weights: of W, everything of this call included; the latter where it makes the parameters' gradients.
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
    """A call of a stage of these ranges of layers with these intervals.

    recomputed: the list has an R for the call, which runs the last recompute interval again; else B does.
    later: it has an O for the call, until which all stays; else each segment leaves when F has run it.
    whole: the backward follows at once: nothing leaves for the host tier, and the last segment keeps its graph; the
        others run again in B where their intervals say so. (Graphs end where they would all the same.)
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
    # every tensor that enters a recomputed first segment is kept as it is; what was away is another tensor when back
    own = start.read if start.kept and not start.part.offloads else 0
    input_kept = start.stays if start.part.recomputes else own
    again = max((number for number, (one, _) in enumerate(segments) if one.kept and one.part.recomputes), default=-1)
    again = again if recomputed else -1
    sums, works = Sums(), []
    for number, (one, beside) in enumerate(segments):
        sums = sums._replace(forward=0).behind(one, beside, later, number == again)
        works.append(sums.forward)
    rerun = grown = 0
    if again >= 0:
        one, beside = segments[again]
        rerun, grown = one.rerun(), one.rebuilt(beside, later) - one.waits(beside) - one.returned(beside, later)
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
        input_kept_then=own if again == 0 else input_kept,
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
    """The segments, and what of the inputs of each those before it hold.

    how: `whole` and `split` as above.
    """
    whole, split = how
    found, before, last = [], Before(), pieces[-1][1]
    for part in _parts(pieces, intervals):
        if whole:
            kind = "recompute" if part.recomputes and part.end != last else KEEP
            part = MemoryInterval(part.first, part.end, kind)
        one = CallSegment.of(ranges, part, split)
        found.append((one, before.beside(ranges, part.first) if one.kept else Beside()))
        before = before.behind(part, one.kept)
    return found


def _parts(pieces: Sequence[tuple[int, int]], intervals: Sequence[MemoryInterval]) -> Iterator[MemoryInterval]:
    """What is treated alike in all ranges, in order."""
    for first, end in pieces:
        yield from pieces_of(first, end, [one for one in intervals if first <= one.first and one.end <= end])
