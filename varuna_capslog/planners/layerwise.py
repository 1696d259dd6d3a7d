"""Input of the planners that choose cuts and memory intervals together: `budget` (the default), `dawnpiper`, `vpipe`.

They take a `Layerwise` and return a `StageChoice` per stage. `budget` takes a stage's intervals from `intervals`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.fold import fold
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, StageGraph, in_flight_limits, schedule_of
from varuna_capslog.schedules.actions import action_of

__all__ = ["Choice", "Intervals", "Layerwise", "Question", "StageChoice"]

Intervals = tuple[MemoryInterval, ...]

Choice = tuple[Intervals, float]
"""Memory intervals of a stage, and the seconds per microbatch that they add."""


@dataclass(frozen=True)
class StageChoice:
    """Layers first .. end-1 as one stage. seconds: of one microbatch, forward and backward, and those that its
    intervals add. lack: bytes by which it exceeds its device; 0: it fits. in_flight: most calls; None: by the schedule.
    """

    first: int
    end: int
    intervals: Intervals
    seconds: float
    lack: int
    in_flight: int | None = None


@dataclass(frozen=True)
class Question:
    """Bytes and seconds of any layers, and the run of one pipeline."""

    ranges: RangeBytes
    seconds: LayerSeconds
    run: RunShape


@dataclass(frozen=True)
class Layerwise:
    """Chain of L layers for S devices. question: the source of these numbers, for `budget`; None in hand-made chains.

    forward, backward: [L] seconds of one microbatch. transfer: [L + 1] seconds of a message over each cut.
    crossing: [L + 1] names of the tensors that cross each cut; None where they are not known.
    freed: [L] bytes per microbatch in flight that recomputing the layer alone frees. moved: [L] bytes per microbatch
    that offloading its saved tensors frees; all 0 where the host tier is the device's own memory.
    in_flight: [S] microbatches in flight by the schedule. usable: [S] bytes that a stage may hold; `NEVER`: no limit.
    peak: (stage, first, end, intervals) -> most bytes. once: (first, end) -> most bytes of one microbatch alone.
    host_bandwidth: bytes per second between a device and its host tier; None: copies take no time.
    copies_beside: copies overlap with the computation; else they take the device's own time. swaps_within_calls: saved
    tensors can leave the device before their call has ended.
    copied: [L] bytes that a simulated step counts for the copy of a layer's saved tensors. entering: [L + 1] bytes
    across each cut, which a simulated step counts where an interval recomputes from the host tier.
    speeds: [S], above 0 and at most 1, so that no stage is quicker than its seconds; None: all 1.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    freed: Sequence[int]
    moved: Sequence[int]
    in_flight: Sequence[int]
    usable: Sequence[int]
    peak: Callable[[int, int, int, Intervals], int]
    once: Callable[[int, int], int]
    transfer: Sequence[float]
    crossing: Sequence[frozenset[str]] | None = None
    host_bandwidth: float | None = None
    copies_beside: bool = True
    swaps_within_calls: bool = True
    speeds: Sequence[float] | None = None
    question: Question | None = None
    copied: Sequence[int] = ()
    entering: Sequence[int] = ()

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        run: RunShape,
        devices: int,
        usable: Sequence[int] | None = None,
        link: Link | None = None,
        has_tier: bool = True,
        speeds: Sequence[float] | None = None,
    ) -> Layerwise:
        """Make the chain of a profile.

        run: of one pipeline; its number of microbatches must be set. usable: bytes that a stage may hold on each
        device; None: no limit. link: between neighbouring stages, and to the host tier; None: transfers and copies take
        no time. has_tier: offloaded tensors leave the device's memory. speeds: of the devices, each at most 1. Raises
        CapslogError naming the seconds, bytes or runs that the profile lacks.
        """
        link = link or Link()
        seconds, ranges = LayerSeconds.of_profile(profile, link), RangeBytes.of_ranks(profile, run.recomputes)
        layers = range(profile.num_layers)
        beside = link.copies_beside
        if beside is None:  # on a CPU a copy takes its rank's core, as in `planning/simulation`
            beside = not ranges.one_memory
        crossing, entering = None, [0] * (profile.num_layers + 1)
        if profile.tensors:
            lives = [
                (tensor, -1 if tensor.writer is None else tensor.writer, tensor.readers[-1])
                for tensor in profile.tensors
            ]
            across = [
                [tensor for tensor, writer, last in lives if writer < cut <= last]
                for cut in range(profile.num_layers + 1)
            ]
            crossing = [frozenset(tensor.name for tensor in row) for row in across]
            entering = [sum(tensor.bytes for tensor in row) for row in across]
        return cls(
            profile.column("forward_seconds"),
            profile.column("backward_seconds"),
            [max(0, ranges.saved(at, at + 1) - _input(ranges, at)) for at in layers],
            [ranges.moved(at, at + 1) if has_tier else 0 for at in layers],
            in_flight_limits(run.schedule, devices, run.microbatches, run.k),
            [NEVER] * devices if usable is None else list(usable),
            _peaks(ranges, run, devices),
            functools.cache(functools.partial(_once, ranges)),
            seconds.transfer.tolist(),
            crossing,
            link.host_bandwidth,
            beside,
            False,
            speeds,
            Question(ranges, seconds, run),
            [layer.saved_bytes or 0 for layer in profile.layers],
            entering,
        )

    def under(self, schedule: str) -> Layerwise:
        """Return the same chain in a run with another schedule."""
        assert self.question is not None, "made by Layerwise.of_profile"
        run = replace(self.question.run, schedule=schedule)
        return replace(
            self,
            in_flight=in_flight_limits(schedule, self.stages, run.microbatches, run.k),
            peak=_peaks(self.question.ranges, run, self.stages),
            question=replace(self.question, run=run),
        )

    def with_waiting_moments(self) -> Layerwise:
        """Return the same chain with the optimizer's moments of all layers in the host tier."""
        assert self.question is not None, "made by Layerwise.of_profile"
        ranges = self.question.ranges.with_waiting_moments()
        return replace(
            self,
            peak=_peaks(ranges, self.question.run, self.stages),
            once=functools.cache(functools.partial(_once, ranges)),
            question=replace(self.question, ranges=ranges),
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward)

    @property
    def stages(self) -> int:
        """S."""
        return len(self.in_flight)

    def seconds(self, first: int, end: int) -> float:
        """Return T_x: seconds of the forward and backward of one microbatch."""
        return sum(self.forward[first:end]) + sum(self.backward[first:end])

    def choice(self, first: int, end: int, intervals: Intervals) -> StageChoice:
        """Return the stage with these intervals; its seconds include all recomputation, and it is assumed to fit."""
        again = sum(sum(self.forward[interval.first : interval.end]) for interval in intervals if interval.recomputes)
        return StageChoice(first, end, intervals, self.seconds(first, end) + again, 0)

    def moved_on(self, stage: int, layer: int) -> float:
        """Return the bytes that offloading the layer frees at the stage's peak, divided by the calls in flight.
        If calls keep saved tensors until they end, two calls free nothing: one computes, and another is being copied.
        """
        in_flight = self.in_flight[stage]
        away = in_flight if self.swaps_within_calls else max(0, in_flight - 2)
        return self.moved[layer] * (away / in_flight)

    def copy_seconds(self, layer: int) -> float:
        """Return the seconds of one copy of a layer's saved tensors of one microbatch, in one direction."""
        return 0.0 if self.host_bandwidth is None else self.moved[layer] / self.host_bandwidth

    def fewest(self, stage: int, first: int, end: int, choices: Callable[[], Sequence[Choice]]) -> StageChoice:
        """Return the stage without intervals where that fits, else with the first of `choices` that fits.
        choices: each recomputes or offloads the layers of the choice before, and more. It is assumed to need fewer
        bytes, so that bisection finds the first that fits. If the last choice does not fit, return the stage that lacks
        fewer bytes: with the last choice, or without intervals.
        """
        seconds, usable = self.seconds(first, end), self.usable[stage]

        def lack(intervals: Intervals) -> int:
            return max(0, self.peak(stage, first, end, intervals) - usable)

        kept = StageChoice(first, end, (), seconds, lack(()))
        candidates = choices() if kept.lack else ()
        if not candidates:
            return kept
        intervals, cost = candidates[-1]
        last = StageChoice(first, end, intervals, seconds + cost, lack(intervals))
        if last.lack:
            return min(kept, last, key=lambda choice: choice.lack)
        below, fits = -1, len(candidates) - 1
        while fits - below > 1:
            middle = (below + fits) // 2
            if lack(candidates[middle][0]):
                below = middle
            else:
                fits = middle
        intervals, cost = candidates[fits]
        return StageChoice(first, end, intervals, seconds + cost, 0)


def _peaks(ranges: RangeBytes, run: RunShape, devices: int) -> Callable[[int, int, int, Intervals], int]:
    """Return `Layerwise.peak`, cached for all searches with these bytes, since it does not depend on capacities."""
    return ranges.once(("peaks", run, devices), lambda: functools.cache(_Peaks(ranges, run, devices)))


class _Peaks:
    """Computes the bytes of one stage of a pipeline by the fold of its rank, where all other stages keep everything.
    The fold needs the rank's list and, for messages on their way, the lists of its two neighbours.
    """

    def __init__(self, ranges: RangeBytes, run: RunShape, devices: int) -> None:
        self._ranges, self._run, self._devices = ranges, run, devices
        self._units = Units(run.microbatches, None, run.num_blocks)
        self._lists: dict[tuple[int, bool, bool], Schedule] = {}

    def __call__(self, stage: int, first: int, end: int, intervals: Intervals) -> int:
        plan_stage = PlanStage(((first, end),), (stage,), memory=intervals)
        key = stage, plan_stage.recomputes(self._run), plan_stage.offloads
        if key not in self._lists:
            self._lists[key] = self._near(*key)
        before, after = stage > 0, stage < self._devices - 1
        cuts = [*([0] if before else []), first, *([end] if after else [])]
        ends = [*cuts[1:], self._ranges.num_layers]
        stages = [PlanStage(((cut, until),), (rank,)) for rank, (cut, until) in enumerate(zip(cuts, ends, strict=True))]
        stages[before] = replace(plan_stage, ranks=(int(before),))
        return fold(self._ranges, stages, self._units, self._lists[key], self._run, only=int(before))[0].peak_bytes

    def _near(self, stage: int, recomputes: bool, offloads: bool) -> Schedule:
        """Return the lists of the stage's rank and its neighbours, with stages counted from the first of these."""
        run, selected = self._run, [number == stage for number in range(self._devices)]
        graph = StageGraph.line(self._devices, run.microbatches)
        again, moved = ([is_selected and does for is_selected in selected] for does in (recomputes, offloads))
        schedule, low = schedule_of(run.schedule, graph, again, offload=moved, k=run.k), max(0, stage - 1)
        return [
            [action_of(action.stage - low, action.kind, action.microbatch) for action in row]
            for row in schedule[low : stage + 2]
        ]


def _input(ranges: RangeBytes, layer: int) -> int:
    """Return the bytes that a recomputed layer keeps: the tensors that it reads."""
    return max(0, ranges.crossing[layer] - ranges.passed(layer, layer + 1))


def _once(ranges: RangeBytes, first: int, end: int) -> int:
    work = max(ranges.forward(first, end), ranges.backward(first, end, True).peak)
    return ranges.resident(range(first, end)) + work
