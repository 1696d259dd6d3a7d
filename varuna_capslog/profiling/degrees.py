"""Runs of stages that several devices share, by data or tensor parallelism, for `Profile.by_degree`.

CAPTURE (Sec. III-A) profiles every layer alone and every pair on 1, 2 and 4 devices, each with two batch sizes. Here
these are trimmed runs (`trim`) with several measured ranks; the last rank stands in for the neighbour stages. With
kind `data`, each device has a replica of the layers and an equal part of the batch. With kind `tensor`, each has a part
of every layer that can be split (`model/splitting`); the first device also has the other layers, and adds the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.splitting.chains import part_number, possible_splits
from varuna_capslog.model.workload import Minibatch, Workload, load_workload
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import StageRun, stage_runs
from varuna_capslog.profiling.conditions import Progress, RunConditions
from varuna_capslog.profiling.estimate import Memo, StageEstimator
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator, fake_step, hollow_ready
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.launches import BoundTable, Ranks, devices_of, failures_named, free_bytes
from varuna_capslog.profiling.measure import modules_of
from varuna_capslog.profiling.trim import (
    MICROBATCHES,
    KnownShapes,
    TrimmedPipeline,
    TrimmedRun,
    dummy_inputs,
    dummy_loss,
    dummy_options,
    program,
    skeleton,
    trimmed_chain,
)
from varuna_capslog.profiling.worker import Role, Workers
from varuna_capslog.schedules import Schedule, insert_recompute
from varuna_capslog.schedules.actions import Action

__all__ = ["SharedStages", "Sharing", "sharings", "with_degrees"]

MOST_MEASURED = 4
"""Largest number of devices of a measured stage; estimates have no limit."""
_MESSAGE_SECONDS = 600.0


@dataclass(frozen=True)
class Sharing:
    """Way in which `degree` devices share a stage. kind: "data" or "tensor". samples: of a call on all devices."""

    kind: str
    degree: int
    samples: int

    @property
    def microbatch_size(self) -> int:
        """Samples of a call on one device."""
        return self.samples // self.degree if self.kind == "data" else self.samples

    @property
    def blocks(self) -> int:
        """Accumulation blocks of a step, one for each replica."""
        return self.degree if self.kind == "data" else 1


def sharings(degrees: Sequence[int], microbatch_size: int) -> Iterator[Sharing]:
    """Yield the ways to share a stage, with two batch sizes each: a quarter and half of `microbatch_size`, rounded down
    to multiples of the largest degree; at least one and two samples for each of its devices.
    """
    largest = max(degrees)
    small = largest * max(1, microbatch_size // (4 * largest))
    for samples in (small, 2 * small):
        yield from (Sharing("data", degree, samples) for degree in degrees)
        yield from (Sharing("tensor", degree, samples) for degree in degrees if degree > 1)


class SharedStages:
    """Runs of the stages of a config's chain on devices that share them.

    Attributes:
        can_share: False where no layer can be split into `degree` parts.
    """

    def __init__(self, config: Config, sharing: Sharing, memo: Memo) -> None:
        self.sharing, self._memo = sharing, memo
        self.config = _config_of(config, sharing)
        self._estimator = StageEstimator.of_config(self.config, memo)
        self._names = [layer.name for layer in self._estimator.chain.layers]
        self.can_share = True
        if sharing.kind == "tensor":
            splits = possible_splits(self._estimator.chain, sharing.degree)
            self.can_share = bool(splits)
            if splits:
                self.config = self.config.model_copy(update={"splits": splits, "numerics": "close"})
                self._estimator = StageEstimator.of_config(self.config, memo)
        self._conditions = replace(self._estimator.conditions, blocks=1, halves=False, grains=())
        wholes = [layer.part.layer if layer.part else layer.name for layer in self._estimator.chain.layers]
        self._firsts = [*(wholes.index(name) for name in self._names), len(wholes)]

    def estimated(self, first: int, end: int) -> Observation:
        """Estimate the largest peak of the devices for layers first .. end-1 of the config's chain. Raises CapslogError
        where a layer or the loss cannot run on fake tensors.
        """
        run, last = self._run(first, end), self.sharing.degree - 1
        ranks = sorted({0, last})  # the others have the bytes of the last rank
        return self._row(first, end, [self._estimated_bytes(run, rank) for rank in ranks])

    def _estimated_bytes(self, run: TrimmedRun, rank: int) -> int:
        estimator, conditions = self._estimator, self._conditions
        quirks, mode = Quirks(conditions.device, conditions.gpu), FakeTensorMode(allow_non_fake_inputs=True)
        with torch.random.fork_rng(devices=[]), mode, quirks.dispatch(), conditions.recipe.uncompiled():
            pipeline = shared_pipeline(estimator.chain, run, conditions, self.sharing, real=True)
            engine = pipeline.engine(
                estimator.workload.loss,
                SilentCommunicator(rank, pipeline.layout.world_size, quirks.has("host staging")),
                torch.device("cpu"),
                hollow_ready(pipeline.table, conditions),
            )
            names = f"layers {run.first} to {run.end - 1}", "them"
            peak_bytes, events = fake_step(engine, quirks, pipeline.minibatch, names, estimator.recipes)
        return replay(events).allocated_bytes if quirks.has("caching allocator") else peak_bytes

    def measured(self, runs: Sequence[StageRun]) -> list[Observation]:
        """Measure these ranges of layers one after the other, with a process for each device.

        Raises:
            DoesNotFit: the devices of a run need more memory than there is; no run is started then.
            CapslogError: a run failed; the error names the run and the reason.
        """
        config, conditions, degree = self.config, self._conditions, self.sharing.degree
        workload, chain = self._estimator.workload, self._estimator.chain
        devices = devices_of(conditions.device, degree + 1)
        trimmed = [self._run(*run) for run in runs]
        self._refuse_too_large(trimmed, devices)
        roles = functools.partial(_roles, self.sharing)
        source, threads = functools.partial(load_workload, config), config.train.threads
        names = [layer.name for layer in chain.layers]
        modules = modules_of(workload, chain)
        workers = Workers(source, devices, threads, modules, conditions, free_bytes, names, roles)
        rows = []
        with failures_named(names), Ranks(workers, degree + 1) as group:
            group.wait_until_ready()
            for (first, end), run in zip(runs, trimmed, strict=True):
                for rank in range(degree + 1):
                    group.start(rank, (run, 0))
                peaks: dict[int, int] = {}
                while len(peaks) <= degree:
                    peaks |= {rank: row.peak_bytes for rank, _, row in group.finished()}
                rows.append(self._row(first, end, [peaks[rank] for rank in range(degree)]))
        return rows

    def _refuse_too_large(self, runs: Sequence[TrimmedRun], devices: Sequence[torch.device]) -> None:
        conditions, estimator = self._conditions, self._estimator
        types = conditions.precision, 1, conditions.recipe, conditions.weights
        table = BoundTable(estimator.chain, estimator.specs, conditions.device, *types)
        sharing = self.sharing
        on_a_device = -(-sharing.degree // len(set(devices))) if sharing.kind == "data" else 1
        bound = max(table.bound_bytes(run.first, run.end) for run in runs) * on_a_device
        free = min(free_bytes(device) for device in set(devices))
        if bound > free:
            raise DoesNotFit(
                f"a stage on {sharing.degree} devices ({sharing.kind}) may need up to {format_bytes(bound)} here, "
                f"where {format_bytes(free)} are free; take smaller --degrees, or --estimate"
            )

    def _run(self, first: int, end: int) -> TrimmedRun:
        return self._estimator.trimmed_run(self._firsts[first], self._firsts[end])

    def _row(self, first: int, end: int, peaks: Sequence[int]) -> Observation:
        conditions, sharing = self._conditions, self.sharing
        return Observation(
            layers=(first, end),
            device=conditions.device,
            microbatch_size=sharing.samples,
            input=dict(conditions.input),
            memory_action="recompute" if conditions.recompute else "none",
            peak_bytes=max(peaks),
            parallel={"kind": sharing.kind, "degree": sharing.degree},
        )


def _config_of(config: Config, sharing: Sharing) -> Config:
    """Return the config of a run with the samples of `sharing` in a call."""
    if config.splits:
        raise CapslogError(
            f"splits is {dict(config.splits)}, but runs by degree split the layers themselves; leave splits out"
        )
    size = sharing.microbatch_size
    train = config.train.model_copy(update={"microbatch_size": size, "minibatch_size": MICROBATCHES * size})
    pipeline = config.pipeline.model_copy(update={"replicas": 1, "plan": None})
    return config.model_copy(update={"train": train.with_blocks(1), "pipeline": pipeline})


def shared_pipeline(
    chain: Chain, run: TrimmedRun, conditions: RunConditions, sharing: Sharing, real: bool
) -> TrimmedPipeline:
    """Return the trimmed pipeline of a run on ranks 0 .. degree-1; rank `degree` stands in for the neighbour stages.
    Every rank has the order of actions of one device (`trim.program`). chain, real: see `trimmed_chain`.
    """
    built, before, after = trimmed_chain(chain, run, real), int(run.has_upstream), int(run.has_downstream)
    end, count = len(built) - after, MICROBATCHES * sharing.blocks
    around = [(0, 1)] * before + [(end, end + 1)] * after
    dummies = [PlanStage((piece,), (sharing.degree,), memory=None) for piece in around]
    shared = list(_shared_stages(built, before, end, sharing))
    stages = (*dummies[:before], *shared, *dummies[before:])
    layout = Layout(stages, sharing.blocks, direct=sharing.kind == "tensor")
    one_device = program(end - before, (run.has_upstream, run.has_downstream), False, MICROBATCHES)[1]
    schedule = list(_shared_rows(one_device, layout, before, sharing))
    if conditions.recompute:
        schedule = insert_recompute(schedule)
    options = replace(dummy_options(conditions, schedule, count), num_blocks=sharing.blocks)
    specs = [*run.specs[:before], *run.specs, *run.specs[len(run.specs) - after :]]
    inputs, targets = [dict(run.specs[0])] * count, [run.targets] * count
    minibatch = Minibatch(inputs, targets, dict(run.normalisers or {}))
    return TrimmedPipeline(built, layout, options, KnownShapes(specs), minibatch)


def _shared_stages(chain: Chain, begin: int, end: int, sharing: Sharing) -> Iterator[PlanStage]:
    """Yield a stage for each replica, or for each sequence of consecutive parts on one rank."""
    if sharing.kind == "data":
        for rank in range(sharing.degree):
            yield PlanStage(((begin, end),), (rank,), (rank,) if sharing.degree > 1 else None, memory=None)
        return
    ranks = [part_number(layer) for layer in chain.layers[begin:end]]
    first = begin
    for layer in range(begin + 1, end + 1):
        if layer == end or ranks[layer - begin] != ranks[first - begin]:
            yield PlanStage(((first, layer),), (ranks[first - begin],), memory=None)
            first = layer


def _shared_rows(schedule: Schedule, layout: Layout, before: int, sharing: Sharing) -> Iterator[list[Action]]:
    """Yield the actions of each rank of a shared stage from those of one device. The neighbours, rank 0 of `schedule`,
    serve one replica after the other, since a stage takes its microbatches in order.
    """
    measured = schedule[-1]
    for rank in range(sharing.degree):
        numbers = layout.stages_of(rank)
        yield [
            Action(number, action.kind, action.microbatch)
            for action in measured
            for number in (numbers if action.kind == "F" else reversed(numbers))
        ]
    if len(schedule) > 1:
        last = len(layout.stages) - 1
        yield [
            Action(
                0 if before and action.stage == 0 else last,
                action.kind,
                (action.microbatch or 0) + MICROBATCHES * block,
            )
            for block in range(sharing.blocks)
            for action in schedule[0]
        ]


def _roles(
    sharing: Sharing, source: Callable[[], Workload], rank: int, port: int, device: torch.device
) -> tuple[Role, list[Role]]:
    """Return the role of one device of a shared stage, or of the next rank, which stands in for the neighbours."""
    workload = source()
    chain = skeleton(workload)

    def play() -> Callable[[TrimmedRun, RunConditions], Observation]:
        accelerator.select(device)
        communicator = connect(rank, sharing.degree + 1, "127.0.0.1", port, 0, _MESSAGE_SECONDS)

        def observed(run: TrimmedRun, conditions: RunConditions) -> Observation:
            pipeline = shared_pipeline(chain, run, conditions, sharing, real=rank < sharing.degree)
            loss: Any = dummy_loss if run.has_downstream else workload.loss
            engine, values = pipeline.engine(loss, communicator, device), dummy_inputs(run.specs[0])

            def load(microbatch: int) -> dict[str, torch.Tensor]:
                return values

            train_step(engine, 1, pipeline.minibatch, load)
            with PeakProbe(device, resident_tensors(engine.layers, engine.optimizer)) as probe:
                train_step(engine, 2, pipeline.minibatch, load)
            return Observation((run.first, run.end), conditions.device, sharing.samples, {}, probe.peak_bytes)

        return observed

    return play, []


def with_degrees(config: Config, profile: Profile, degrees: Sequence[int], progress: Progress | None = None) -> Profile:
    """Return the profile with the runs of every layer and every pair on these numbers of devices: estimated or
    measured, as the profile is. Tensor degrees into which no layer can be split are left out.

    Raises CapslogError: no degrees, or more than `MOST_MEASURED` for measured runs; as `SharedStages`.
    """
    wanted = sorted(set(degrees))
    if not wanted or wanted[0] < 1:
        raise CapslogError(f"degrees are {wanted}; name one or more numbers of devices, such as 1,2,4")
    if profile.source == "measured" and wanted[-1] > MOST_MEASURED:
        raise CapslogError(
            f"degree {wanted[-1]} would be measured on as many processes, of which {MOST_MEASURED} is the most; take "
            f"smaller degrees, or estimate (--estimate)"
        )
    progress = progress or (lambda done, total, text: None)
    memo, rows, runs = Memo(), list[Observation](), stage_runs(profile.num_layers)
    ways = list(sharings(wanted, config.train.microbatch_size))
    progress(0, len(ways) * len(runs), "starting")
    for number, sharing in enumerate(ways):
        stages = SharedStages(config, sharing, memo)
        text = f"{sharing.kind} {sharing.degree}, {sharing.samples} samples"
        if not stages.can_share:
            continue
        if profile.source == "measured":
            rows += stages.measured(runs)
        else:
            rows += [stages.estimated(*run) for run in runs]
        progress((number + 1) * len(runs), len(ways) * len(runs), text)
    return replace(profile, by_degree=tuple(rows))
