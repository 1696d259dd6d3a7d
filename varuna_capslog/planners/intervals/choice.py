"""One choice of memory intervals for one stage: its bytes, its seconds, and how the stage handles its calls.

The search adds these numbers up segment by segment; here they are for a choice that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.treatment import Treatment, treated
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import MemoryInterval, pieces_of

__all__ = [
    "DEFAULT_HANDLING",
    "Handling",
    "IntervalChoice",
    "again_seconds",
    "bytes_of",
    "combined_seconds",
    "others_bytes",
    "runs_again",
    "stage_bytes",
]


@dataclass(frozen=True)
class Handling:
    """What a stage's list does with its calls, and what copies cost.

    recomputed, later, split: as in `memory.treatment.treated`: the list has an R for every call, an O for every call,
        its backwards are in two halves.
    calls: of a step, each of which leaves its running statistics.
    waiting_blocks: sums of gradients of the stage's parameters that are there beside the one that is being made: 0 with
        one accumulation block, 1 with several where no other rank holds the layers, else the blocks without the last.
    host_bandwidth: bytes per second between a rank and its host tier; None: copies take no time.
    at_once: every backward follows its forward at once, so that the last segment keeps its graph.
    copies_beside: copies run beside the computation, so that a call takes the longer of the two; else it takes both.
    """

    recomputed: bool = False
    later: bool = False
    split: bool = False
    calls: int = 1
    waiting_blocks: int = 0
    host_bandwidth: float | None = None
    copies_beside: bool = True
    at_once: bool = False

    def __post_init__(self) -> None:
        fields.whole(self.calls, "calls", minimum=1)
        fields.whole(self.waiting_blocks, "waiting_blocks")
        if self.host_bandwidth is not None and not 0 < self.host_bandwidth < float("inf"):
            raise CapslogError(f"host_bandwidth is {self.host_bandwidth}; give bytes per second above 0, or none")


DEFAULT_HANDLING = Handling()


@dataclass(frozen=True)
class IntervalChoice:
    """The cheapest intervals that were found for a stage.

    seconds: of one call. bound_seconds: no choice that fits is faster; equal to `seconds` where the search was exact.
    bytes: by `stage_bytes`. moved_bytes: of one call to the host tier, and as many back, by `treated`; the copies of a
        simulated step (`planning.stage_seconds.copy_seconds`) are sums of `saved_bytes`, which may differ a little.
    again_seconds: of `seconds`, or beside copies that take longer: forwards that run again.
    """

    intervals: tuple[MemoryInterval, ...]
    seconds: float
    bound_seconds: float
    bytes: int
    moved_bytes: int
    again_seconds: float


def stage_bytes(
    ranges: RangeBytes,
    first: int,
    end: int,
    intervals: Sequence[MemoryInterval],
    in_flight: int,
    handling: Handling = DEFAULT_HANDLING,
    at_least: bool = False,
) -> int:
    """The most that a stage takes with these intervals and so many calls in flight:

        what is resident, running statistics of all calls, gradients of parameters
        + what the other calls in flight hold while they wait
        + the most that any one action of a call needs, everything of this call included

    All of it is what `treated` says. Of the waiting calls of a list with an O, one counts with what its copy moves as
    well, since it leaves or comes back meanwhile; where backwards are split, each may stand between its two halves. So
    a list may take less, never more by these parts.

    What one stage alone does not tell is left out: messages on their way, inputs that a neighbour on the same rank
    holds too, the exchange of gradients and the update at the end of the step, and an R that stands further ahead of
    its backward than directly before it. `memory.fold` counts them.

    at_least: every waiting call counts with what stays of it on the device alone.

    Raises CapslogError where the profile does not tell the halves of a split backward.
    """
    how = handling.recomputed, handling.later, handling.at_once, handling.split
    one = treated(ranges, ((first, end),), intervals, *how)
    return bytes_of(one, ranges, first, end, in_flight, handling, at_least)


def bytes_of(
    one: Treatment,
    ranges: RangeBytes,
    first: int,
    end: int,
    in_flight: int,
    handling: Handling = DEFAULT_HANDLING,
    at_least: bool = False,
) -> int:
    """`stage_bytes` of calls that are treated so."""
    gradients = ranges.made(first, end)
    gradient_out = 0 if end == ranges.num_layers else ranges.gradient[end]
    waits, back = one.held - one.away, one.held - one.away + one.host
    forward = ranges.crossing[first] + one.forward
    actions = [forward, back + one.recompute, back + one.grown + gradient_out]
    if one.halves is None:
        actions.append(one.backward)
        first_backward = one.first_backward
    else:
        actions += [one.halves.inputs, one.halves.weights]
        first_backward = one.halves.first_weights
    between = 0 if one.halves is None else one.halves.between
    others = others_bytes(handling, in_flight, waits, one.held, one.host, between)
    others = (in_flight - 1) * waits if at_least else others
    resident = ranges.resident(range(first, end)) + handling.calls * ranges.statistics(first, end)
    return (
        resident
        + handling.waiting_blocks * gradients
        + int(others)
        + max(first_backward, *(a + gradients for a in actions))
    )


def others_bytes(handling: Handling, in_flight: int, waits: Any, held: Any, host: Any, between: Any) -> Any:
    """What the other calls in flight hold beside the one at work; the numbers are those of `Sums`, or arrays.

    It never falls where one of the numbers rises.
    """
    each = np.maximum(waits, between)
    if not handling.later or in_flight < 2:
        return (in_flight - 1) * each
    return (in_flight - 2) * each + np.maximum(each, np.maximum(held, waits + host))


def again_seconds(
    ranges: RangeBytes, seconds: LayerSeconds, first: int, end: int, intervals: Sequence[MemoryInterval]
) -> float:
    """The forwards of one call that run again: those of intervals that recompute.

    Two kinds of them take no more time. The engine does not run layers behind which no gradient comes back once more;
    and where an interval ends with the loss and leaves no running statistics, its first forward is left out, since
    nothing reads what it would make.
    """
    return sum(
        float(seconds.forward[one.end] - seconds.forward[one.first])
        for one in pieces_of(first, end, intervals)
        if one.recomputes and runs_again(ranges, one.first, one.end)
    )


def runs_again(ranges: RangeBytes, first: int, end: int) -> bool:
    """Whether recomputing these layers takes time; see `again_seconds`."""
    if end == ranges.num_layers:
        return ranges.statistics(first, end) > 0
    return ranges.carries[end]


def combined_seconds(handling: Handling, compute: Any, moved_bytes: Any) -> Any:
    """The seconds of a call that computes for so long and moves so much to the host tier and back. Also of arrays."""
    if handling.host_bandwidth is None:
        return compute
    copies = 2 * moved_bytes / handling.host_bandwidth
    return np.maximum(compute, copies) if handling.copies_beside else compute + copies
