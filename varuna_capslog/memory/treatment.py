"""What one call of a stage holds and needs at each of its actions, under the stage's memory intervals.

A stage's layers fall into segments: those that no interval names keep their graph, the others run again or leave the
device. `fold` adds these numbers up over the calls of a rank; nothing here knows positions.

Where a profile knows the tensors of every cut, one that several of a call's segments hold counts once, on the device
and, where a call's O takes them together, in the host tier. What comes back is other tensors than what stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from varuna_capslog.memory.range_bytes import RangeBytes
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

    inputs: of I, everything of this call included, the gradients of the outputs as well. between: what it leaves.
    weights, first_weights: of W, everything of this call included; the latter where it makes the parameters' gradients.
    """

    inputs: int = 0
    between: int = 0
    weights: int = 0
    first_weights: int = 0


@dataclass
class _Segment:
    """Layers that are treated alike, and their bytes in one call.

    kept: whether they have a backward (frozen layers in front have none, and nothing is kept of them).
    inputs: of all tensors before them; entered: the part that is held.
    graph: of their whole graph. stays: what is on the device while the call waits; taken: what goes to the host tier.
    beside_stay, beside_taken: the part of the inputs that segments before hold on the device, or give to the host tier.
    """

    part: MemoryInterval
    kept: bool
    inputs: int
    entered: int
    graph: int
    stays: int
    taken: int
    beside_stay: int = 0
    beside_taken: int = 0

    @property
    def waits(self) -> int:
        """What it adds on the device while the call waits."""
        return self.stays - (0 if self.part.offloads else self.once(self.beside_stay))

    @property
    def leaving(self) -> int:
        """What it adds on the device before the call's O."""
        return self.stays + self.taken - self.once(max(self.beside_stay, self.beside_taken))

    def once(self, beside: int, entered: int | None = None) -> int:
        """The part of what it holds that counts before, where so much of its inputs does."""
        entered = self.entered if entered is None else entered
        return max(0, min(beside, beside + entered - self.inputs))


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
    whole: the intervals do not apply, since the backward follows at once. (Graphs end where they would all the same.)
    split: the backward is in two halves.

    Raises CapslogError where the profile does not tell the halves of a split one.
    """
    first, end = pieces[0][0], pieces[-1][1]
    if end < ranges.num_layers and not ranges.carries[end]:  # frozen layers: F keeps nothing, R and B do nothing
        halves = TreatedHalves() if split else None
        return Treatment(max(0, max(ranges.bare(*piece) for piece in pieces) - ranges.crossing[first]), halves=halves)
    segments = _segments(ranges, pieces, intervals, whole)
    after = sum(one.waits for one in segments)
    held = sum(one.leaving for one in segments) if later else after
    returned = [max(0, one.taken - later * one.once(one.beside_taken)) for one in segments]
    sizes = [one.waits + size for one, size in zip(segments, returned, strict=True)]
    works, start, last = _forward(ranges, segments, later), segments[0], segments[-1]
    shared = 0
    if end < ranges.num_layers and not last.part.offloads:
        part = last.part
        shared = ranges.inputs_kept(part.first, end, end) if part.recomputes else ranges.shared(part.first, end)
    # every tensor that enters a recomputed first segment is kept as it is; what was away is another tensor when back
    own = _graph_input(ranges, first, start.part.end) if start.kept and not start.part.offloads else 0
    input_kept = start.stays if start.part.recomputes else own
    again = max((number for number, one in enumerate(segments) if one.kept and one.part.recomputes), default=-1)
    again, rerun, grown = again if recomputed else -1, 0, 0
    if again >= 0:
        one = segments[again]
        rerun = max(0, ranges.forward(one.part.first, one.part.end) - one.inputs)
        grown = _rebuilt(ranges, one, later) - sizes[again]
        sizes[again] += grown
    return Treatment(
        forward=max(0, 0, *(size - ranges.crossing[first] for size in works)),
        behind=max(0, 0, *(size - ranges.crossing[first] for size in works[1:])),
        held=held,
        shared=shared,
        input_kept=input_kept,
        away=held - after,
        host=sum(returned),
        recompute=rerun,
        grown=grown,
        input_kept_then=own if again == 0 else input_kept,
        backward=_backward(ranges, segments, (sizes, again, later), False),
        first_backward=_backward(ranges, segments, (sizes, again, later), True),
        halves=_halves(ranges, segments, (sizes, again, later)) if split else None,
    )


def _segments(
    ranges: RangeBytes, pieces: Sequence[tuple[int, int]], intervals: Sequence[MemoryInterval], whole: bool
) -> list[_Segment]:
    found: list[_Segment] = []
    for part in _parts(pieces, intervals):
        part = MemoryInterval(part.first, part.end, KEEP) if whole else part
        inputs, graph = ranges.crossing[part.first], ranges.saved(part.first, part.end)
        if part.end < ranges.num_layers and not ranges.carries[part.end]:
            found.append(_Segment(part, False, inputs, 0, 0, 0, 0))
            continue
        kept = ranges.inputs_kept(part.first, part.end)
        one = _Segment(part, True, inputs, kept, graph, kept, 0)
        if not part.recomputes:
            one.entered, one.stays = _graph_input(ranges, part.first, part.end), graph
        if part.offloads:
            one.stays, one.taken = 0, kept
            if not part.recomputes:
                one.stays, one.taken = ranges.staying(part.first, part.end), ranges.moved(part.first, part.end)
                one.entered = max(0, one.entered - ranges.only_entered(part.first))
        one.beside_stay = _beside(ranges, found, part.first, lambda part: not part.offloads)
        one.beside_taken = _beside(ranges, found, part.first, lambda part: part.offloads)
        found.append(one)
    return found


def _parts(pieces: Sequence[tuple[int, int]], intervals: Sequence[MemoryInterval]) -> Iterator[MemoryInterval]:
    """The segments of all ranges, in order."""
    for first, end in pieces:
        yield from pieces_of(first, end, [one for one in intervals if first <= one.first and one.end <= end])


def _beside(ranges: RangeBytes, before: Sequence[_Segment], cut: int, counts: Callable[[MemoryInterval], bool]) -> int:
    """The part of what crosses a cut that some of the segments before it hold: their outputs, or inputs that pass."""
    found, before = 0, [one for one in before if one.kept]
    if before and counts(before[-1].part) and not before[-1].part.recomputes:
        part = before[-1].part
        found = ranges.shared(part.first, part.end, part.offloads)
    parts = [one.part for one in before if one.part.recomputes and counts(one.part)]
    return max([found, *(ranges.inputs_kept(part.first, part.end, cut) for part in parts)])


def _forward(ranges: RangeBytes, segments: Sequence[_Segment], later: bool) -> list[int]:
    """The most of F while each segment is at work, its inputs included."""
    found, held = [], 0
    for one in segments:
        first, end = one.part.first, one.part.end
        work = ranges.forward(first, end) if one.kept and not one.part.recomputes else ranges.bare(first, end)
        if one.part.recomputes and end == ranges.num_layers and not ranges.statistics(first, end):
            work = one.inputs  # nothing reads what it would make
        found.append(held + work - max(one.beside_stay, later * one.beside_taken))
        held += one.leaving if later else one.waits
    return found


def _rebuilt(ranges: RangeBytes, one: _Segment, later: bool) -> int:
    """What the graph of a segment that has run again adds to what segments before it hold."""
    entered = _graph_input(ranges, one.part.first, one.part.end)
    return one.graph - one.once(_returned(one, later), entered)


def _returned(one: _Segment, later: bool) -> int:
    """The part of a segment's inputs, or of what came back of them, that segments before it hold as well."""
    return later * one.beside_taken if one.part.offloads else one.beside_stay


def _backward(
    ranges: RangeBytes, segments: Sequence[_Segment], call: tuple[Sequence[int], int, bool], makes_gradients: bool
) -> int:
    """B goes through the segments from the last to the first; each is rebuilt where it must be.

    call: what each segment holds when all is back, the segment that R has run again, and `later` as above.
    """
    most = made = 0
    for number, one in _from_the_last(segments):
        first, end = one.part.first, one.part.end
        beside, more = _graph(ranges, one, number, call)
        work = ranges.backward(first, end, makes_gradients).most(beside) + more
        again = _again(ranges, one, number, call)
        most = max(most, sum(call[0][:number]) + made + max(work, again))
        made += ranges.made(first, end) if makes_gradients else 0
    return most


def _halves(ranges: RangeBytes, segments: Sequence[_Segment], call: tuple[Sequence[int], int, bool]) -> TreatedHalves:
    """I goes through the segments as B does and leaves something of each, W lets it go from the last to the first.

    What I leaves counts whole for each segment: what two graphs both kept, the one may have let go of.
    """
    held = [ranges.held_between_halves(one.part.first, one.part.end) if one.kept else 0 for one in segments]
    inputs, weights, made = 0, [0, 0], 0
    for number, one in _from_the_last(segments):
        first, end = one.part.first, one.part.end
        beside, more = _graph(ranges, one, number, call)
        work = max(ranges.input_half(first, end).most(beside) + more, _again(ranges, one, number, call))
        inputs = max(inputs, sum(call[0][:number]) + work + sum(held[number + 1 :]))
        for makes in (False, True):
            most = sum(held[:number]) + made * makes + ranges.weight_half(first, end, makes)
            weights[makes] = max(weights[makes], most)
        made += ranges.made(first, end)
    return TreatedHalves(inputs, sum(held), *weights)


def _from_the_last(segments: Sequence[_Segment]) -> Iterator[tuple[int, _Segment]]:
    """Those that have a backward."""
    for number in range(len(segments) - 1, -1, -1):
        if not segments[number].kept:
            return
        yield number, segments[number]


def _graph(ranges: RangeBytes, one: _Segment, number: int, call: tuple[Sequence[int], int, bool]) -> tuple[int, int]:
    """Of a segment's graph when its backward begins: bytes that count elsewhere, and those that there are besides."""
    graph = _rebuilt(ranges, one, call[2]) if one.part.recomputes else call[0][number]
    return max(0, one.graph - graph), max(0, graph - one.graph)


def _again(ranges: RangeBytes, one: _Segment, number: int, call: tuple[Sequence[int], int, bool]) -> int:
    """The most while B or I runs a segment again, of it alone; 0 where it need not."""
    _, ready, later = call
    if not one.part.recomputes or number == ready:
        return 0
    first, end = one.part.first, one.part.end
    gradient = 0 if end == ranges.num_layers else ranges.gradient[end]
    missing = one.inputs - one.entered  # what only others read was there in F alone
    return ranges.forward(first, end) - missing + gradient - _returned(one, later)


def _graph_input(ranges: RangeBytes, first: int, end: int) -> int:
    return min(ranges.read_with_gradient(first, end), ranges.saved(first, end))
