"""The segments of a call, layers of a stage that are treated alike, and the sums of what they hold and need.

`treated` adds up one choice of memory intervals. A search that adds up many choices at once (`planners/intervals`)
gives arrays for the numbers below, with one entry for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from varuna_capslog.memory.range_bytes import BackwardWork, RangeBytes
from varuna_capslog.plans.parts import MemoryInterval

__all__ = ["Before", "Beside", "CallSegment", "Sums"]

Bytes: TypeAlias = Any
"""An int, or an array of them."""
_NONE = BackwardWork(0)


class Beside(NamedTuple):
    """The part of a segment's inputs that segments before it hold on the device, or give to the host tier (taken)."""

    stay: Bytes = 0
    taken: Bytes = 0


class Before(NamedTuple):
    """What counts of the segments before a cut for those behind it.

    last: the last one that has a backward.
    stays, leaves: the last one that runs again from inputs on the device, or in the host tier.
    """

    last: MemoryInterval | None = None
    stays: MemoryInterval | None = None
    leaves: MemoryInterval | None = None

    def behind(self, part: MemoryInterval, kept: bool) -> Before:
        """With one more segment; kept: it has a backward."""
        if not kept:
            return self
        if not part.recomputes:
            return Before(part, self.stays, self.leaves)
        if part.offloads:
            return Before(part, self.stays, part)
        return Before(part, part, self.leaves)

    def outputs(self, ranges: RangeBytes) -> Beside:
        """What the last of them holds of its outputs."""
        if self.last is None or self.last.recomputes:
            return Beside()
        size = ranges.shared(self.last.first, self.last.end, self.last.offloads)
        return Beside(taken=size) if self.last.offloads else Beside(size)

    def passed(self, ranges: RangeBytes, cut: int) -> Beside:
        """What they hold of the tensors across the cut as inputs that pass."""
        parts = self.stays, self.leaves
        return Beside(*(0 if part is None else ranges.inputs_kept(part.first, part.end, cut) for part in parts))

    def beside(self, ranges: RangeBytes, cut: int) -> Beside:
        """What they hold of the tensors across the cut."""
        return Beside(*map(max, self.outputs(ranges), self.passed(ranges, cut)))


@dataclass(frozen=True)
class CallSegment:
    """Layers that are treated alike, and their bytes in one call.

    kept: whether they have a backward (frozen layers in front have none, and nothing is kept of them).
    inputs: of all tensors before them; entered: the part that is held; read: the part that their graph keeps.
    forward: the most of F at them, their inputs included.
    graph: of their whole graph. stays: what is on the device while the call waits; taken: what goes to the host tier.
    again: the most of running them again, their inputs included. gradient: of their outputs.
    backward, first_backward: of B at them with their whole graph; the latter makes the parameters' gradients. made: the
        bytes of these.
    input_half, weight_half, first_weight_half, between: of I and W likewise, and what I leaves; 0 where backwards are
        not split.
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
        """The layers of this interval, or of this piece of kind KEEP.

        split: the backward is in two halves. Raises CapslogError where the profile does not tell them.
        """
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
                forward = inputs  # nothing reads what it would make
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
        """The part of what it holds of its inputs that counts before, where so much of its inputs does."""
        return _larger(0, _smaller(beside, beside + entered - self.inputs))

    def waits(self, beside: Beside) -> Bytes:
        """What it adds on the device while the call waits."""
        return self.stays - (0 if self.part.offloads else self.once(beside.stay, self.entered))

    def leaving(self, beside: Beside) -> Bytes:
        """What it adds on the device before the call's O."""
        return self.stays + self.taken - self.once(_larger(beside.stay, beside.taken), self.entered)

    def returned(self, beside: Beside, later: bool) -> Bytes:
        """What it adds to what comes back."""
        return _larger(0, self.taken - later * self.once(beside.taken, self.entered))

    def rebuilt(self, beside: Beside, later: bool) -> Bytes:
        """What its graph, when it has run again, adds to what segments before it hold."""
        return self.graph - self.once(self._there(beside, later), self.read)

    def rerun(self) -> Bytes:
        """The most of running it again, beside its inputs."""
        return _larger(0, self.again - self.inputs)

    def backward_works(
        self, works: Sequence[BackwardWork], size: Bytes, beside: Beside, later: bool, ready: bool
    ) -> list[Bytes]:
        """The most while B or I is at it, of it alone, for each of these of its whole graph.

        size: what it holds when all is back. ready: R has run it again.
        """
        elsewhere = self.graph - (self.rebuilt(beside, later) if self.part.recomputes else size)
        if not self.part.recomputes or ready:
            return [work.without(elsewhere) for work in works]
        missing = self.inputs - self.entered  # what only others read was there in F alone
        again = self.again - missing + self.gradient - self._there(beside, later)
        return [_larger(work.without(elsewhere), again) for work in works]

    def _there(self, beside: Beside, later: bool) -> Bytes:
        """The part of its inputs, or of what came back of them, that segments before it hold as well."""
        return later * beside.taken if self.part.offloads else beside.stay


class Sums(NamedTuple):
    """Bytes of one call, of its segments from the first to some other one.

    waits: what it holds on the device while it waits; held: before its O, where it has one.
    host: what is in the host tier and comes back. back: on the device when it is back, and R's segment has run again.
    between: what the segments hold between the halves of a split backward.
    forward, again, backward, first_backward, inputs, weights, first_weights: the most of F, R, B, I and W, everything
        of this call included, also what I leaves; "first" where the parameters' gradients are made.
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

    def behind(self, one: CallSegment, beside: Beside, later: bool, ready: bool = False) -> Sums:
        """With one more segment.

        later: the call has an O, until which all stays; else each segment leaves when F has run it.
        ready: it is the segment that R runs again.
        """
        forward = _larger(self.forward, self.held + one.forward - _larger(beside.stay, later * beside.taken))
        if not one.kept:
            return self._replace(forward=forward)
        waits, returned = one.waits(beside), one.returned(beside, later)
        size = waits + returned
        # B goes through the segments from the last to the first; each is rebuilt where it must be
        works = one.backward, one.first_backward, one.input_half
        backward, first_backward, inputs = (
            self.back + work for work in one.backward_works(works, size, beside, later, ready)
        )
        # I leaves something of each, which counts whole: what two graphs both kept, the one may have let go of
        return Sums(
            self.waits + waits,
            self.held + (one.leaving(beside) if later else waits),
            self.host + returned,
            self.back + (one.rebuilt(beside, later) if ready else size),
            self.between + one.between,
            forward,
            self.back + size + one.rerun() if ready else self.again + size,
            _larger(self.backward, backward),
            _larger(self.first_backward + one.made, first_backward),
            _larger(self.inputs + one.between, inputs),
            _larger(self.weights, self.between + one.weight_half),
            _larger(self.first_weights + one.made, self.between + one.first_weight_half),
        )


def _larger(one: Bytes, other: Bytes) -> Bytes:
    """Each the larger of both; ints stay ints, which are many times quicker than numpy's."""
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else np.maximum(one, other)


def _smaller(one: Bytes, other: Bytes) -> Bytes:
    """Each the smaller of both."""
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else np.minimum(one, other)
