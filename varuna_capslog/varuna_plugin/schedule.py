"""The task list of one Varuna stage, as Varuna's own `genschedule` prints it.

Replaces the call of that binary, which an ordinary installation does not contain: without it Varuna's list is empty and
a step trains nothing. The rules below are those of Microsoft's generator (time in equal quanta, one task per stage and
quantum); lists recorded from the real one are the test. Our own generator, `schedules.generators`, follows
the paper and gives other lists.
"""

from __future__ import annotations

from collections import deque

from varuna_capslog.base.errors import CapslogError

__all__ = ["BACKWARD", "FORWARD", "RECOMPUTE", "varuna_tasks"]

FORWARD, RECOMPUTE, BACKWARD = 0, 1, 2
"""The numbers by which Varuna's executor knows its tasks."""

_WEIGHTS = 3
"""The second half of a backward: takes a quantum, is not printed."""


def varuna_tasks(num_microbatches: int, stage: int, num_stages: int) -> list[tuple[int, int]]:
    """(task, microbatch) of one stage, in order; microbatches count from 0.

    In each quantum a stage takes its most urgent waiting task: a weight half before a backward before a recomputation
    before a forward, the oldest first. What that makes possible waits from the next quantum on:

    - a forward: the next stage's forward, on the last stage its own backward;
    - a backward: its own weight half, and the recomputation of the stage before;
    - a recomputation: its own backward.

    Raises CapslogError for numbers that make no pipeline.
    """
    if num_microbatches < 1 or not 0 <= stage < num_stages:
        raise CapslogError(
            f"{num_microbatches} microbatches, stage {stage} of {num_stages}: at least one microbatch and a stage "
            "below the number of stages are needed"
        )
    last = num_stages - 1
    waiting: list[dict[int, deque[int]]] = [
        {kind: deque() for kind in (_WEIGHTS, BACKWARD, RECOMPUTE, FORWARD)} for _ in range(num_stages)
    ]
    waiting[0][FORWARD].extend(range(num_microbatches))
    tasks: list[tuple[int, int]] = []
    while True:
        taken: list[tuple[int, int, int]] = []
        for place, queues in enumerate(waiting):
            kind = next((kind for kind, queue in queues.items() if queue), None)
            if kind is not None:
                taken.append((place, kind, queues[kind].popleft()))
        if not taken:
            return tasks
        for place, kind, microbatch in taken:
            if place == stage and kind != _WEIGHTS:
                tasks.append((kind, microbatch))
            if kind == FORWARD:
                waiting[min(place + 1, last)][FORWARD if place < last else BACKWARD].append(microbatch)
            elif kind == RECOMPUTE:
                waiting[place][BACKWARD].append(microbatch)
            elif kind == BACKWARD:
                waiting[place][_WEIGHTS].append(microbatch)
                if place > 0:
                    waiting[place - 1][RECOMPUTE].append(microbatch)
