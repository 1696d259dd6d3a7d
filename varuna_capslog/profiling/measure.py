"""Makes a `Profile` from real runs of every layer and every pair of neighbours.

This module lists the runs, has them launched (`launches`), and computes M_i and M_a from the results (CAPSlog, Sec.
III-A). Layers run only in worker processes (`worker`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from varuna_capslog import accelerator
from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.probe import peak_source
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import PLAIN, StageRun, stage_runs, text_of
from varuna_capslog.profiling import cache, launches
from varuna_capslog.profiling.conditions import Progress, RunConditions, conditions_of_run, profile_of, shapes_of
from varuna_capslog.profiling.launches import (
    BoundTable,
    LaunchTimes,
    devices_of,
    failures_named,
    in_capslog_order,
    in_mcap_order,
    in_one_launch,
)
from varuna_capslog.profiling.trim import TrimmedRun, skeleton
from varuna_capslog.profiling.variant_check import VariantRun, allowed_variants, joined_variants, variant_runs
from varuna_capslog.profiling.worker import FreeBytes, ReadyValue, Task, Workers
from varuna_capslog.variants.registry import Variant

__all__ = ["WholeRuns", "profile_config", "profile_workload"]


def profile_config(
    config: Config,
    workers: int | None = None,
    progress: Progress | None = None,
    use_cache: bool = True,
    variants: str | None = None,
) -> Profile:
    """Profile the model of a config under the conditions of its training run.

    Args:
        workers: processes that measure at the same time, each with a light companion; None: one per pipeline device,
            and always that many in the orders capslog and mcap, which launch pipelines.
        use_cache: return the stored profile of the same model and conditions, if any; store a new profile.
        variants: a numerical class: also measure layers with variants of this class or a stricter class
            (`variant_check.allowed_variants`). Runs with equal work are made once, in the launch of the plain layers
            where the order is packed, else in a later launch.

    Raises:
        DoesNotFit: a run needs more memory than there is.
        CapslogError: torch cannot use the device, or a run failed; the error names the run and the reason.
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
    allowed = None if variants is None else allowed_variants(variants, config.profile.variants)
    return _profile(workload, conditions, launch, use_cache, allowed)


def profile_workload(
    workload: Workload,
    conditions: RunConditions | None = None,
    *,
    workers: int = 1,
    threads: int = 1,
    order: str = "packed",
    progress: Progress | None = None,
    free_bytes: FreeBytes = launches.free_bytes,
    variants: str | None = None,
) -> Profile:
    """Profile a workload, also one that no config describes.

    Args:
        conditions: of the training that the profile is for; their `input` is taken from the workload.
        workers: as in `profile_config`, assigned to the GPUs in turn. threads: CPU threads of each worker.
        order: "packed", "capslog" or "mcap", with this number of `workers`; see `launches`.
        free_bytes: device -> its free bytes.

    Raises:
        as `profile_config`; also CapslogError where an accelerator is in use and the workload cannot be sent to another
            process.
    """
    fields.choice(order, "order", ORDERS)
    conditions = conditions or RunConditions()
    conditions = replace(conditions, input=shapes_of(workload.profile_inputs(conditions.microbatch_size)))
    launch = _Launch(ReadyValue(workload), workers, threads, progress, free_bytes, order)
    allowed = None if variants is None else allowed_variants(variants)
    return _profile(workload, conditions, launch, use_cache=False, variants=allowed)


ORDERS = ("packed", "capslog", "mcap")


@dataclass(frozen=True)
class _Launch:
    """Settings for launching the runs; results do not depend on them."""

    source: Callable[[], Workload]
    workers: int
    threads: int
    progress: Progress | None
    free_bytes: FreeBytes = launches.free_bytes
    order: str = "packed"


def _profile(
    workload: Workload,
    conditions: RunConditions,
    launch: _Launch,
    use_cache: bool,
    variants: Sequence[Variant] | None,
) -> Profile:
    reason = accelerator.why_unusable(conditions.device)
    if reason is not None:
        raise CapslogError(
            f"the profile is for device {conditions.device}, but torch can use no such device here ({reason}); run it "
            "where there is one, or set profile.device=cpu for numbers of the CPU"
        )
    if launch.workers < 1:
        raise CapslogError(f"workers={launch.workers}; at least one process must measure")
    chain = skeleton(workload)
    varied = [] if variants is None or chain.factories is not None else variant_runs(chain, variants)
    clock = LaunchTimes()
    described = _describe(workload, chain, conditions, launch)
    if varied:
        described |= {"variants": _digests(workload, varied), **joined_variants(varied)}

    def measured() -> Profile:
        with failures_named([layer.name for layer in chain.layers]):
            rows, more, specs = _Runs(workload, chain, conditions, launch, varied).launched(clock)
        taken = {**described, "profiling": clock.report(launch.order, launch.workers)}
        profile = profile_of(chain, rows, "measured", taken, launch.order == "mcap", specs)
        return replace(profile, observations=(*profile.observations, *more))

    return cache.kept(described, chain.name, measured) if use_cache else measured()


def _digests(workload: Workload, varied: Sequence[VariantRun]) -> dict[str, str]:
    """Name of every variant in the profile -> digest of a model that uses it: variants may be third-party code."""
    single = {run.names[0]: run.chain for run in varied if len(run.names) == 1}
    return {name: cache.model_digest(workload, chain) for name, chain in sorted(single.items())}


_Rows = list[Observation]


class _Runs:
    """Runs of one profile, and their launch. varied: the runs with variants."""

    def __init__(
        self,
        workload: Workload,
        chain: Chain,
        conditions: RunConditions,
        launch: _Launch,
        varied: Sequence[VariantRun],
    ) -> None:
        self._chain, self._conditions, self._launch, self._varied = chain, conditions, launch, varied
        self._inputs, self._goal = (
            workload.profile_inputs(conditions.microbatch_size),
            workload.profile_targets(conditions.microbatch_size),
        )
        packed, size = launch.order == "packed", len(stage_runs(len(chain))) + len(varied)
        self._count = min(launch.workers, size) if packed else launch.workers
        self._workers = Workers(
            launch.source,
            devices_of(conditions.device, self._count),
            launch.threads,
            modules_of(workload, chain),
            conditions,
            launch.free_bytes,
            [layer.name for layer in chain.layers],
        )

    def launched(self, clock: LaunchTimes) -> tuple[_Rows, _Rows, Sequence[Mapping[str, TensorSpec]]]:
        """Run all; return the row of each range of layers, the rows of variants, and the specs across every cut."""
        launch, runs = self._launch, stage_runs(len(self._chain))
        progress = launch.progress or (lambda done, total, text: None)
        # in one launch the workers start while this process traces shapes
        with self._workers.group(self._count) if launch.order == "packed" else nullcontext() as group:
            conditions = self._conditions
            types = conditions.precision, conditions.weights
            specs = ShapeTable(self._chain, conditions.device, *types).boundaries(self._inputs)
            bounds = BoundTable(
                self._chain, specs, conditions.device, types[0], conditions.blocks, conditions.recipe, types[1]
            )
            plain = [self._task(bounds, specs, run) for run in runs]
            work = [variant_run.work(specs) for variant_run in self._varied]
            first = dict(zip(reversed(work), reversed(self._varied), strict=True))
            more = [
                self._task(bounds, specs, (variant_run.first, variant_run.end), variant_run)
                for variant_run in first.values()
            ]
            if group is not None:
                row_of = in_one_launch(_largest_first([*plain, *more]), group, self._workers, clock, progress)
            elif launch.order == "mcap":
                mine = in_mcap_order(specs, self._goal, bounds.bound_bytes, self._workers, clock, progress)
                runs, row_of = list(mine), {(*run, None): row for run, row in mine.items()}
            else:
                row_of = in_capslog_order(_largest_first(plain), self._workers, clock, progress)
        if more and group is None:
            with self._workers.group(self._count) as group:
                row_of |= in_one_launch(_largest_first(more), group, self._workers, clock, progress)
        rows = []
        for key, variant_run in zip(work, self._varied, strict=True):
            alike = first[key]
            row = row_of[alike.first, alike.end, text_of(alike.names)]
            rows.append(replace(row, layers=(variant_run.first, variant_run.end), variant=text_of(variant_run.names)))
        return [row_of[(*run, None)] for run in runs], rows, specs

    def _task(
        self,
        bounds: BoundTable,
        specs: Sequence[Mapping[str, TensorSpec]],
        run: StageRun,
        variant_run: VariantRun | None = None,
    ) -> Task:
        (first, end), size = run, len(self._chain)
        targets, normalisers = self._goal if end == size else (None, {})
        names, chain = ((), None) if variant_run is None else (variant_run.names, variant_run.chain)
        trimmed = TrimmedRun(first, end, size, tuple(specs[first : end + 1]), targets, normalisers, names)
        return trimmed, bounds.bound_bytes(first, end, chain)


def _largest_first(tasks: Sequence[Task]) -> list[Task]:
    """Sort tasks by falling bytes; Graham's rule sorts by falling seconds."""
    return sorted(tasks, key=lambda task: -task[1])


def modules_of(workload: Workload, chain: Chain) -> list[str]:
    """Return the modules that define the classes of a workload, which every worker imports."""
    kinds = {type(workload), *(type(part) for layer in chain.layers for part in layer.module.modules())}
    return sorted({kind.__module__ for kind in kinds})


def _describe(workload: Workload, chain: Chain, conditions: RunConditions, launch: _Launch) -> dict[str, Any]:
    """Return all conditions that the numbers depend on, in the form of JSON."""
    return {
        "device": conditions.device,
        "device_name": _device_name(conditions.device),
        "microbatch_size": conditions.microbatch_size,
        "input": {name: list(shape) for name, shape in conditions.input.items()},
        **conditions.types(chain),
        "schedule": conditions.schedule,
        "recompute": conditions.recompute,
        "stage_inputs": conditions.stage_inputs,
        "accumulation_blocks": conditions.blocks,
        "threads": launch.threads,
        "order": launch.order,
        "peak_source": peak_source(conditions.device),
        "torch": torch.__version__,
        "model_digest": cache.model_digest(workload, chain),
    }


def _device_name(device: str) -> str:
    return accelerator.device_name(device) if device != "cpu" else cache.cpu_name()


# -- Runs of a whole model on one device with choices of variants, to check sums of seconds over layers.
#
# `start/collage_start` calls `WholeRuns`. A run is a trimmed run (`trim`) with all layers.


class WholeRuns:
    """Process that trains the whole chain again and again; a context manager that ends it.

    source: makes the workload in every process; its `variants` must be empty. threads: CPU threads.
    """

    def __init__(self, source: Callable[[], Workload], conditions: RunConditions, threads: int = 1) -> None:
        workload = source()
        self._chain = skeleton(workload)
        inputs = workload.profile_inputs(conditions.microbatch_size)
        types = conditions.precision, conditions.weights
        self._specs = ShapeTable(self._chain, conditions.device, *types).boundaries(inputs)
        self._goal = workload.profile_targets(conditions.microbatch_size)
        recipe, blocks = conditions.recipe, conditions.blocks
        table = BoundTable(self._chain, self._specs, conditions.device, types[0], blocks, recipe, types[1])
        self._bound = table.bound_bytes(0, len(self._chain))
        self._names = [layer.name for layer in self._chain.layers]
        devices, modules = devices_of(conditions.device, 1), modules_of(workload, self._chain)
        self._workers = Workers(source, devices, threads, modules, conditions, launches.free_bytes, self._names)
        self._group = self._workers.group(1)

    def __enter__(self) -> WholeRuns:
        self._group.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.__exit__(kind, error, trace)

    def seconds(self, choices: Sequence[Mapping[int, str]], rounds: int = 1) -> list[list[float]]:
        """Return, for each choice (layer -> variant), the seconds of forward and backward of one microbatch in each
        round. Every round runs all choices, in another order. Raises CapslogError where a choice cannot run.
        """
        names = [tuple(choice.get(at, PLAIN) for at in range(len(self._chain))) for choice in choices]
        seconds_of: dict[tuple[str, ...], list[float]] = {names_of_choice: [] for names_of_choice in names}
        size, (targets, normalisers) = len(self._chain), self._goal
        for number in range(rounds):
            turns = list(seconds_of)
            for names_of_choice in turns[number % len(turns) :] + turns[: number % len(turns)]:
                run = TrimmedRun(0, size, size, tuple(self._specs), targets, normalisers, names_of_choice)
                with failures_named(self._names):
                    rows = in_one_launch(
                        [(run, self._bound)], self._group, self._workers, LaunchTimes(), lambda *_: None
                    )
                row = rows[run.key]
                seconds_of[names_of_choice].append((row.forward_seconds or 0.0) + (row.backward_seconds or 0.0))
        return [seconds_of[names_of_choice] for names_of_choice in names]
