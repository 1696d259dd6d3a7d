"""Makes profiles without a device: runs every stage's program of a step on fake tensors, and follows their storages.

Runs, record and the meaning of every number are as in `measure`; bytes come from `estimation/hollow`, seconds from
`estimation/rates`. Runs with equal work are made once. No tensor has memory, and the profile's device need not be
present.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.engine.grains import joined_inputs, layers_of_one_microbatch, specs_of_values
from varuna_capslog.engine.stage import LossFunction
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.signature import Signatures
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.profiles.conditions import ONE_MICROBATCH, PART_SECONDS, UPDATE_RATE
from varuna_capslog.profiles.record import Observation, Profile, TensorRecord
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling import cache
from varuna_capslog.profiling.calibration import corrected_speed
from varuna_capslog.profiling.conditions import (
    InputSizes,
    Progress,
    RunConditions,
    conditions_of_run,
    input_sizes,
    profile_of,
    shapes_of,
)
from varuna_capslog.profiling.estimation.headroom import state_headroom
from varuna_capslog.profiling.estimation.hollow import HollowRun, loss_of_each, run_halves, run_hollow
from varuna_capslog.profiling.estimation.lifetimes import Recipes
from varuna_capslog.profiling.estimation.quirks import QUIRKS, QUIRKS_VERSION, Quirks
from varuna_capslog.profiling.estimation.rates import RATES_VERSION, Speed
from varuna_capslog.profiling.trim import TrimmedRun, skeleton
from varuna_capslog.profiling.weighing import Halves

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config

__all__ = [
    "Memo",
    "StageEstimate",
    "StageEstimator",
    "estimate_config",
    "estimate_workload",
    "estimated_profile",
    "key_of_range",
    "row_of",
]

_USUAL = (0.1, 0.5, 0.9)
"""Quantiles of the sampled input sizes for which fragmentation is simulated, besides the largest size."""
_SIMULATED = 6
"""Number of stages for which fragmentation is simulated."""


@dataclass(frozen=True)
class StageEstimate(HollowRun):
    """Costs of layers [first, end) as one stage."""

    layers: tuple[int, int]


class Memo:
    """Results that estimators of related models share.

    runs, halves: results of runs by key.
    alive: objects whose identities are in the keys; kept here so that no identity is used twice.
    recipes: results of operators (`lifetimes.Recipes`), for further runs.
    estimators: of configs, by config and conditions as text, and by the part of this text that determines the model.
    speeds: by device, kind of GPU and threads; a CPU is measured once, so that its seconds can be compared.
    """

    def __init__(self) -> None:
        self.runs: dict[object, HollowRun] = {}
        self.halves: dict[object, Halves] = {}
        self.alive: list[object] = []
        self.recipes = Recipes()
        self.estimators: dict[str, StageEstimator] = {}
        self.speeds: dict[tuple[str, str, int], Speed] = {}


class StageEstimator:
    """Estimates stages of one workload under one set of conditions.

    Args:
        conditions: of the runs; their device need not be present, and `inputs` replaces their `input`.
        inputs: specs of the chain's inputs; None: the workload's `profile_inputs`.
        speed: for the seconds; None: from `calibration` for the device.
        memo: shared by estimators of related models, so that equal runs are made once.
        grain: microbatches of one call; the other arguments are for one microbatch.

    Raises:
        CapslogError: estimates do not support the device, or a layer cannot run on these inputs.
    """

    def __init__(
        self,
        workload: Workload,
        conditions: RunConditions | None = None,
        inputs: Mapping[str, TensorSpec] | None = None,
        speed: Speed | None = None,
        memo: Memo | None = None,
        grain: int = 1,
    ) -> None:
        self.workload, self.grain = workload, grain
        conditions = conditions or RunConditions()
        quirks = Quirks(conditions.device, conditions.gpu)
        self.speed = speed or corrected_speed(conditions.device, conditions.gpu)
        with torch.random.fork_rng(devices=[]):
            self.chain = skeleton(workload)
        # a factory's example inputs are known after it was called
        inputs = workload.profile_inputs(conditions.microbatch_size) if inputs is None else inputs
        self._inputs, one_microbatch = inputs, inputs
        inputs = joined_inputs([inputs] * grain, range(grain))
        self.conditions = replace(conditions, input=shapes_of(inputs))
        with quirks.dispatch():
            # always on CPU tensors, as in the runs, so that both have the same operators
            shapes = ShapeTable(self.chain, "cpu", conditions.precision, conditions.weights)
            self.specs, outputs = shapes.boundaries(inputs), shapes.boundaries(one_microbatch)[-1]
        self._goal, self._loss = workload.profile_targets(conditions.microbatch_size), cast(LossFunction, workload.loss)
        if grain > 1:
            self._goal = [self._goal[0]] * grain, self._goal[1]
            self._loss = loss_of_each(workload.loss, outputs, self.specs[-1])
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo = memo or Memo()
        self._memo.alive += [self.chain, workload]
        self._keys: dict[tuple[int, int], object] = {}
        self._signatures = Signatures(self.chain.layers)

    @property
    def recipes(self) -> Recipes:
        """Recipes of the operators in the runs so far."""
        return self._memo.recipes

    @classmethod
    def of_config(cls, config: Config, memo: Memo | None = None) -> StageEstimator:
        """Return the estimator for a config's training run at its largest inputs; from the memo if it is there."""
        from varuna_capslog.config.reading import dump_config  # imports pydantic, which costs of workloads do without

        memo, conditions = memo or Memo(), conditions_of_run(config, {})
        # the planner, the capacity and the cuts do not change the costs of a stage
        anyhow: dict[str, Any] = {"planner": "", "schedule": "varuna", "capacity": None, "search_seconds": None}
        anyhow |= {"cuts": None, "stages_per_rank": 1}
        pipeline = config.pipeline.model_copy(update=anyhow)
        text = dump_config(config.model_copy(update={"pipeline": pipeline})) + repr(conditions)
        if text in memo.estimators:
            return memo.estimators[text]
        # what else a plan chooses does not change the model
        chosen = {"train": config.train.with_blocks(1), "pipeline": pipeline.model_copy(update={"recompute": False})}
        of_model = dump_config(config.model_copy(update=chosen)) + conditions.device + conditions.gpu
        if of_model in memo.estimators:
            estimator = memo.estimators[of_model]._under(conditions)
        else:
            kind = conditions.device, conditions.gpu, config.train.threads
            if kind not in memo.speeds:
                memo.speeds[kind] = corrected_speed(*kind)
            estimator = cls(load_workload(config), conditions, speed=memo.speeds[kind], memo=memo)
            memo.estimators[of_model] = estimator
        memo.estimators[text] = estimator
        return estimator

    def at(self, inputs: Mapping[str, TensorSpec]) -> StageEstimator:
        """Return an estimator of the same workload and conditions with inputs of another size."""
        return StageEstimator(self.workload, self.conditions, inputs, self.speed, self._memo, self.grain)

    def of_grain(self, grain: int) -> StageEstimator:
        """Return an estimator of the same workload and conditions with `grain` microbatches in one call."""
        return StageEstimator(self.workload, self.conditions, self._inputs, self.speed, self._memo, grain)

    def _under(self, conditions: RunConditions) -> StageEstimator:
        """Return an estimator of the same chain and inputs under conditions of another run shape."""
        return self._changed(conditions=replace(conditions, input=self.conditions.input))

    def with_one_block(self) -> StageEstimator:
        """Return the estimator with one accumulation block, where all backwards but the first add to gradients."""
        if self.conditions.blocks == 1:
            return self
        return self._changed(conditions=replace(self.conditions, blocks=1))

    def of_chain(self, chain: Chain) -> StageEstimator:
        """Return an estimator of the same workload and conditions with a chain that passes on the same tensors."""
        self._memo.alive.append(chain)
        return self._changed(chain=chain)

    def _changed(self, **attributes: Any) -> StageEstimator:
        estimator = copy.copy(self)
        vars(estimator).update(attributes, _keys={})
        if estimator.chain is not self.chain:
            estimator._signatures = Signatures(estimator.chain.layers)
        return estimator

    def stage(self, first: int, end: int, parts: tuple[str, ...] = ()) -> StageEstimate:
        """Estimate the stage of layers first .. end-1, any range of the chain. parts: parts of each layer that its
        backward recomputes; all other parts are kept then. Raises CapslogError where a layer or the loss cannot run on
        fake tensors, or a layer's parts cannot be found.
        """
        run = replace(self.trimmed_run(first, end), parts=parts)
        key = (self.run_key(first, end), self.speed, parts)
        hollow = self._memo.runs.get(key)
        if hollow is None:
            conditions = replace(self.conditions, recompute=False) if parts else self.conditions
            quirks, loss = Quirks(self.conditions.device, self.conditions.gpu), self._loss
            hollow = run_hollow(self._mode, self.chain, run, conditions, loss, quirks, self.speed, self.recipes)
            self._memo.runs[key] = hollow
        return StageEstimate(**vars(hollow), layers=(first, end))

    def run_key(self, first: int, end: int) -> object:
        """Return a key that is equal for stages of this workload and related ones (`Memo`) that do the same work."""
        if (first, end) not in self._keys:
            run = self.trimmed_run(first, end)
            key = _run_key(self.chain, run, self.conditions, self.workload, self._signatures)
            self._keys[first, end] = key, self.grain
        return self._keys[first, end]

    def trimmed_run(self, first: int, end: int) -> TrimmedRun:
        """Return the run of layers first .. end-1."""
        return TrimmedRun(first, end, len(self.chain), tuple(self.specs[first : end + 1]), *self._goal)

    def part_seconds(self, layer: int, parts: tuple[str, ...]) -> float:
        """Estimate the seconds by which recomputing these parts lengthens the layer's backward; raises as `stage`."""
        with_parts, plain = self.stage(layer, layer + 1, parts), self.stage(layer, layer + 1)
        return max(0.0, with_parts.backward_seconds - plain.backward_seconds)

    def halves(self, first: int, end: int) -> Halves:
        """Estimate the two halves of the stage's backward; raises as `stage`."""
        run, key = self.trimmed_run(first, end), ("halves", self.run_key(first, end), self.speed)
        halves = self._memo.halves.get(key)
        if halves is None:
            quirks, loss = Quirks(self.conditions.device, self.conditions.gpu), self._loss
            halves = run_halves(self._mode, self.chain, run, self.conditions, loss, quirks, self.speed, self.recipes)
            self._memo.halves[key] = halves
        return halves


def estimate_workload(workload: Workload, conditions: RunConditions | None = None) -> Profile:
    """Profile a workload, also without a config, and without running it; see `StageEstimator`."""
    return estimated_profile(StageEstimator(workload, conditions))


def estimated_profile(estimator: StageEstimator) -> Profile:
    """Return the profile of an estimator's workload."""
    return _profile(estimator, input_sizes(estimator.workload, estimator.conditions.microbatch_size), "gloo", None)


def estimate_config(
    config: Config,
    progress: Progress | None = None,
    memo: Memo | None = None,
    use_cache: bool = False,
) -> Profile:
    """Profile the model of a config under the conditions of its training run, without a device. Raises CapslogError
    where a layer or the loss cannot run on fake tensors.

    use_cache: return the stored estimate of the same model and conditions, if any; store a new estimate.
    """
    estimator = StageEstimator.of_config(config, memo)
    sizes, transport = input_sizes(estimator.workload, config.train.microbatch_size), config.pipeline.transport

    def estimated() -> Profile:
        return _profile(estimator, sizes, transport, progress)

    if not use_cache:
        return estimated()
    return cache.kept(_key(estimator, sizes, transport), estimator.chain.name, estimated)


def _profile(estimator: StageEstimator, sizes: InputSizes, transport: str, progress: Progress | None) -> Profile:
    chain = estimator.chain
    several = [estimator.of_grain(grain) for grain in estimator.conditions.grains]
    count = len(stage_runs(len(chain))) * (1 + len(several))
    progress = progress or (lambda done, total, text: None)
    progress(0, count, "starting")
    stages, rows = _rows(estimator, functools.partial(_progress_behind, progress, 0, count))
    facts: dict[str, Any] = {
        "attention": "+".join(sorted(frozenset().union(*(stage.attention for stage in stages)))) or "none",
        "seconds": f"classes({estimator.speed.name}), {estimator.speed.source}",
        "headroom": _headroom(estimator, stages, sizes, transport),
    }
    if limits := frozenset().union(*(stage.limits for stage in stages)):
        facts["limits"] = sorted(limits)
    single_stages = [stage for stage in stages if stage.layers[1] - stage.layers[0] == 1]
    sizes_of_weights = sum(parameter.nbytes for layer in chain.layers for parameter in layer.module.parameters())
    if sizes_of_weights:
        facts[UPDATE_RATE] = sum(stage.update_seconds for stage in single_stages) / sizes_of_weights
    if parts := estimator.conditions.parts:
        facts[PART_SECONDS] = [[layer, list(names), estimator.part_seconds(layer, names)] for layer, names in parts]
    if several:
        once = specs_of_values(chain, estimator.specs)
        refused = [
            layers_of_one_microbatch(chain, (once, specs_of_values(chain, larger.specs)), larger.grain)
            for larger in several
        ]
        facts[ONE_MICROBATCH] = sorted({layer for layers in refused for layer in layers})
    conditions = _key(estimator, sizes, transport) | facts
    profile = profile_of(chain, rows, "estimated", conditions, specs=estimator.specs)
    pairs = zip(profile.layers, single_stages, strict=True)
    layers = tuple(replace(layer, divisible=stage.divisible) for layer, stage in pairs)
    profile = replace(profile, layers=layers, observations=(*profile.observations, *_rows_with_parts(estimator)))
    for larger in several:
        before = len(profile.observations)
        _, more = _rows(larger, functools.partial(_progress_behind, progress, before, count))
        profile = replace(profile, observations=(*profile.observations, *more), tensors=_with_fixed(profile, larger))
    return profile


def _progress_behind(progress: Progress, before: int, count: int, done: int, text: str) -> None:
    progress(before + done, count, text)


def _rows(
    estimator: StageEstimator, progress: Callable[[int, str], None]
) -> tuple[list[StageEstimate], list[Observation]]:
    """Return the runs of all layers and pairs, and their rows. `progress` is called with the number of finished runs
    and the names of the last run's layers.
    """
    names, stages, rows = [layer.name for layer in estimator.chain.layers], [], []
    for number, (first, end) in enumerate(stage_runs(len(names))):
        stages.append(estimator.stage(first, end))
        rows.append(row_of(estimator, first, end))
        progress(number + 1, " + ".join(names[first:end]))
    return stages, rows


def _rows_with_parts(estimator: StageEstimator) -> list[Observation]:
    """Return the rows of each layer with recomputed parts, and of neighbours with the same parts."""
    parts = set(estimator.conditions.parts)
    singles = [row_of(estimator, layer, layer + 1, names) for layer, names in sorted(parts)]
    pairs = [(layer, names) for layer, names in sorted(parts) if (layer + 1, names) in parts]
    return [*singles, *(row_of(estimator, layer, layer + 2, names) for layer, names in pairs)]


def row_of(estimator: StageEstimator, first: int, end: int, parts: tuple[str, ...] = ()) -> Observation:
    """Return the row of layers first .. end-1 for a profile. parts: as for `StageEstimator.stage`; such a row has no
    halves of a backward.
    """
    # with a block for every microbatch, no backward would add to the parameters' gradients
    one_block, stage = estimator.with_one_block(), estimator.stage(first, end, parts)
    conditions = estimator.conditions
    size, recompute = estimator.grain * conditions.microbatch_size, conditions.recompute and not parts
    conditions = replace(conditions, microbatch_size=size, recompute=recompute)
    row = conditions.row(
        stage.layers,
        (estimator.specs[first], estimator.specs[end]),
        (stage.peak_bytes, stage.static_bytes, stage.saved_bytes),
        (stage.forward_seconds, stage.backward_seconds),
        one_block.stage(first, end, parts).actions,
    )
    if parts:
        return replace(row, parts=parts)
    return one_block.halves(first, end).added_to(row) if conditions.halves else row


def _with_fixed(profile: Profile, several: StageEstimator) -> tuple[TensorRecord, ...]:
    """Return the profile's tensors; `fixed` where a tensor has the same size in the larger calls of `several`."""
    return tuple(
        replace(
            tensor,
            fixed=several.specs[0 if tensor.writer is None else tensor.writer + 1][tensor.name].num_bytes
            == tensor.bytes,
        )
        for tensor in profile.tensors
    )


def _headroom(
    estimator: StageEstimator, stages: Sequence[StageEstimate], sizes: InputSizes, transport: str
) -> dict[str, Any]:
    """Return the bytes beyond a predicted peak, from the largest stages at the largest and at usual sizes."""
    device = estimator.conditions.device
    if device == "cpu":
        return state_headroom(device, transport, [])
    usual = [sizes.quantile(part) for part in _USUAL] if len(sizes.sampled) > 1 else []
    others = [estimator.at(inputs) for inputs in usual]
    largest = max(stage.peak_bytes for stage in stages)
    # plans balance peaks, so stages much smaller than the largest layers and pairs do not matter
    deciding = {stage.events: stage for stage in stages if 2 * stage.peak_bytes >= largest}
    picked = sorted(deciding.values(), key=lambda stage: -stage.peak_bytes)[:_SIMULATED]
    traces = [[stage, *(resized.stage(*stage.layers) for resized in others)] for stage in picked]
    return state_headroom(device, transport, traces, estimator.conditions.gpu)


def _key(estimator: StageEstimator, sizes: InputSizes, transport: str) -> dict[str, Any]:
    """Return the conditions of an estimate that are known before it, in the form of JSON."""
    conditions, chain = estimator.conditions, estimator.chain
    dilations = {
        step
        for layer in chain.layers
        for part in layer.module.modules()
        for step in _whole_numbers(getattr(part, "dilation", 1))
    }
    return {
        "source": "estimated",
        "device": conditions.device,
        **({"gpu": conditions.gpu} if conditions.gpu else {}),
        "parameter_types": "+".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in _weights(chain)}))
        or "none",
        "memory_format": "channels_last" if any(map(_is_channels_last, _weights(chain))) else "contiguous",
        "microbatch_size": conditions.microbatch_size,
        "input": {name: list(shape) for name, shape in conditions.input.items()},
        "input_sizes": sizes.to_json(),
        "dilation": max(dilations, default=1),
        **conditions.types(chain),
        "schedule": conditions.schedule,
        "recompute": conditions.recompute,
        "stage_inputs": conditions.stage_inputs,
        "transport": transport,
        "accumulation_blocks": conditions.blocks,
        **({"grains": list(conditions.grains)} if conditions.grains else {}),
        **({"parts": [[layer, list(names)] for layer, names in conditions.parts]} if conditions.parts else {}),
        "peak_source": "lifetimes of fake storages",
        "quirks": sorted(name for name, quirk in QUIRKS.items() if conditions.device in quirk.devices),
        "quirks_version": QUIRKS_VERSION,
        "rates_version": RATES_VERSION,
        # corrections come and go with measured profiles; a CPU's own speed differs from one process to the next
        **({"corrected": estimator.speed.source} if "measured profiles" in estimator.speed.source else {}),
        "torch": torch.__version__,
        "model_digest": cache.model_digest(estimator.workload, chain),
    }


def _weights(chain: Chain) -> list[torch.Tensor]:
    parameters = chain.named_parameters().values()
    return [parameter for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _whole_numbers(value: Any) -> list[int]:
    values = value if isinstance(value, tuple) else (value,)
    return [number for number in values if isinstance(number, int)]


def _run_key(
    chain: Chain, run: TrimmedRun, conditions: RunConditions, workload: Workload, signatures: Signatures
) -> object:
    """Return a key that is equal for runs that do the same work; it must hold all that a result depends on."""
    return (
        key_of_range(chain, run.first, run.end, run.specs, signatures),
        (run.has_upstream, run.has_downstream),
        (
            conditions.device,
            conditions.gpu,
            conditions.precision,
            conditions.weights,
            conditions.recompute,
            conditions.stage_inputs,
            conditions.blocks,
        ),
        str(conditions.recipe),
        None if run.has_downstream else (workload.loss_key(), conditions.microbatch_size),
    )


def key_of_range(
    chain: Chain,
    first: int,
    end: int,
    specs: Sequence[Mapping[str, TensorSpec]],
    signatures: Signatures,
) -> object:
    """Return a key that is equal for ranges of layers that do the same work on tensors with equal specs.

    It holds: the `signature` of the layers, and the tensors that they read and write; the tensors at every cut (shape,
    dtype, stride, requires_grad); the parameters that are shared, within the range and with layers elsewhere. A
    tensor's name counts by its place among the sorted names of the range, since tensors cross cuts in that order.

    specs: of the tensors across the cuts first .. end. signatures: of the chain's layers.
    """
    layers = chain.layers[first:end]
    inside = set(range(first, end))
    numbers = [{name: number for number, (name, _) in enumerate(layer.module.named_parameters())} for layer in layers]
    ties = tuple(
        (
            tuple((index - first, numbers[index - first][name]) for index, name in shared.uses if index in inside),
            # uses elsewhere send their gradients here
            tuple(index < first for index in shared.layers if index not in inside),
        )
        for shared in chain.shared
        if inside & set(shared.layers)
    )
    names = {name for cut in specs for name in cut}.union(*((*layer.reads, *layer.writes) for layer in layers))
    place = {name: number for number, name in enumerate(sorted(names))}
    return (
        signatures.run(first, end),
        tuple((tuple(map(place.get, layer.reads)), tuple(map(place.get, layer.writes))) for layer in layers),
        tuple(tuple((place[name], spec) for name, spec in sorted(cut.items())) for cut in specs),
        ties,
    )
