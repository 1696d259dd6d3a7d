"""Runs every rank's program of a plan on fake tensors, so that its peak is known before the launch.

Where `estimate` runs single layers and pairs between dummies, this runs whole ranks of one plan, whatever stages,
blocks and action lists it has, with all that is in flight: inputs and graphs that wait, receives posted ahead, messages
sent and not yet confirmed, blocks of gradients until they are added. On the CPU these share one memory. It takes a few
seconds, so it confirms a plan and does not search for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.grains import joined_inputs
from varuna_capslog.engine.layers import tracking_modules
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.engine.pipeline import EngineOptions, PipelineEngine
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.estimate import Memo, StageEstimator
from varuna_capslog.profiling.estimation.allocator import replay, round_up
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator, StepMeter, fake_step, hollow_ready
from varuna_capslog.profiling.estimation.lifetimes import Recipes
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.trim import KnownShapes, with_real_layers
from varuna_capslog.schedules.actions import Action
from varuna_capslog.schedules.lower import Instruction, Recv, lower

__all__ = ["ShortSteps", "rank_peaks", "rehearse", "rehearse_config", "rehearse_layout", "rehearse_plan"]


# -- Chooses the ranks of a pipeline, and numbers of microbatches, that show the peaks of a whole step.
#
# A rehearsal runs every rank's program on fake tensors; for 32 ranks of 32 microbatches that takes longer than all
# the rest of a plan. Where messages wait in host memory, the bytes on a rank's device depend on its own program
# alone. So a rank's step of a few microbatches has the peak of the whole step if the rank meets the same moments in
# both, and two ranks of the same layers and the same moments have the same peak.


_SHORT = range(2, 17)
"""Microbatches of a short step: the first makes the gradients, the next add to them. More are not worth a search."""
_WINDOW = 5
"""Number of preceding instructions in a moment: the leftovers of an action are freed by the next one at the latest."""

_Doing: TypeAlias = tuple[str, str | None]


class ShortSteps:
    """Short steps of one pipeline of one stage per rank, without accumulation in several blocks.

    options: of the whole step; it has one accumulation block.
    inputs_wait: True where the inputs or graphs of microbatches in flight wait on the device.
    """

    def __init__(self, chain: Chain, layout: Layout, options: EngineOptions, inputs_wait: bool) -> None:
        self._chain, self._layout, self._options, self._inputs_wait = chain, layout, options, inputs_wait
        self._programs = cache(self._lowered)

    @staticmethod
    def know(layout: Layout, options: EngineOptions) -> bool:
        """True where a layout and its step are such a pipeline, without offloading and explicit action lists."""
        one_each = [stage.rank for stage in layout.stages] == list(range(len(layout.stages)))
        plain = all(stage.grain == 1 and not stage.offloads for stage in layout.stages)
        listed = options.actions is not None or layout.direct
        return one_each and plain and not listed and options.num_blocks == layout.num_blocks == 1

    def microbatches(self, rank: int) -> int:
        """Return the smallest number whose step takes the rank through the same moments as the whole step: the whole
        number for a rank that keeps tensors of every microbatch until the end of the step (parts of the loss, or
        running statistics).
        """
        count = self._options.num_microbatches
        if self._collects(rank):
            return count
        wanted = self._moments(rank, count)
        return next((few for few in _SHORT if few < count and self._moments(rank, few) == wanted), count)

    def doings(self, rank: int) -> object:
        """Return a key that is equal for ranks that have the same peak if they have the same layers; None for a rank
        that shares parameters with another one, with which it exchanges gradients.
        """
        layers, count = set(self._layout.layers_of(rank)), self._options.num_microbatches
        if any(layers & set(shared.layers) and set(shared.layers) - layers for shared in self._chain.shared):
            return None
        if self._collects(rank):
            return tuple(_doing(instruction) for instruction in self._programs(count)[rank])
        return self._moments(rank, count)

    def _collects(self, rank: int) -> bool:
        layers = [self._chain.layers[index] for index in self._layout.layers_of(rank)]
        return layers[-1] is self._chain.layers[-1] or any(any(tracking_modules(layer.module)) for layer in layers)

    def _lowered(self, microbatches: int) -> list[list[Instruction]]:
        graph = self._layout.graph(microbatches, self._chain.edges)
        options = self._options
        rows = scheduled(options.schedule, self._layout.stages, graph, options)
        return lower(rows, None, graph).programs

    def _moments(self, rank: int, microbatches: int) -> frozenset[object]:
        """Return, for every instruction, the instructions before it and the rank's state besides its layers."""
        moments, recent = set(), deque[_Doing](maxlen=_WINDOW)
        arrived, forwarded, built, began = 0, 0, 0, False
        program = self._programs(microbatches)[rank]
        for position, instruction in enumerate(program):
            doing = _doing(instruction)
            waiting = forwarded if self._inputs_wait else 0
            follows = _doing(program[position + 1]) if position + 1 < len(program) else None
            moments.add((tuple(recent), doing, follows, arrived, waiting, built, began))
            recent.append(doing)
            kind = doing[1] if doing[0] == "act" else None
            if isinstance(instruction, Recv):
                arrived += 1
            elif kind in ("F", "B"):
                arrived = 0
            if kind == "F":
                forwarded += 1
            elif kind == "R":
                built += 1
            elif kind == "B":
                forwarded, built, began = forwarded - 1, max(built - 1, 0), True
        return frozenset(moments)


def _doing(instruction: Instruction) -> _Doing:
    if isinstance(instruction, Action):
        return "act", instruction.kind
    return ("receive" if isinstance(instruction, Recv) else "send"), instruction.message.kind


# -- the rehearsal of a plan


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankRehearsal:
    """Result of one rank's step.

    peak_bytes: as its device's allocator counts.
    course: (instruction, peak bytes in whole blocks from its beginning to that of the next one), in the order of its
        program; the last entry, "end", is the exchange of gradients, the vote and the update.
    """

    peak_bytes: int
    course: tuple[tuple[str, int], ...]


def rehearse(estimator: StageEstimator, cuts: Sequence[int], schedule: str, num_microbatches: int) -> list[int]:
    """Return peak bytes of every stage of a cut list, stage s on rank s, in one step of training after the first.
    Raises CapslogError: a layer or the loss cannot run on fake tensors; cuts that do not fit the chain.
    """
    estimator.chain.check_cuts(cuts)
    options = _options(estimator, num_microbatches, schedule)
    return rank_peaks(estimator, Layout.pipelines(cuts, len(estimator.chain)), options)


def rank_peaks(estimator: StageEstimator, layout: Layout, options: EngineOptions) -> list[int]:
    """Return peak bytes of every rank; of equal ranks one is rehearsed, with as few microbatches as show its peak."""
    conditions = estimator.conditions
    if not Quirks(conditions.device).has("host staging") or not ShortSteps.know(layout, options):
        return [rank.peak_bytes for rank in rehearse_layout(estimator, layout, options)]
    waits = any(stage.memory is not None for stage in layout.stages)
    short = ShortSteps(
        estimator.chain, layout, options, waits or not (conditions.recompute and conditions.stage_inputs == "host")
    )
    alike: dict[object, list[int]] = {}
    for rank, stage in enumerate(layout.stages):
        doings = short.doings(rank)
        treated = [
            (interval.first - stage.first, interval.end - stage.first, interval.kind) for interval in stage.memory or ()
        ]
        key = rank if doings is None else (doings, estimator.run_key(stage.first, stage.end), tuple(treated))
        alike.setdefault(key, []).append(rank)
    peaks = [0] * layout.world_size
    for ranks in alike.values():
        few, rank = min((short.microbatches(rank), rank) for rank in ranks)
        step = dataclasses.replace(options, num_microbatches=few)
        (rehearsed,) = _rehearse_ranks(estimator, layout, step, [rank])
        for rank in ranks:
            peaks[rank] = rehearsed.peak_bytes
    return peaks


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

    The config must agree with the plan (`start.given_plan.with_given_plan`): where a plan of the short form is used in
    several replicas, the ranks of all of them are listed.

    shapes: of the chain's inputs, by name; None: of the largest inputs that the run can meet.
    memo: may know the run's estimator.

    Raises CapslogError: as `rehearse_layout`; a plan that the engine does not run, named by the field.
    """
    layout, estimator = layout_of(plan, config), _estimator(config, shapes, memo)
    blocks, count = config.num_blocks, config.num_microbatches
    if plan.actions is None and config.pipeline.schedule != "gpipe":
        # more microbatches of a block than any stage has in flight show nothing new; GPipe has all of them
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
    # more microbatches than any stage has in flight show nothing new; GPipe has all of them
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
        positions.close()
    if quirks.has("caching allocator"):
        peak_bytes = replay(events).allocated_bytes
    return RankRehearsal(peak_bytes, tuple(positions.course))


class _Positions(StepMeter):
    def __init__(self) -> None:
        self.course: list[tuple[str, int]] = []
        self._doing = "begin"

    def instruction(self, position: int, instruction: Instruction) -> None:
        self._next(str(instruction))

    def count_static(self) -> None:
        # bytes after the last instruction are in the update's entry
        self._next("update")

    def close(self) -> None:
        self._next("")

    def _next(self, doing: str) -> None:
        self.course.append((self._doing, self._followed.lately_bytes))
        self._followed.lately_bytes = self._followed.live_bytes
        self._doing = doing
