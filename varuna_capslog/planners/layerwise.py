"""What planners ask that choose cuts and, layer by layer, what each stage keeps: `budget`, `dawnpiper`, `vpipe`.

A stage is one range of layers on one device. A layer is kept, runs again, or leaves for the host tier by itself, so
that each is a memory interval of its own. The bytes of a stage are those of `memory/fold`, with the run's own schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.fold import fold
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Action, RunShape, Schedule, StageGraph, in_flight_limits, schedule_of

__all__ = ["Choice", "Intervals", "Layerwise", "Question", "StageChoice"]

Intervals = tuple[MemoryInterval, ...]

Choice = tuple[Intervals, float]
"""What a stage does with its layers, and the seconds per microbatch that it costs."""


@dataclass(frozen=True)
class StageChoice:
    """Layers first .. end-1 as one stage.

    seconds: of one microbatch, forward and backward, with what the intervals cost.
    lack: bytes by which the stage exceeds its device; 0 where it fits.
    in_flight: most calls in flight; None: the schedule's own limit.
    """

    first: int
    end: int
    intervals: Intervals
    seconds: float
    lack: int
    in_flight: int | None = None


@dataclass(frozen=True)
class Question:
    """The bytes of any layers, their seconds, and the run of one pipeline."""

    ranges: RangeBytes
    seconds: LayerSeconds
    run: RunShape


@dataclass(frozen=True)
class Layerwise:
    """A chain of L layers for S devices.

    forward, backward: [L] seconds of one microbatch.
    freed: [L] bytes that a microbatch in flight holds less where the layer alone runs again.
    moved: [L] bytes that it holds less where the layer's saved tensors are in the host tier; all 0 where the tier is
        the device's own memory.
    in_flight: [S] microbatches that the schedule has in flight on each stage.
    usable: [S] bytes that each stage may hold; `NEVER` where there is no limit.
    peak: (stage, first, end, intervals) -> the most bytes that a stage holds.
    once: (first, end) -> the most bytes that layers first .. end-1 hold of one microbatch alone.
    transfer: [L + 1] seconds of a message over each cut.
    crossing: [L + 1] names of the tensors that cross each cut; None where they are not known.
    host_bandwidth: bytes per second between a device and its host tier; None: copies take no time.
    copies_beside: copies run beside the computation; else they take the device's own time.
    copied: [L] bytes that a simulated step counts for the copy of a layer's saved tensors. entering: [L + 1] bytes of
        the tensors across each cut, which it counts where an interval runs again from the host tier.
    swaps_within_calls: saved tensors can leave the device before their call has ended.
    speeds: [S] of the devices, above 0 and at most 1, so that no stage is quicker than its seconds; None: all 1.
    question: what these numbers were made of, for planners that ask more.
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
        """The numbers of a profile.

        Args:
            run: of one pipeline; its number of microbatches is known.
            usable: bytes that a stage may hold on each device; None: no limit.
            link: between neighbouring stages, and to the host tier; None: transfers and copies take no time.
            has_tier: what is offloaded leaves the device's memory.
            speeds: of the devices, each at most 1.

        Raises CapslogError naming the seconds, bytes or runs that the profile lacks.
        """
        link = link or Link()
        seconds, ranges = LayerSeconds.of_profile(profile, link), RangeBytes(profile, RANKS, run.recomputes)
        layers = range(profile.num_layers)
        beside = link.copies_beside
        if beside is None:  # on a CPU a copy takes its rank's core, as in `planning/simulation`
            beside = not ranges.one_memory
        crossing, entering = None, [0] * (profile.num_layers + 1)
        if profile.tensors:
            lives = [(one, -1 if one.writer is None else one.writer, one.readers[-1]) for one in profile.tensors]
            across = [
                [one for one, writer, last in lives if writer < cut <= last] for cut in range(profile.num_layers + 1)
            ]
            crossing = [frozenset(one.name for one in row) for row in across]
            entering = [sum(one.bytes for one in row) for row in across]
        return cls(
            profile.column("forward_seconds"),
            profile.column("backward_seconds"),
            [max(0, ranges.saved(at, at + 1) - _input(ranges, at)) for at in layers],
            [ranges.moved(at, at + 1) if has_tier else 0 for at in layers],
            in_flight_limits(run.schedule, devices, run.microbatches, run.k),
            [NEVER] * devices if usable is None else list(usable),
            functools.cache(_Peaks(ranges, run, devices)),
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
        """The same chain in a run with another schedule."""
        assert self.question is not None, "made by Layerwise.of_profile"
        run = replace(self.question.run, schedule=schedule)
        return replace(
            self,
            in_flight=in_flight_limits(schedule, self.stages, run.microbatches, run.k),
            peak=functools.cache(_Peaks(self.question.ranges, run, self.stages)),
            question=replace(self.question, run=run),
        )

    def with_waiting_moments(self) -> Layerwise:
        """The same chain where the optimizer's moments of all layers wait in the host tier."""
        assert self.question is not None, "made by Layerwise.of_profile"
        ranges = self.question.ranges.with_waiting_moments()
        return replace(
            self,
            peak=functools.cache(_Peaks(ranges, self.question.run, self.stages)),
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
        """T_x: the forward and backward of one microbatch."""
        return sum(self.forward[first:end]) + sum(self.backward[first:end])

    def choice(self, first: int, end: int, intervals: Intervals) -> StageChoice:
        """The stage with these intervals; its seconds count all that runs again, and it is taken to fit."""
        again = sum(sum(self.forward[one.first : one.end]) for one in intervals if one.recomputes)
        return StageChoice(first, end, intervals, self.seconds(first, end) + again, 0)

    def moved_on(self, stage: int, layer: int) -> int:
        """`moved` where a layer of a stage can wait in the host tier between its forward and its backward, else 0."""
        return self.moved[layer] if self.swaps_within_calls or self.in_flight[stage] > 1 else 0

    def copy_seconds(self, layer: int) -> float:
        """One copy of what a layer saves of one microbatch, in one direction."""
        return 0.0 if self.host_bandwidth is None else self.moved[layer] / self.host_bandwidth

    def fewest(self, stage: int, first: int, end: int, choices: Callable[[], Sequence[Choice]]) -> StageChoice:
        """The stage with nothing treated where that fits, else with the first of `choices` that does.

        choices: each treats all that the one before does, and more; taken to need less and less, so that the first that
            fits is found by bisection. Where the last does not fit, it is the answer if it lacks less than nothing
            treated.
        """
        own, usable = self.seconds(first, end), self.usable[stage]

        def lack(intervals: Intervals) -> int:
            return max(0, self.peak(stage, first, end, intervals) - usable)

        kept = StageChoice(first, end, (), own, lack(()))
        found = choices() if kept.lack else ()
        if not found:
            return kept
        intervals, cost = found[-1]
        last = StageChoice(first, end, intervals, own + cost, lack(intervals))
        if last.lack:
            return min(kept, last, key=lambda one: one.lack)
        below, fits = -1, len(found) - 1
        while fits - below > 1:
            middle = (below + fits) // 2
            if lack(found[middle][0]):
                below = middle
            else:
                fits = middle
        intervals, cost = found[fits]
        return StageChoice(first, end, intervals, own + cost, 0)


class _Peaks:
    """The bytes of one stage of a pipeline, by the fold of its rank; the other stages keep everything.

    A rank's bytes depend on its own list, and by what is on its way on those of its two neighbours: only these are
    folded.
    """

    def __init__(self, ranges: RangeBytes, run: RunShape, devices: int) -> None:
        self._ranges, self._run, self._devices = ranges, run, devices
        self._units = Units(run.microbatches, None, run.num_blocks)
        self._lists: dict[tuple[int, bool, bool], Schedule] = {}

    def __call__(self, stage: int, first: int, end: int, intervals: Intervals) -> int:
        own = PlanStage(((first, end),), (stage,), memory=intervals)
        key = stage, own.recomputes(self._run), own.offloads
        if key not in self._lists:
            self._lists[key] = self._near(*key)
        before, after = stage > 0, stage < self._devices - 1
        cuts = [*([0] if before else []), first, *([end] if after else [])]
        ends = [*cuts[1:], self._ranges.num_layers]
        stages = [PlanStage(((cut, until),), (rank,)) for rank, (cut, until) in enumerate(zip(cuts, ends, strict=True))]
        stages[before] = replace(own, ranks=(int(before),))
        return fold(self._ranges, stages, self._units, self._lists[key], self._run, only=int(before))[0].peak_bytes

    def _near(self, stage: int, recomputes: bool, offloads: bool) -> Schedule:
        """The lists of the stage's rank and its neighbours, counted from the first of them."""
        run, own = self._run, [number == stage for number in range(self._devices)]
        graph = StageGraph.line(self._devices, run.microbatches)
        again, moved = ([one and does for one in own] for does in (recomputes, offloads))
        schedule, low = schedule_of(run.schedule, graph, again, offload=moved, k=run.k), max(0, stage - 1)
        return [[Action(one.stage - low, one.kind, one.microbatch) for one in row] for row in schedule[low : stage + 2]]


def _input(ranges: RangeBytes, layer: int) -> int:
    """What stays of a layer that runs again: the tensors that it reads."""
    return max(0, ranges.crossing[layer] - ranges.passed(layer, layer + 1))


def _once(ranges: RangeBytes, first: int, end: int) -> int:
    work = max(ranges.forward(first, end), ranges.backward(first, end, True).most)
    return ranges.resident(range(first, end)) + work
