"""Converts a simulated step to a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The form is the Chrome trace event format: a process per rank with one thread for its computation, one per rank that it
sends to and one for copies that run beside the computation, a counter of bytes per stage, and an arrow per message from
the action that made it to the action that waits for it.
"""

from __future__ import annotations

__all__ = ["COPY_THREAD", "trace_events"]

from collections.abc import Iterator
from typing import Any

from varuna_capslog.planning.simulation import PipelineStep, Simulation
from varuna_capslog.schedules import KINDS, Action, TimedAction, TimedMessage

COMPUTE_THREAD = 0
"""Thread of a rank's actions; transfers to rank r are on thread r + 1."""

COPY_THREAD = 1_000_000
"""Thread of a rank's copies to and from the host tier."""

_MICROSECONDS = 1e6
_INSIDE = 1e-3
"""Microseconds that an arrow begins before its action's end: it belongs to the slice that it lies in."""


def trace_events(simulation: Simulation) -> dict[str, Any]:
    """Return the JSON value of a trace file; times in microseconds since the step's begin."""
    events: list[dict[str, Any]] = []
    for number, pipeline in enumerate(simulation.pipelines):
        events += _names(pipeline, number if len(simulation.pipelines) > 1 else None)
        events += _slices(pipeline)
        events += _counters(pipeline)
        events += _arrows(pipeline, f"{number}.")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": simulation.schedule,
            "num_microbatches": simulation.num_microbatches,
            "step_seconds": simulation.step_seconds,
            "bubble_fraction": simulation.bubble_fraction,
        },
    }


def _names(pipeline: PipelineStep, number: int | None) -> Iterator[dict[str, Any]]:
    of_pipeline = "" if number is None else f"pipeline {number}, "
    for rank, stages in zip(pipeline.ranks, pipeline.stage_of_row, strict=True):
        stage_text = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        yield _named("process_name", rank, 0, {"name": f"rank {rank} ({of_pipeline}{stage_text})"})
        yield _named("process_sort_index", rank, 0, {"sort_index": rank})
        yield _named("thread_name", rank, COMPUTE_THREAD, {"name": "compute"})
        yield _named("thread_sort_index", rank, COMPUTE_THREAD, {"sort_index": 0})
    for source, destination in sorted({_ends(pipeline, message) for message in pipeline.timeline.messages}):
        yield _named("thread_name", source, destination + 1, {"name": f"to rank {destination}"})
        yield _named("thread_sort_index", source, destination + 1, {"sort_index": destination + 1})
    for rank in sorted({pipeline.ranks[copy.rank] for copy in pipeline.timeline.copies}):
        yield _named("thread_name", rank, COPY_THREAD, {"name": "host tier"})
        yield _named("thread_sort_index", rank, COPY_THREAD, {"sort_index": COPY_THREAD})


def _named(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _ends(pipeline: PipelineStep, message: TimedMessage) -> tuple[int, int]:
    return pipeline.ranks[message.source], pipeline.ranks[message.destination]


def _slices(pipeline: PipelineStep) -> Iterator[dict[str, Any]]:
    for rank, row in zip(pipeline.ranks, pipeline.timeline.actions, strict=True):
        for timed in row:
            action = timed.action
            place = {"name": str(action), "cat": KINDS[action.kind], "pid": rank, "tid": COMPUTE_THREAD}
            yield _slice(timed, place, {"stage": action.stage, "microbatch": action.microbatch})
    for copy in pipeline.timeline.copies:
        action = copy.action
        place = {"name": str(action), "cat": "copy", "pid": pipeline.ranks[copy.rank], "tid": COPY_THREAD}
        yield _slice(copy, place, {"stage": action.stage, "microbatch": action.microbatch})
    for sent in pipeline.timeline.messages:
        message, (source, destination) = sent.message, _ends(pipeline, sent)
        name = f"{message.kind} {message.downstream[1]}"
        place = {"name": name, "cat": "transfer", "pid": source, "tid": destination + 1}
        source_stage, target_stage = message.way
        arguments = {"from_stage": source_stage, "to_stage": target_stage, "microbatch": message.downstream[1]}
        yield _slice(sent, place, arguments)


def _slice(timed: TimedAction | TimedMessage, place: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    begin, length = timed.start_seconds * _MICROSECONDS, (timed.end_seconds - timed.start_seconds) * _MICROSECONDS
    return {"ph": "X", **place, "ts": begin, "dur": length, "args": arguments}


def _counters(pipeline: PipelineStep) -> Iterator[dict[str, Any]]:
    rank_of = {stage: rank for rank, row in zip(pipeline.ranks, pipeline.stage_of_row, strict=True) for stage in row}
    for stage, course in enumerate(pipeline.memory or []):
        for seconds, size in course:
            yield {
                "ph": "C",
                "name": f"memory of stage {stage}",
                "pid": rank_of[stage],
                "ts": seconds * _MICROSECONDS,
                "args": {"bytes": size},
            }


def _arrows(pipeline: PipelineStep, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield a pair of flow events per message whose two actions take time; an action of no duration gets no arrow."""
    timed: dict[Action, tuple[int, TimedAction]] = {
        timed_end.action: (rank, timed_end)
        for rank, row in zip(pipeline.ranks, pipeline.timeline.actions, strict=True)
        for timed_end in row
    }
    for number, sent in enumerate(pipeline.timeline.messages):
        message = sent.message
        kinds = "F" if message.kind == "activation" else "BI"
        ends = [
            next(timed[key] for kind in kinds if (key := Action(stage, kind, call)) in timed)
            for stage, call in (message.end(sends=True), message.end(sends=False))
        ]
        (source, made), (destination, waits) = ends
        lengths = [(timed_end.end_seconds - timed_end.start_seconds) * _MICROSECONDS for timed_end in (made, waits)]
        if min(lengths) <= 0:
            continue
        common = {"name": message.kind, "cat": "message", "id": f"{prefix}{number}"}
        begin = made.end_seconds * _MICROSECONDS - min(_INSIDE, lengths[0] / 2)
        yield {**common, "ph": "s", "pid": source, "tid": COMPUTE_THREAD, "ts": begin}
        end = waits.start_seconds * _MICROSECONDS
        yield {**common, "ph": "f", "bp": "e", "pid": destination, "tid": COMPUTE_THREAD, "ts": end}
