"""Runs every rank's program of a plan on fake tensors, so that its peak is known before the launch.

`estimate` runs single layers and pairs between dummies; a rehearsal runs whole ranks of one plan, with any stages,
blocks and action lists, and with everything in flight: waiting inputs and graphs, receives posted ahead, messages sent
and not yet confirmed, gradient blocks until they are added. On the CPU all are in one memory. A rehearsal takes a few
seconds, so it confirms a plan but is not part of a search.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.grains import joined_inputs
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.engine.pipeline import EngineOptions, PipelineEngine
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.estimate import Memo, StageEstimator
from varuna_capslog.profiling.estimation.allocator import Event, replay, round_up
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator, StepMeter, fake_step, hollow_ready
from varuna_capslog.profiling.estimation.lifetimes import Recipes
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.short_steps import ShortSteps
from varuna_capslog.profiling.stretched_steps import doing_of, short_pipeline, stretched
from varuna_capslog.profiling.trim import KnownShapes, with_real_layers
from varuna_capslog.schedules.lower import Instruction

__all__ = ["rank_peaks", "rehearse", "rehearse_config", "rehearse_layout", "rehearse_plan"]


# -- the rehearsal of a plan


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankRehearsal:
    """Result of one rank's step.

    peak_bytes: as its device's allocator counts. events: of that allocator.
    starts: number of events before each instruction of its program.
    course: (instruction, peak bytes in whole blocks until the next instruction), in program order, between the entries
        "begin" and "update". The exchange of gradients and the vote belong to the last instruction.
    """

    peak_bytes: int
    course: tuple[tuple[str, int], ...]
    events: Sequence[Event] = ()
    starts: Sequence[int] = ()


def rehearse(estimator: StageEstimator, cuts: Sequence[int], schedule: str, num_microbatches: int) -> list[int]:
    """Return peak bytes of every stage of a cut list, stage s on rank s, in one step of training after the first.
    Raises CapslogError: a layer or the loss cannot run on fake tensors; cuts that do not fit the chain.
    """
    estimator.chain.check_cuts(cuts)
    options = _options(estimator, num_microbatches, schedule)
    return rank_peaks(estimator, Layout.pipelines(cuts, len(estimator.chain)), options)


def rank_peaks(estimator: StageEstimator, layout: Layout, options: EngineOptions) -> list[int]:
    """Return peak bytes of every rank. One of equal ranks is rehearsed, with few microbatches that show its peak."""
    conditions = estimator.conditions
    if not Quirks(conditions.device).has("host staging") or not ShortSteps.apply_to(layout, options):
        return [rank.peak_bytes for rank in rehearse_layout(estimator, layout, options)]
    waits = any(stage.memory is not None for stage in layout.stages)
    short = ShortSteps(
        estimator.chain, layout, options, waits or not (conditions.recompute and conditions.stage_inputs == "host")
    )
    alike: dict[object, list[int]] = {}
    works: list[object] = []
    for rank, stage in enumerate(layout.stages):
        doings = short.doings(rank)
        treated = [
            (interval.first - stage.first, interval.end - stage.first, interval.kind, interval.parts)
            for interval in (*(stage.memory or ()), *stage.moments)
        ]
        works.append((estimator.run_key(stage.first, stage.end), stage.memory is None, tuple(treated)))
        alike.setdefault(rank if doings is None else (doings, works[rank]), []).append(rank)
    peaks, steps = [0] * layout.world_size, _Steps(estimator, layout, options, short)
    for ranks in alike.values():
        peak = steps.peak_bytes(ranks, works[ranks[0]])
        for rank in ranks:
            peaks[rank] = peak
    return peaks


class _Steps:
    """Rehearsals of a layout's ranks, with few microbatches that show their peaks."""

    def __init__(self, estimator: StageEstimator, layout: Layout, options: EngineOptions, short: ShortSteps) -> None:
        self._estimator, self._layout, self._options, self._short = estimator, layout, options, short
        self._of_pipelines: dict[object, RankRehearsal] = {}

    def peak_bytes(self, ranks: Sequence[int], work: object) -> int:
        """Return the peak of equal ranks. work: key of their layers and memory intervals."""
        rank = ranks[0]
        if (events := self._stretched_events(rank, work)) is not None:
            return replay(events).allocated_bytes
        if (sample := self._short.sample(rank)) is not None:
            fewer = functools.partial(self._events, sample.few - 1, rank)
            if (peak := sample.peak_bytes(*self._events(sample.few, rank), fewer)) is not None:
                return peak
        return self._rehearsed(*min((self._short.microbatches(rank), rank) for rank in ranks)).peak_bytes

    def _rehearsed(self, microbatches: int, rank: int) -> RankRehearsal:
        step = dataclasses.replace(self._options, num_microbatches=microbatches)
        return _rehearse_ranks(self._estimator, self._layout, step, [rank])[0]

    def _events(self, microbatches: int, rank: int) -> tuple[Sequence[Event], Sequence[int]]:
        rehearsal = self._rehearsed(microbatches, rank)
        return rehearsal.events, rehearsal.starts

    def _stretched_events(self, rank: int, work: object) -> list[Event] | None:
        """Return the events of a rank's program, from a rehearsal with fewer microbatches, shared by ranks of equal
        `work`; None where that rehearsal does not show all events.
        """
        if (program := self._short.program(rank)) is None:
            return None
        stage = self._layout.stages[rank]
        if (pipeline := short_pipeline(stage, self._layout.num_layers, self._options, program)) is None:
            return None
        key = work, tuple(map(doing_of, pipeline.program))
        if (rehearsal := self._of_pipelines.get(key)) is None:
            try:
                rehearsal = _rehearse_ranks(self._estimator, pipeline.layout, pipeline.options, [pipeline.rank])[0]
            except CapslogError:
                return None  # the rehearsal of the layout itself raises the error, naming the rank
            self._of_pipelines[key] = rehearsal
        if [doing for doing, _ in rehearsal.course[1:-1]] != list(map(str, pipeline.program)):
            return None  # the engine does not send gradients that no layer needs
        return stretched(rehearsal.events, rehearsal.starts, pipeline.program, program)


def rehearse_layout(estimator: StageEstimator, layout: Layout, options: EngineOptions) -> list[RankRehearsal]:
    """Rehearse every rank of a layout in one step of training after the first; an idle rank holds nothing. The
    precision of `options` must be the estimator's.

    Raises CapslogError: a layer or the loss cannot run on fake tensors; actions that do not make a step of this layout.
    """
    return _rehearse_ranks(estimator, layout, options, range(layout.world_size))


def _rehearse_ranks(
    estimator: StageEstimator, layout: Layout, options: EngineOptions, ranks: Iterable[int]
) -> list[RankRehearsal]:
    """Run `rehearse_layout` for some of the ranks."""
    targets, normalisers = estimator.workload.profile_targets(estimator.conditions.microbatch_size)
    inputs = [dict(estimator.specs[0])] * options.num_microbatches
    minibatch = Minibatch(inputs, [targets] * options.num_microbatches, dict(normalisers))
    table = _table(estimator, layout)
    mode, recipes = FakeTensorMode(allow_non_fake_inputs=True), estimator.recipes
    options = dataclasses.replace(options, refuses=False)
    return [_rehearse_rank(estimator, layout, options, rank, minibatch, (mode, recipes), table) for rank in ranks]


def _table(estimator: StageEstimator, layout: Layout) -> ShapeTable:
    """Return the shapes of one microbatch, and of each number of microbatches that the stages take in a call."""
    grains = {stage.grain for stage in layout.stages}
    if grains == {1}:
        return KnownShapes(estimator.specs)
    table = ShapeTable(estimator.chain, "cpu", estimator.conditions.precision, estimator.conditions.weights)
    for grain in {1, *grains}:  # now, since nothing can be traced while the ranks run on fake tensors
        table.boundaries(joined_inputs([estimator.specs[0]] * grain, range(grain)))
    return table


def rehearse_plan(
    config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]] | None = None, memo: Memo | None = None
) -> list[int]:
    """Return peak bytes of every rank of any plan that the engine runs, for the run that a config describes.

    The config must agree with the plan (`start.choices.with_given_plan`): where a plan of the short form is used in
    several replicas, the list has the ranks of all replicas.

    shapes: of the chain's inputs, by name; None: of the largest inputs that can occur in the run.
    memo: may hold the run's estimator.

    Raises CapslogError: as `rehearse_layout`; naming the field, for a plan that the engine cannot run.
    """
    layout, estimator = layout_of(plan, config), _estimator(config, shapes, memo)
    blocks, count = config.num_blocks, config.num_microbatches
    if plan.actions is None and config.pipeline.schedule != "gpipe":
        # more microbatches of a block than any stage has in flight do not raise a peak; in GPipe all are in flight
        together = math.lcm(*(stage.grain for stage in layout.stages))
        count = blocks * min(count // blocks, together * (3 * len(layout.stages) + 2))
    options = _options(estimator, count, config.pipeline.schedule, blocks, plan.actions)
    return rank_peaks(estimator, layout, options)


def rehearse_config(
    config: Config,
    cuts: Sequence[int],
    shapes: Mapping[str, Sequence[int]] | None = None,
    memo: Memo | None = None,
) -> list[int]:
    """Run `rehearse` for the run that a config describes; `shapes` and `memo` as in `rehearse_plan`. Raises
    CapslogError: as `rehearse`; also shapes whose names are not those of the chain's inputs.
    """
    pipeline, estimator = config.pipeline, _estimator(config, shapes, memo)
    # more microbatches than any stage has in flight do not raise a peak; in GPipe all are in flight
    count = config.num_microbatches // pipeline.replicas
    if pipeline.schedule != "gpipe":
        count = min(count, 3 * len(cuts) + 2)
    blocks = estimator.conditions.blocks
    return rehearse(estimator, cuts, pipeline.schedule, round_up(count, blocks))


def _estimator(config: Config, shapes: Mapping[str, Sequence[int]] | None, memo: Memo | None) -> StageEstimator:
    estimator = StageEstimator.of_config(config, memo)
    if shapes is None:
        return estimator
    inputs = estimator.specs[0]
    if shapes.keys() != inputs.keys():
        raise CapslogError(f"shapes are given for {sorted(shapes)}, the chain's inputs are {sorted(inputs)}")
    return estimator.at({name: TensorSpec(tuple(shapes[name]), inputs[name].dtype) for name in inputs})


def _options(
    estimator: StageEstimator,
    num_microbatches: int,
    schedule: str,
    blocks: int | None = None,
    actions: tuple[tuple[str, ...], ...] | None = None,
) -> EngineOptions:
    conditions = estimator.conditions
    return EngineOptions(
        num_microbatches=num_microbatches,
        num_blocks=conditions.blocks if blocks is None else blocks,
        schedule=schedule,
        recompute=conditions.recompute,
        stage_inputs=conditions.stage_inputs,
        precision=conditions.precision,
        weights=conditions.weights,
        clip_norm=1.0,
        recipe=conditions.recipe,
        actions=actions,
    )


def _rehearse_rank(
    estimator: StageEstimator,
    layout: Layout,
    options: EngineOptions,
    rank: int,
    minibatch: Minibatch,
    fake: tuple[FakeTensorMode, Recipes],
    table: ShapeTable,
) -> RankRehearsal:
    layers = layout.layers_of(rank)
    if not layers:
        return RankRehearsal(0, ())
    conditions = estimator.conditions
    quirks, positions = Quirks(conditions.device, conditions.gpu), _Positions()
    mode, recipes = fake
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch(), options.recipe.uncompiled():
        engine = PipelineEngine(
            with_real_layers(estimator.chain, layers),
            estimator.workload.loss,
            layout,
            options,
            SilentCommunicator(rank, layout.world_size, quirks.has("host staging")),
            _CPU,
            hollow_ready(table, estimator.conditions),
            positions,
        )
        names = layout.describe(rank), "its layers"
        peak_bytes, events = fake_step(engine, quirks, minibatch, names, recipes, positions)
        before = len(events) - positions.num_events
        positions.close()
    if quirks.has("caching allocator"):
        peak_bytes = replay(events).allocated_bytes
    return RankRehearsal(peak_bytes, tuple(positions.course), events, [before + start for start in positions.starts])


class _Positions(StepMeter):
    def __init__(self) -> None:
        self.course: list[tuple[str, int]] = []
        self.starts: list[int] = []
        self._doing = "begin"

    @property
    def num_events(self) -> int:
        """Number of events so far."""
        return len(self._followed.events)

    def instruction(self, position: int, instruction: Instruction) -> None:
        self.starts.append(self.num_events)
        self._next(str(instruction))

    def count_static(self) -> None:
        # called after the vote, so the last instruction's entry includes exchange and vote
        self._next("update")

    def close(self) -> None:
        self._next("")

    def _next(self, doing: str) -> None:
        self.course.append((self._doing, self._followed.lately_bytes))
        self._followed.lately_bytes = self._followed.live_bytes
        self._doing = doing
