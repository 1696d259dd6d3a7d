"""Real runs of every layer and every pair of neighbours, into a `Profile`.

`capslog profile` and `prepare` call this. It decides which runs are needed, has them launched (`launches`), and
computes M_i and M_a from what comes back (CAPSlog, Sec. III-A). It never touches a layer itself.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.probe import CPU_SOURCE, CUDA_SOURCE
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling import admission, cache
from varuna_capslog.profiling.admission import BoundTable
from varuna_capslog.profiling.conditions import Progress, RunConditions, conditions_of_run, profile_of, shapes_of
from varuna_capslog.profiling.launches import (
    LaunchTimes,
    devices_of,
    failures_named,
    in_capslog_order,
    in_mcap_order,
    in_one_launch,
)
from varuna_capslog.profiling.skeleton import skeleton
from varuna_capslog.profiling.trim import TrimmedRun
from varuna_capslog.profiling.worker import FreeBytes, Given, Workers

__all__ = ["profile_config", "profile_workload"]


def profile_config(
    config: Config, workers: int | None = None, progress: Progress | None = None, use_cache: bool = True
) -> Profile:
    """Profiles the model of a config under the conditions of its training run.

    Args:
        workers: processes that measure at the same time, each with a light companion; None: one per pipeline device,
            and always so many in the orders capslog and mcap, which launch pipelines.
        use_cache: take the profile of the same model and conditions that was measured before, and keep a new one.

    Raises:
        DoesNotFit: a run needs more memory than there is.
        CapslogError: there is no such device, or a run failed (which, and why).
    """
    workload = load_workload(config)
    conditions = conditions_of_run(config, workload.profile_inputs(config.train.microbatch_size))
    order, devices = config.profile.order, config.pipeline.devices
    launch = _Launch(
        functools.partial(load_workload, config),
        (workers or devices) if order == "packed" else devices,
        config.train.threads,
        progress,
        order=order,
    )
    return _profile(workload, conditions, launch, use_cache)


def profile_workload(
    workload: Workload,
    conditions: RunConditions | None = None,
    *,
    workers: int = 1,
    threads: int = 1,
    order: str = "packed",
    progress: Progress | None = None,
    free_bytes: FreeBytes = admission.free_bytes,
) -> Profile:
    """Profiles a workload, also one that no config describes.

    Args:
        conditions: of the training that the profile is for; their `input` is taken from the workload. With several GPUs
            the workers take turns.
        workers: as in `profile_config`.
        threads: CPU threads of each worker.
        order: "packed", "capslog" or "mcap", of so many `workers`; see `launches`.
        free_bytes: what a device has left.

    Raises:
        as `profile_config`; also CapslogError where CUDA is in use and the workload cannot be sent to a process.
    """
    fields.choice(order, "order", ORDERS)
    conditions = conditions or RunConditions()
    conditions = replace(conditions, input=shapes_of(workload.profile_inputs(conditions.microbatch_size)))
    launch = _Launch(Given(workload), workers, threads, progress, free_bytes, order)
    return _profile(workload, conditions, launch, use_cache=False)


ORDERS = ("packed", "capslog", "mcap")


@dataclass(frozen=True)
class _Launch:
    """How the runs are carried out; nothing that the result depends on."""

    source: Callable[[], Workload]
    workers: int
    threads: int
    progress: Progress | None
    free_bytes: FreeBytes = admission.free_bytes
    order: str = "packed"


def _profile(workload: Workload, conditions: RunConditions, launch: _Launch, use_cache: bool) -> Profile:
    if conditions.device == "cuda" and not torch.cuda.is_available():
        raise CapslogError(
            "the profile is for device cuda, but there is no CUDA device here; run it where there is one, or set "
            "profile.device=cpu for numbers of the CPU"
        )
    if launch.workers < 1:
        raise CapslogError(f"workers={launch.workers}; at least one process must measure")
    chain = skeleton(workload)
    clock = LaunchTimes()
    described = _describe(workload, chain, conditions, launch)

    def measured() -> Profile:
        names = [layer.name for layer in chain.layers]
        with failures_named(names):
            rows, specs = _launched(workload, chain, conditions, launch, names, clock)
        taken = {**described, "profiling": clock.report(launch.order, launch.workers)}
        return profile_of(chain, rows, "measured", taken, launch.order == "mcap", specs)

    return cache.kept(described, chain.name, measured) if use_cache else measured()


def _launched(
    workload: Workload,
    chain: Chain,
    conditions: RunConditions,
    launch: _Launch,
    names: Sequence[str],
    clock: LaunchTimes,
) -> tuple[list[Observation], Sequence[Mapping[str, TensorSpec]]]:
    """Carries out the runs of one order: one row for each range of layers; and what crosses every cut."""
    runs = stage_runs(len(chain))
    count = min(launch.workers, len(runs)) if launch.order == "packed" else launch.workers
    workers = Workers(
        launch.source,
        devices_of(conditions.device, count),
        launch.threads,
        _modules(workload, chain),
        conditions,
        launch.free_bytes,
        names,
    )
    progress = launch.progress or (lambda done, total, text: None)
    # in one launch the processes get ready while this one traces shapes
    with workers.group(count) if launch.order == "packed" else nullcontext() as group:
        specs = ShapeTable(chain, conditions.device, conditions.precision).boundaries(
            workload.profile_inputs(conditions.microbatch_size)
        )
        bounds = BoundTable(chain, specs, conditions.device, conditions.precision, conditions.blocks, conditions.recipe)
        goal = workload.profile_targets(conditions.microbatch_size)
        if launch.order == "mcap":
            return list(in_mcap_order(specs, goal, bounds.bound_bytes, workers, clock, progress).values()), specs
        tasks = []
        for first, end in runs:
            loss = goal if end == len(chain) else (None, {})
            run = TrimmedRun(first, end, len(chain), tuple(specs[first : end + 1]), *loss)
            tasks.append((run, bounds.bound_bytes(first, end)))
        # the largest first, as Graham's rule wants it, with bytes for seconds
        tasks.sort(key=lambda task: -task[1])
        if group is None:
            measured = in_capslog_order(tasks, workers, clock, progress)
        else:
            measured = in_one_launch(tasks, group, workers, clock, progress)
    return [measured[run] for run in runs], specs


def _modules(workload: Workload, chain: Chain) -> list[str]:
    """Where the classes of a workload are defined: what every worker would have to import."""
    kinds = {type(workload), *(type(part) for layer in chain.layers for part in layer.module.modules())}
    return sorted({kind.__module__ for kind in kinds})


def _describe(workload: Workload, chain: Chain, conditions: RunConditions, launch: _Launch) -> dict[str, Any]:
    """All that the numbers depend on, as JSON has it."""
    return {
        "device": conditions.device,
        "device_name": _device_name(conditions.device),
        "dtype": conditions.precision,
        "microbatch_size": conditions.microbatch_size,
        "input": {name: list(shape) for name, shape in conditions.input.items()},
        **conditions.recipe.described(chain.named_parameters().values()),
        "schedule": conditions.schedule,
        "recompute": conditions.recompute,
        "stage_inputs": conditions.stage_inputs,
        "accumulation_blocks": conditions.blocks,
        "threads": launch.threads,
        "order": launch.order,
        "peak_source": CUDA_SOURCE if conditions.device == "cuda" else CPU_SOURCE,
        "torch": torch.__version__,
        "model_digest": cache.model_digest(workload, chain),
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
