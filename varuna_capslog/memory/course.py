"""Bytes of a stage at every moment of a step, from the timed actions of a schedule.

    bytes(t) = static + live graphs * saved + waiting inputs * input + working bytes of the running action

This is the equation of `memory.inflight` over time, for stages that are kept or recomputed as a whole, less the outputs
sent ahead, which wait beside the stage only on the CPU. A graph is held from the F or R that builds it to B, an input
until its R. While an action builds or consumes a graph, that graph counts as `working_bytes`, so that a stage with one
graph peaks at exactly the bytes of its memory model. Levels change when actions begin and end.
"""

from __future__ import annotations

__all__ = ["Course", "StageMemory", "fold_course", "memory_courses", "peak_of", "stage_memory"]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import additive, inflight
from varuna_capslog.memory.fold import RankFold
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, TimedAction, graph_keeping_forwards

Course: TypeAlias = list[tuple[float, int]]
"""(seconds since the step's begin, bytes from then on), in time order; two entries may have one time."""


@dataclass(frozen=True)
class StageMemory:
    """Parts of one stage's bytes, for one microbatch. static_bytes: parameters, gradients, optimizer state and buffers:
    always there. saved_bytes: a waiting graph. working_bytes: peak beside `static_bytes` while one graph is built or
    consumed, that graph included. bare_bytes: the same in a forward without a graph. input_bytes: an input that waits
    for its recomputation; 0 where it waits on the host.
    """

    static_bytes: int
    saved_bytes: int
    working_bytes: int
    bare_bytes: int
    input_bytes: int = 0


def stage_memory(profile: Profile, stages: Sequence[tuple[int, int]], run: RunShape) -> list[StageMemory] | str:
    """Return the parts of the bytes of each stage of layers (first, end), or a sentence naming what the profile lacks.
    They come from the schedule's memory model where the profile has the runs of single layers and pairs; otherwise they
    are sums over the layers, with the additive model's peak for one graph.
    """
    layers = profile.layers
    if any(layer.static_bytes is None or layer.saved_bytes is None for layer in layers):
        return "the profile has no static_bytes or saved_bytes of every layer"
    on_device = run.stage_inputs == "device" or profile.conditions.get("device") == "cpu"
    costs: inflight.InflightCosts | None
    try:
        costs = inflight.stage_costs(run.schedule, profile, run)
    except CapslogError:
        costs = None
    sums = additive.stage_costs(profile, run)
    memories = []
    for first, end in stages:
        static = sum(layer.static_bytes or 0 for layer in layers[first:end])
        if costs is None:
            peak, saved = sums.stage_bytes(first, end), sum(layer.saved_bytes or 0 for layer in layers[first:end])
            inputs = (layers[first - 1].boundary_bytes or 0) if first else 0
        else:
            peak, saved = int(costs.alone[first, end]), int(costs.saved[first, end])
            inputs = int(costs.inputs[first, end])
        working = max(0, peak - static)
        alone = max(layer.isolated_bytes - (layer.static_bytes or 0) for layer in layers[first:end])
        memories.append(StageMemory(static, saved, working, min(working, max(0, alone)), inputs if on_device else 0))
    return memories


def memory_courses(
    timed: Iterable[Iterable[TimedAction]], schedule: Schedule, stages: Sequence[StageMemory]
) -> list[Course]:
    """Return the bytes of every stage over one step. timed: each rank's actions in order. schedule: the same actions,
    which tell the forwards that keep their graph.
    """
    keeping = graph_keeping_forwards(schedule)
    courses = []
    for stage, parts in enumerate(stages):
        actions = [timed_action for row in timed for timed_action in row if timed_action.action.stage == stage]
        courses.append(_course(actions, keeping, parts))
    return courses


def fold_course(timed: Sequence[TimedAction], fold: RankFold) -> Course:
    """Return the bytes of a rank over one step, under any plan: during each action, and between actions. timed: the
    actions of the rank's list in order, then its updates, during which `fold.end_bytes` counts; without updates it
    counts from the last action's end. fold: of that list.
    """
    course, ended = [(0.0, fold.between_bytes[0])], 0.0
    for timed_action, during, after in zip(timed, fold.bytes, fold.between_bytes[1:], strict=False):
        if timed_action.start_seconds == ended and len(course) > 1:
            course.pop()  # the level between two actions without a pause
        course += [(timed_action.start_seconds, during), (timed_action.end_seconds, after)]
        ended = timed_action.end_seconds
    updates = timed[len(fold.bytes) :]
    return [*course, (updates[0].start_seconds if updates else ended, fold.end_bytes)]


def peak_of(course: Course) -> int:
    """Return the peak bytes of a course."""
    return max(size for _, size in course)


def _course(actions: Sequence[TimedAction], keeping: set[tuple[int, int]], parts: StageMemory) -> Course:
    graphs: set[int] = set()
    inputs: set[int] = set()
    course: Course = [(0.0, parts.static_bytes)]
    ended: float | None = None  # when the last action ended, where it took any time

    def held() -> int:
        return parts.static_bytes + len(graphs) * parts.saved_bytes + len(inputs) * parts.input_bytes

    def note(seconds: float, size: int, after_end: bool = False) -> None:
        if after_end and len(course) > 1 and course[-1][0] == seconds:
            course.pop()  # the level between two actions without a pause
        if size != course[-1][1]:
            course.append((seconds, size))

    for timed_action in actions:
        kind, microbatch = timed_action.action.kind, timed_action.action.microbatch
        during = held()
        if microbatch is not None:
            if kind == "R" or (kind == "F" and (timed_action.action.stage, microbatch) in keeping):
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
        note(timed_action.start_seconds, during, after_end=timed_action.start_seconds == ended)
        note(timed_action.end_seconds, held())
        ended = timed_action.end_seconds if timed_action.end_seconds > timed_action.start_seconds else None
    return course
