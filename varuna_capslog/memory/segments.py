"""Segments of a call (layers of a stage with one treatment), and the sums of the bytes that they hold and need.
`treated` sums one choice of memory intervals; a search (`planners/intervals`) passes arrays, one element per choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from varuna_capslog.memory.range_bytes import BackwardWork, RangeBytes
from varuna_capslog.plans.parts import KEEP, MemoryInterval, pieces_of

__all__ = ["CallSegment", "PrecedingSegments", "SharedInputs", "Sums", "Treatment", "treated"]


Bytes: TypeAlias = Any
"""An int, or an array of them."""
_NONE = BackwardWork(0)


class SharedInputs(NamedTuple):
    """The part of a segment's inputs that segments before it hold on the device (stay), or offload (taken)."""

    stay: Bytes = 0
    taken: Bytes = 0


class PrecedingSegments(NamedTuple):
    """Segments before a cut that may hold inputs of the segments behind it. last: the last segment with a backward.
    stays, leaves: the last segment that is recomputed from inputs on the device, or from inputs in the host tier.
    """

    last: MemoryInterval | None = None
    stays: MemoryInterval | None = None
    leaves: MemoryInterval | None = None

    def behind(self, part: MemoryInterval, kept: bool) -> PrecedingSegments:
        """Return the record with one more segment. kept: the segment has a backward."""
        if not kept:
            return self
        if not part.recomputes:
            return PrecedingSegments(part, self.stays, self.leaves)
        if part.offloads:
            return PrecedingSegments(part, self.stays, part)
        return PrecedingSegments(part, part, self.leaves)

    def outputs(self, ranges: RangeBytes) -> SharedInputs:
        """Return the bytes that the last segment with a backward holds of its outputs."""
        if self.last is None or self.last.recomputes:
            return SharedInputs()
        size = ranges.treating(self.last).shared(self.last.first, self.last.end, self.last.offloads)
        return SharedInputs(taken=size) if self.last.offloads else SharedInputs(size)

    def passed(self, ranges: RangeBytes, cut: int) -> SharedInputs:
        """Return the bytes of tensors across the cut that recomputed segments hold as their inputs."""
        parts = self.stays, self.leaves
        return SharedInputs(*(0 if part is None else ranges.inputs_kept(part.first, part.end, cut) for part in parts))

    def beside(self, ranges: RangeBytes, cut: int) -> SharedInputs:
        """Return the bytes that these segments hold of the tensors across the cut."""
        return SharedInputs(*map(max, self.outputs(ranges), self.passed(ranges, cut)))


@dataclass(frozen=True)
class CallSegment:
    """Layers with one treatment, and their bytes in one call.

    kept: True where they have a backward (the first frozen layers have none, and nothing of them is kept).
    inputs: all tensors across the cut before them; entered: the part that the call holds; read: that their graph keeps.
    graph: their whole graph; stays: the part on the device while the call waits; taken: the offloaded part.
    forward, again: peaks of F and of the recomputation, with the inputs. gradient: of their outputs.
    backward, first_backward: peaks of B with their whole graph; first_backward makes parameter gradients (`made`).
    input_half, weight_half, first_weight_half: likewise of I and W; between: bytes after I. 0 if not split.
    """

    part: MemoryInterval
    kept: bool
    inputs: Bytes
    forward: Bytes
    entered: Bytes = 0
    read: Bytes = 0
    graph: Bytes = 0
    stays: Bytes = 0
    taken: Bytes = 0
    again: Bytes = 0
    gradient: Bytes = 0
    backward: BackwardWork = _NONE
    first_backward: BackwardWork = _NONE
    made: Bytes = 0
    input_half: BackwardWork = _NONE
    weight_half: Bytes = 0
    first_weight_half: Bytes = 0
    between: Bytes = 0

    @classmethod
    def of(cls, ranges: RangeBytes, part: MemoryInterval, split: bool = False) -> CallSegment:
        """Return the segment of this interval, or of this piece of kind KEEP. split: the backward is in two halves.
        Raises CapslogError where the profile lacks the bytes of the halves.
        """
        ranges = ranges.treating(part)
        return ranges.once((cls, part.first, part.end, part.kind, split), lambda: cls._of(ranges, part, split))

    @classmethod
    def _of(cls, ranges: RangeBytes, part: MemoryInterval, split: bool) -> CallSegment:
        first, end = part.first, part.end
        inputs = ranges.crossing[first]
        if end < ranges.num_layers and not ranges.carries[end]:
            return cls(part, False, inputs, ranges.bare(first, end))
        graph, again = ranges.saved(first, end), ranges.forward(first, end)
        read = min(ranges.read_with_gradient(first, end), graph)
        forward, entered, stays, taken = again, read, graph, 0
        if part.recomputes:
            forward, entered = ranges.bare(first, end), ranges.inputs_kept(first, end)
            stays, taken = (0, entered) if part.offloads else (entered, 0)
            if end == ranges.num_layers and not ranges.statistics(first, end):
                forward = inputs  # nothing reads its outputs
        elif part.offloads:
            entered = max(0, read - ranges.only_entered(first))
            stays, taken = ranges.staying(first, end), ranges.moved(first, end)
        gradient = 0 if end == ranges.num_layers else ranges.gradient[end]
        halves: dict[str, Any] = {}
        if split:
            halves["input_half"] = ranges.input_half(first, end)
            halves["weight_half"] = ranges.weight_half(first, end)
            halves["first_weight_half"] = ranges.weight_half(first, end, True)
            halves["between"] = ranges.held_between_halves(first, end)
        return cls(
            part, True, inputs, forward, entered, read, graph, stays, taken, again, gradient,
            backward=ranges.backward(first, end),
            first_backward=ranges.backward(first, end, True),
            made=ranges.made(first, end),
            **halves,
        )  # fmt: skip

    def once(self, beside: Bytes, entered: Bytes) -> Bytes:
        """Return the bytes of the `entered` inputs that earlier segments count; beside: those of all inputs."""
        return _larger(0, _smaller(beside, beside + entered - self.inputs))

    def waits(self, beside: SharedInputs) -> Bytes:
        """Return the bytes that the segment adds on the device while the call waits."""
        return self.stays - (0 if self.part.offloads else self.once(beside.stay, self.entered))

    def leaving(self, beside: SharedInputs) -> Bytes:
        """Return the bytes that the segment adds on the device before the call's O."""
        return self.stays + self.taken - self.once(_larger(beside.stay, beside.taken), self.entered)

    def returned(self, beside: SharedInputs, later: bool) -> Bytes:
        """Return the bytes that the segment adds to those that come back from the host tier."""
        return _larger(0, self.taken - later * self.once(beside.taken, self.entered))

    def rebuilt(self, beside: SharedInputs, later: bool) -> Bytes:
        """Return the bytes that the segment's recomputed graph adds to the bytes of earlier segments."""
        return self.graph - self.once(self._there(beside, later), self.read)

    def rerun(self) -> Bytes:
        """Return the peak of the segment's recomputation, less its inputs."""
        return _larger(0, self.again - self.inputs)

    def backward_works(
        self, works: Sequence[BackwardWork], size: Bytes, beside: SharedInputs, later: bool, ready: bool
    ) -> list[Bytes]:
        """Return the segment's peak in B or I for each of `works`, the peaks with its whole graph. size: the bytes that
        it holds when offloaded bytes are back. ready: R has recomputed it.
        """
        elsewhere = self.graph - (self.rebuilt(beside, later) if self.part.recomputes else size)
        if not self.part.recomputes or ready:
            return [work.without(elsewhere) for work in works]
        missing = self.inputs - self.entered  # inputs that only other stages read, in memory only during F
        again = self.again - missing + self.gradient - self._there(beside, later)
        return [_larger(work.without(elsewhere), again) for work in works]

    def _there(self, beside: SharedInputs, later: bool) -> Bytes:
        """Return the bytes of the inputs (or of their copies from the host tier) that earlier segments also hold."""
        return later * beside.taken if self.part.offloads else beside.stay


class Sums(NamedTuple):
    """Bytes of the segments of one call, summed from the first segment on.

    waits: on the device while the call waits; held: on the device before its O, if it has an O; host: bytes that come
        back from the host tier.
    back: on the device when these are back and R has recomputed its segment; between: after I of a split backward.
    forward, again, backward, first_backward, inputs, weights, first_weights: the peaks of F, R, B, I and W, with all
        bytes of this call, also those that remain after I; "first": the parameters' gradients are made.
    """

    waits: Bytes = 0
    held: Bytes = 0
    host: Bytes = 0
    back: Bytes = 0
    between: Bytes = 0
    forward: Bytes = 0
    again: Bytes = 0
    backward: Bytes = 0
    first_backward: Bytes = 0
    inputs: Bytes = 0
    weights: Bytes = 0
    first_weights: Bytes = 0

    def behind(self, segment: CallSegment, beside: SharedInputs, later: bool, ready: bool = False) -> Sums:
        """Return the sums with one more segment. later: the call's O moves all offloaded bytes; else each segment's
        bytes are moved when F has run it. ready: R recomputes this segment.
        """
        forward = _larger(self.forward, self.held + segment.forward - _larger(beside.stay, later * beside.taken))
        if not segment.kept:
            return self._replace(forward=forward)
        waits, returned = segment.waits(beside), segment.returned(beside, later)
        size = waits + returned
        # B visits the segments from the last to the first and rebuilds those that must run again
        works = segment.backward, segment.first_backward, segment.input_half
        backward, first_backward, inputs = (
            self.back + work for work in segment.backward_works(works, size, beside, later, ready)
        )
        # the bytes that remain after I count in full for each segment: of two graphs that shared a tensor, one may
        # have freed it
        return Sums(
            self.waits + waits,
            self.held + (segment.leaving(beside) if later else waits),
            self.host + returned,
            self.back + (segment.rebuilt(beside, later) if ready else size),
            self.between + segment.between,
            forward,
            self.back + size + segment.rerun() if ready else self.again + size,
            _larger(self.backward, backward),
            _larger(self.first_backward + segment.made, first_backward),
            _larger(self.inputs + segment.between, inputs),
            _larger(self.weights, self.between + segment.weight_half),
            _larger(self.first_weights + segment.made, self.between + segment.first_weight_half),
        )


def _larger(first: Bytes, second: Bytes) -> Bytes:
    """Return the larger of both, elementwise; ints stay ints, which are many times faster than numpy's."""
    return max(first, second) if isinstance(first, int) and isinstance(second, int) else np.maximum(first, second)


def _smaller(first: Bytes, second: Bytes) -> Bytes:
    return min(first, second) if isinstance(first, int) and isinstance(second, int) else np.minimum(first, second)


# -- Bytes that one call of a stage holds and needs at each of its actions, under the stage's memory intervals.
#
# A stage's layers form segments: layers outside every interval keep their graph, the others are recomputed or
# offloaded. `fold` adds these bytes at the positions of a rank's actions.
#
# Where a profile has the tensors of every cut, a tensor that several segments of a call hold counts once, on the
# device and, where the call's O moves these segments together, in the host tier. Tensors that come back are copies,
# separate from those that stayed.


@dataclass(frozen=True)
class Treatment:
    """Bytes of one call of a stage. "Additional" bytes exclude the bytes in memory before the action, as its inputs.

    forward: additional bytes of F. behind: of F without its first segment, whose end frees the inputs that are not
        kept. held: bytes after F, without the outputs passed on.
    shared: the outputs in `held`; input_kept, input_kept_then: the inputs in `held`, and those held after R.
    away: the part of `held` that O moves off the device; host: the bytes in the host tier that come back, at L or, if
        the call has none, at the next R or B. Without an O they are moved before F ends.
    recompute: additional bytes of R, when offloaded bytes are back; grown: held bytes that R adds.
    backward, first_backward: of B, with all bytes of this call and the gradients of the outputs; first_backward makes
        the parameters' gradients. halves: of I and W, where the backward is split.
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
    """Bytes of a call whose backward is split, with all bytes of this call. inputs: of I, with the gradients of the
    outputs. between: after I. weights, first_weights: of W; first_weights makes the parameters' gradients.
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
    """Return the bytes of a call of a stage with these ranges of layers (`pieces`) and memory intervals.

    recomputed: the call has an R, which runs the last recompute interval again; else B does.
    later: the call has an O, which moves all offloaded bytes; else each segment's bytes are moved when F has run it.
    whole: the backward follows at once: nothing is offloaded, and the last segment keeps its graph; B recomputes the
        others as their intervals say. (The ends of graphs do not change.)
    split: the backward is in two halves.

    Raises CapslogError where the profile lacks the bytes of layers with recomputed parts, or, with `split`, of the
    halves.
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
        kept = ranges.treating(part)
        shared = ranges.inputs_kept(part.first, end, end) if part.recomputes else kept.shared(part.first, end)
    # a recomputed first segment keeps its inputs themselves; an offloaded input comes back as another tensor
    input_read = start.read if start.kept and not start.part.offloads else 0
    input_kept = start.stays if start.part.recomputes else input_read
    rerun_number = max(
        (number for number, (segment, _) in enumerate(segments) if segment.kept and segment.part.recomputes), default=-1
    )
    rerun_number = rerun_number if recomputed else -1
    sums, works = Sums(), []
    for number, (segment, beside) in enumerate(segments):
        sums = sums._replace(forward=0).behind(segment, beside, later, number == rerun_number)
        works.append(sums.forward)
    rerun = grown = 0
    if rerun_number >= 0:
        segment, beside = segments[rerun_number]
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
        input_kept_then=input_read if rerun_number == 0 else input_kept,
        backward=int(sums.backward),
        first_backward=int(sums.first_backward),
        halves=halves if split else None,
    )


def _segments(
    ranges: RangeBytes,
    pieces: Sequence[tuple[int, int]],
    intervals: Sequence[MemoryInterval],
    how: tuple[bool, bool],
) -> list[tuple[CallSegment, SharedInputs]]:
    """Return the segments, each with the inputs that segments before it hold. how: `whole` and `split` of `treated`."""
    at_once, split = how
    segments, before, last = [], PrecedingSegments(), pieces[-1][1]
    for part in _parts(pieces, intervals):
        if at_once:
            kind = "recompute" if part.recomputes and part.end != last else KEEP
            part = part if part.parts else MemoryInterval(part.first, part.end, kind)
        segment = CallSegment.of(ranges, part, split)
        segments.append((segment, before.beside(ranges, part.first) if segment.kept else SharedInputs()))
        before = before.behind(part, segment.kept)
    return segments


def _parts(pieces: Sequence[tuple[int, int]], intervals: Sequence[MemoryInterval]) -> Iterator[MemoryInterval]:
    for first, end in pieces:
        yield from pieces_of(
            first, end, [interval for interval in intervals if first <= interval.first and interval.end <= end]
        )
