"""Derives the allocator's events of a rank's long step from those of a step of a few microbatches.

Each instruction of a program has a context: its kind, the two instructions before it, and whether gradients exist, its
microbatch keeps its graph, and it is the last one. Instructions of one context allocate the same sizes and release the
same tensors, named by the instruction that made them. So a short step with all contexts of a longer step gives all its
events, also where many more microbatches wait. Where two instructions of one context differ, or a name does not lead to
a live tensor, the result is None, and the caller rehearses a longer step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import EngineOptions
from varuna_capslog.plans.parts import PlanStage, scheduled
from varuna_capslog.profiling.estimation.allocator import Event
from varuna_capslog.schedules import backwards_at_once
from varuna_capslog.schedules.actions import Action
from varuna_capslog.schedules.lower import Instruction, Recv, lower

__all__ = ["Doing", "ShortPipeline", "doing_of", "short_pipeline", "stretched"]

Doing: TypeAlias = tuple[str, str | None]
"""Kind of an instruction: ("act", kind of the action), or ("receive" or "send", kind of the message)."""

_FORWARD: Doing = ("act", "F")
_BACKWARD: Doing = ("act", "B")
_BEFORE = 2
"""Number of earlier instructions in a context: what an action leaves is released by the next action at the latest."""
_NEAR = 3
"""Largest distance, in instructions, by which the maker of a tensor is named."""


def doing_of(instruction: Instruction) -> Doing:
    """Return the kind of an instruction, without its microbatch."""
    if isinstance(instruction, Action):
        return "act", instruction.kind
    return ("receive" if isinstance(instruction, Recv) else "send"), instruction.message.kind


def contexts_of(program: Sequence[Instruction]) -> list[object]:
    """Return the context of each instruction of a rank's program (one stage, one microbatch a call)."""
    steps, backwards, contexts = _steps_of(program), 0, list[object]()
    at_once = backwards_at_once([instruction for instruction in program if isinstance(instruction, Action)])
    kept = {microbatch for _, microbatch in at_once}  # their forwards keep the graph for the backward
    for place, (doing, microbatch) in enumerate(steps):
        before = tuple((near, number == microbatch) for near, number in steps[max(place - _BEFORE, 0) : place])
        backward, last = doing == _BACKWARD, place + 1 == len(steps)
        # the first backward makes the gradients; the last instruction is followed by the end of the step
        contexts.append((doing, before, backward and backwards > 0, microbatch in kept, last))
        backwards += backward
    return contexts


def _steps_of(program: Sequence[Instruction]) -> list[tuple[Doing, int | None]]:
    return [
        (
            doing_of(instruction),
            instruction.microbatch if isinstance(instruction, Action) else instruction.message.downstream[1],
        )
        for instruction in program
    ]


@dataclass(frozen=True)
class ShortPipeline:
    """Pipeline of two to four stages, one of which is a given stage, and its step.

    rank: of the given stage. program: of this rank.
    """

    layout: Layout
    options: EngineOptions
    rank: int
    program: Sequence[Instruction]


_SCHEDULE = "1f1b"


def short_pipeline(
    stage: PlanStage, num_layers: int, options: EngineOptions, program: Sequence[Instruction]
) -> ShortPipeline | None:
    """Return the pipeline with the fewest microbatches whose program for `stage` has all contexts of `program`; None
    where no pipeline has. Its schedule may differ from that of `program`.
    """
    wanted = set(contexts_of(program))
    for microbatches in range(2, sum(doing == _FORWARD for doing, _ in _steps_of(program))):
        for schedule in dict.fromkeys((_SCHEDULE, options.schedule)):
            short = dataclasses.replace(options, num_microbatches=microbatches, schedule=schedule)
            for below in range(1, min(2, num_layers - stage.end) + 1):
                pipeline = _pipeline(stage, num_layers, short, below)
                if wanted <= set(contexts_of(pipeline.program)):
                    return pipeline
    return None


def _pipeline(stage: PlanStage, num_layers: int, options: EngineOptions, below: int) -> ShortPipeline:
    """Return the pipeline of a stage, one stage before it, if it is not the first, and `below` stages behind it."""
    rank = 1 if stage.first else 0
    cuts = [*([0] if rank else []), stage.first, *range(stage.end, stage.end + below)]
    stages = list(Layout.pipelines(cuts, num_layers).stages)
    stages[rank] = dataclasses.replace(stage, ranks=(rank,), in_flight=None)
    layout = Layout(tuple(stages))
    graph = layout.graph(options.num_microbatches)
    program = lower(scheduled(options.schedule, layout.stages, graph, options), None, graph).programs[rank]
    return ShortPipeline(layout, options, rank, program)


_Maker: TypeAlias = tuple[str, object]
"""Name of the instruction that made a tensor, relative to the instruction that releases the tensor."""


@dataclass
class _Allocation:
    num_bytes: int


@dataclass
class _Release:
    """makers: all names of the instruction that made the tensor, the surest first. number: of its allocation."""

    makers: tuple[_Maker, ...]
    number: int


_Pattern: TypeAlias = list[_Allocation | _Release]


class _Course:
    """Instructions of a program, by name."""

    def __init__(self, program: Sequence[Instruction]) -> None:
        self._steps = _steps_of(program)
        self._places: dict[Doing, list[int]] = {}
        self._of_microbatch: dict[tuple[Doing, int | None], int] = {}
        for place, (doing, microbatch) in enumerate(self._steps):
            self._places.setdefault(doing, []).append(place)
            self._of_microbatch[doing, microbatch] = place

    def names(self, maker: int, place: int) -> Iterator[_Maker]:
        """Yield the names of instruction `maker`, relative to the instruction at `place`, the surest first."""
        doing, microbatch = self._steps[maker]
        if maker == place:
            yield "this", None
        if maker != place and microbatch == self._steps[place][1]:
            yield "same microbatch", doing
        if 0 < place - maker <= _NEAR:
            yield "back", place - maker
        earlier = self._earlier(doing, place)
        if maker in earlier[-2:]:
            yield ("latest", doing) if maker == earlier[-1] else ("second latest", doing)
        if maker == self._places[doing][0]:
            yield "first", doing

    def place_of(self, name: _Maker, place: int) -> int | None:
        """Return the place of the instruction with this name relative to `place`; None if there is none."""
        kind, of = name
        if kind == "this":
            return place
        if kind == "back":
            assert isinstance(of, int)
            return place - of if of <= place else None
        assert isinstance(of, tuple)
        if kind == "same microbatch":
            return self._of_microbatch.get((of, self._steps[place][1]))
        if kind == "first":
            return self._places[of][0] if of in self._places else None
        earlier, back = self._earlier(of, place), 1 if kind == "latest" else 2
        return earlier[-back] if len(earlier) >= back else None

    def _earlier(self, doing: Doing, place: int) -> list[int]:
        return [earlier for earlier in self._places.get(doing, ()) if earlier < place]


def stretched(
    events: Sequence[Event], starts: Sequence[int], short: Sequence[Instruction], whole: Sequence[Instruction]
) -> list[Event] | None:
    """Return the events of program `whole`, derived from those of program `short`; None where this is not possible.

    events, starts: of the short step; `starts` has the number of events before each instruction. The events after the
        last instruction (sums over ranks, the update) are those of the short step.
    """
    patterns = _patterns(events, starts, short)
    if patterns is None:
        return None
    course, made = _Course(whole), list[Event](events[: starts[0]])
    live = dict(_live(made))
    keys: dict[tuple[int, int], int] = {}
    newest = max((abs(key) for key, _ in events), default=0)
    for place, context in enumerate(contexts_of(whole)):
        pattern, number = patterns.get(context), 0
        if pattern is None:
            return None
        for part in pattern:
            if isinstance(part, _Allocation):
                newest += 1
                keys[place, number] = newest
                number += 1
                live[newest] = part.num_bytes
                made.append((newest, part.num_bytes))
                continue
            key = _released(part, course, place, keys, live)
            if key is None:
                return None
            del live[key]
            made.append((key, 0))
    return made if Counter(live.values()) == Counter(dict(_live(events)).values()) else None


def _released(
    part: _Release, course: _Course, place: int, keys: Mapping[tuple[int, int], int], live: Mapping[int, int]
) -> int | None:
    """Return the key of the live tensor that a release names; None where no name leads to a live tensor."""
    for name in part.makers:
        if name[0] == "before":
            key: int | None = part.number
        else:
            maker = course.place_of(name, place)
            key = None if maker is None else keys.get((maker, part.number))
        if key in live:
            return key
    return None


def _live(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Yield keys and bytes of the allocations that are not released."""
    live: dict[int, int] = {}
    for key, num_bytes in events:
        if num_bytes:
            live[key] = num_bytes
        else:
            del live[key]
    yield from live.items()


def _patterns(
    events: Sequence[Event], starts: Sequence[int], program: Sequence[Instruction]
) -> dict[object, _Pattern] | None:
    """Return the events of each context; None where instructions of one context differ."""
    course, makers = _Course(program), dict[int, tuple[int, int]]()
    patterns: dict[object, _Pattern] = {}
    for place, (context, start, end) in enumerate(
        zip(contexts_of(program), starts, [*starts[1:], len(events)], strict=True)
    ):
        pattern, number = _Pattern(), 0
        for key, num_bytes in events[start:end]:
            if num_bytes:
                makers[key] = place, number
                number += 1
                pattern.append(_Allocation(num_bytes))
            elif key in makers:
                maker, of = makers.pop(key)
                pattern.append(_Release(tuple(course.names(maker, place)), of))
            else:
                pattern.append(_Release((("before", None),), key))
        both = _common(patterns[context], pattern) if context in patterns else pattern
        if both is None:
            return None
        patterns[context] = both
    return patterns


def _common(first: _Pattern, second: _Pattern) -> _Pattern | None:
    """Return the events of two instructions of one context, with the names that hold for both; None if they differ."""
    if len(first) != len(second):
        return None
    common = _Pattern()
    for part, counterpart in zip(first, second, strict=True):
        if isinstance(part, _Release) and isinstance(counterpart, _Release):
            makers = tuple(name for name in part.makers if name in counterpart.makers)
            if not makers or part.number != counterpart.number:
                return None
            common.append(_Release(makers, part.number))
        elif part != counterpart:
            return None
        else:
            common.append(part)
    return common
