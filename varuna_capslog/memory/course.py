"""What a stage holds at every moment of a step, from the timed actions of a schedule.

    bytes(t) = static + live graphs * saved + waiting inputs * input + what the action under way needs besides

The simulation calls `memory_courses`. Between actions a stage holds graphs (from the F or R that built them to B) and
the inputs that wait for an R; while an action builds or consumes a graph, that graph counts with all it needs:
`working_bytes`, so that a stage with one graph peaks at exactly what its memory model says. This is the course of the
equation in `memory.inflight`; levels change at begins and ends of actions only.
"""

from __future__ import annotations

__all__ = ["Course", "StageMemory", "memory_courses", "peak_of"]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.schedules import Schedule, TimedAction, graph_keeping_forwards

Course: TypeAlias = list[tuple[float, int]]
"""(seconds since the step's begin, bytes from then on), in time order; two entries may have one time."""


@dataclass(frozen=True)
class StageMemory:
    """What one stage's bytes are made of, for one microbatch.

    static_bytes: parameters, gradients, optimizer state and buffers: always there.
    saved_bytes: a whole graph between forward and backward.
    working_bytes: the most beside `static_bytes` while one graph is built or consumed, that graph included.
    bare_bytes: the most beside `static_bytes` while a forward runs that keeps no graph.
    input_bytes: an input that waits for its recomputation; 0 where it waits on the host.
    """

    static_bytes: int
    saved_bytes: int
    working_bytes: int
    bare_bytes: int
    input_bytes: int = 0


def memory_courses(
    timed: Iterable[Iterable[TimedAction]], schedule: Schedule, stages: Sequence[StageMemory]
) -> list[Course]:
    """The bytes of every stage over one step.

    Args:
        timed: per rank, its actions in order.
        schedule: the same actions, which say what forwards keep their graph.
        stages: per stage.
    """
    keeping = graph_keeping_forwards(schedule)
    courses = []
    for stage, parts in enumerate(stages):
        actions = [one for row in timed for one in row if one.action.stage == stage]
        courses.append(_course(actions, keeping, parts))
    return courses


def peak_of(course: Course) -> int:
    """The most bytes of a course."""
    return max(size for _, size in course)


def _course(actions: Sequence[TimedAction], keeping: set[tuple[int, int]], parts: StageMemory) -> Course:
    graphs: set[int] = set()
    inputs: set[int] = set()
    away: set[int] = set()  # graphs that were offloaded
    course: Course = [(0.0, parts.static_bytes)]

    def held() -> int:
        return parts.static_bytes + len(graphs) * parts.saved_bytes + len(inputs) * parts.input_bytes

    def note(seconds: float, size: int) -> None:
        if size != course[-1][1]:
            course.append((seconds, size))

    for one in actions:
        kind, microbatch = one.action.kind, one.action.microbatch
        during = held()
        if microbatch is not None:
            if kind == "R" or (kind == "F" and (one.action.stage, microbatch) in keeping):
                inputs.discard(microbatch)
                during = held() + parts.working_bytes
                graphs.add(microbatch)
            elif kind == "F":
                during = held() + parts.bare_bytes
                inputs.add(microbatch)
            elif kind in "BIW":
                graphs.discard(microbatch)
                during = held() + parts.working_bytes
                if kind == "I":
                    graphs.add(microbatch)
            elif kind == "O" and microbatch in graphs:
                graphs.discard(microbatch)
                away.add(microbatch)
            elif kind == "L" and microbatch in away:
                away.discard(microbatch)
                graphs.add(microbatch)
                during = held()
        note(one.start_seconds, during)
        note(one.end_seconds, held())
    return course
