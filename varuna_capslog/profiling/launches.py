"""The three orders in which a profile's real runs are launched, and what each of them took.

`packed` (ours): all 2L-1 stage runs in one launch, spread over the workers there are. `capslog`: that paper's trimmed
partitionings (Sec. III-A), one launch of new processes after the other, the GPUs that are read in parallel. `mcap`:
whole pipelines, one after the other. `measure` prepares the runs and makes the profile of what comes back.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiles.runs import StageRun, capslog_partitionings, mcap_partitionings
from varuna_capslog.profiling.conditions import Progress
from varuna_capslog.profiling.pipelines import PipelineLaunch, measure_pipeline
from varuna_capslog.profiling.worker import Task, WorkerFailure, WorkerGroup, Workers

__all__ = ["LaunchTimes", "devices_of", "failures_named", "in_capslog_order", "in_mcap_order", "in_one_launch"]


@dataclass
class LaunchTimes:
    """When stage runs began and ended: (worker, from, to) in seconds, a list per launch; and how many rounds it took.

    Attributes:
        began: when the profile was asked for.
    """

    began: float = field(default_factory=time.perf_counter)
    launches: list[list[tuple[int, float, float]]] = field(default_factory=list)

    def report(self, order: str, workers: int) -> dict[str, Any]:
        """What the profile tells of it: the paper's |P| is `launches`, its Mean, Total and E2E are the seconds.

        A round is what one worker does at a time: a launch of the two papers, or a stage run of the packed order.
        """
        total = sum(max(end for _, _, end in runs) - min(begin for _, begin, _ in runs) for runs in self.launches)
        rounds = sum(max(Counter(worker for worker, _, _ in runs).values()) for runs in self.launches)
        return {
            "order": order,
            "workers": workers,
            "launches": len(self.launches),
            "stage_runs": sum(len(runs) for runs in self.launches),
            "rounds": rounds,
            "mean_seconds": round(total / rounds, 4),
            "total_seconds": round(total, 3),
            "end_to_end_seconds": round(time.perf_counter() - self.began, 3),
        }


def devices_of(kind: str, workers: int) -> list[torch.device]:
    """The device of each worker: the CPU, or the GPUs in turn."""
    if kind == "cpu":
        return [torch.device("cpu")] * workers
    return [torch.device("cuda", worker % torch.cuda.device_count()) for worker in range(workers)]


@contextlib.contextmanager
def failures_named(names: Sequence[str]) -> Iterator[None]:
    """Around all runs of a profile: turns a `WorkerFailure` into an error that names the run's layers."""
    try:
        yield
    except WorkerFailure as error:
        where = "a profiling worker"
        if error.run is not None:
            where = f"the run of {_name((error.run.first, error.run.end), names)}"
        raise CapslogError(f"{where} failed: {error}; nothing was kept of this profile") from error


def in_one_launch(
    tasks: Sequence[Task], group: WorkerGroup, workers: Workers, clock: LaunchTimes, progress: Progress
) -> dict[StageRun, Observation]:
    """Carry out trimmed runs on the workers there are, as many at once as fit into what is free before the first.

    Raises:
        DoesNotFit: a run needs more than there is; nothing is tried then.
        WorkerFailure: a run failed.
    """
    devices, names = workers.devices, workers.names
    left = {device: workers.free_bytes(device) for device in set(devices)}
    too_big = [task for task in tasks if task[1] > max(left.values())]
    if too_big:
        raise DoesNotFit(_refusal(too_big, max(left.values()), names))
    progress(0, len(tasks), "starting")
    waiting = list(tasks)
    found: dict[StageRun, Observation] = {}
    begun: dict[int, float] = {}
    intervals: list[tuple[int, float, float]] = []
    while len(found) < len(tasks):
        for worker in list(group.idle):
            task = next((task for task in waiting if task[1] <= left[devices[worker]]), None)
            if task is not None:
                waiting.remove(task)
                left[devices[worker]] -= task[1]
                begun[worker] = time.perf_counter()
                group.start(worker, task)
        for worker, (run, bound), result in group.finished():
            intervals.append((worker, begun[worker], time.perf_counter()))
            left[devices[worker]] += bound
            found[run.first, run.end] = result
            progress(len(found), len(tasks), _name((run.first, run.end), names))
    clock.launches.append(intervals)
    return found


def in_capslog_order(
    tasks: Sequence[Task], workers: Workers, clock: LaunchTimes, progress: Progress
) -> dict[StageRun, Observation]:
    """Carry out trimmed runs in the launches of CAPSlog, Sec. III-A, each with new processes.

    A GPU whose layers are trimmed away needs no process here, and a measured GPU whose neighbour is measured too gets
    dummies from its own companion all the same: to either it makes no difference where a tensor comes from.

    Raises as `in_one_launch`, and CapslogError for fewer than 3 workers when the layers outnumber them.
    """
    by_run = {(run.first, run.end): (run, bound) for run, bound in tasks}
    partitionings = capslog_partitionings(len(workers.names), len(workers.devices))
    found: dict[StageRun, Observation] = {}
    progress(0, len(partitionings), "starting")
    for number, partitioning in enumerate(partitionings, start=1):
        with workers.group(len(partitioning.measured)) as group:
            group.wait_until_ready()  # one that was early would take two runs, which are then not read in parallel
            mine = [by_run[run] for run in partitioning.runs]
            found |= in_one_launch(mine, group, workers, clock, lambda *_: None)
        progress(number, len(partitionings), f"pipeline {list(partitioning.layers_per_gpu)}")
    return found


def in_mcap_order(
    specs: Sequence[Mapping[str, TensorSpec]],
    goal: tuple[Any, Mapping[str, float]],
    bound_bytes: Callable[[int, int], int],
    workers: Workers,
    clock: LaunchTimes,
    progress: Progress,
) -> dict[StageRun, Observation]:
    """Carry out mCAP's launches of whole pipelines; of a range that several launches measure the first one counts.

    Args:
        goal: targets and normalisers of the loss.
        bound_bytes: the most that a stage may take.

    Raises:
        DoesNotFit: a whole pipeline needs more than there is, as it did for the paper's dilated models.
        WorkerFailure: a rank failed.
        CapslogError: fewer than 3 workers when the layers outnumber them.
    """
    partitionings = mcap_partitionings(len(workers.names), len(workers.devices))
    found: dict[StageRun, Observation] = {}
    progress(0, len(partitionings), "starting")
    for number, partitioning in enumerate(partitionings, start=1):
        stages = partitioning.stages
        _refuse_what_does_not_fit(stages, workers, bound_bytes)
        pipeline = PipelineLaunch(tuple(stages), tuple(specs), *goal)
        begun = time.perf_counter()
        rows, seconds = measure_pipeline(pipeline, workers)
        ended = time.perf_counter()
        clock.launches.append([(rank, max(begun, ended - seconds), ended) for rank in range(len(stages))])
        for gpu in partitioning.measured:
            found.setdefault(rows[gpu].layers, rows[gpu])
        progress(number, len(partitionings), f"pipeline {list(partitioning.layers_per_gpu)}")
    return found


def _refuse_what_does_not_fit(
    stages: Sequence[StageRun], workers: Workers, bound_bytes: Callable[[int, int], int]
) -> None:
    needed: Counter[torch.device] = Counter()
    for stage, device in zip(stages, workers.devices, strict=False):
        needed[device] += bound_bytes(*stage)
    for device, most in needed.items():
        free = workers.free_bytes(device)
        if most > free:
            raise DoesNotFit(
                f"mCAP's launch of the whole pipeline {[end - first for first, end in stages]} may need up to "
                f"{format_bytes(most)} on {device}, where {format_bytes(free)} are free; profile.order=capslog or "
                "packed keeps one or two layers at a time"
            )


def _refusal(too_big: Sequence[Task], free: int, names: Sequence[str]) -> str:
    shown = ", ".join(
        f"{_name((run.first, run.end), names)} (up to {format_bytes(bound)})" for run, bound in too_big[:3]
    )
    more = f" and {len(too_big) - 3} more" if len(too_big) > 3 else ""
    return (
        f"these stages may not fit into the {format_bytes(free)} that are free, and none was tried: {shown}{more}; "
        "free memory, cut the model finer, or lower train.microbatch_size or profile.image_size"
    )


def _name(run: StageRun, names: Sequence[str]) -> str:
    return " + ".join(names[run[0] : run[1]])
