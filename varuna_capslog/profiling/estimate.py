"""Profiles without a device: every stage's real program of a step on fake tensors, its storages followed.

`capslog profile --estimate` and `prepare` call this. The runs, the record and the meaning of every number are those of
`measure`; the bytes are those of `hollow`, the seconds those of `roofline`. Runs that do the same work are run once.
Nothing is allocated, and the device that the profile is for need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling import cache
from varuna_capslog.profiling.conditions import RunConditions, conditions_of_run
from varuna_capslog.profiling.estimation.headroom import StepTrace, state_headroom
from varuna_capslog.profiling.estimation.hollow import run_hollow
from varuna_capslog.profiling.estimation.memo import Memo, run_key
from varuna_capslog.profiling.estimation.quirks import QUIRKS, QUIRKS_VERSION, quirks_of
from varuna_capslog.profiling.estimation.roofline import SPEEDS, Speed, calibrated_cpu
from varuna_capslog.profiling.sizes import InputSizes, input_sizes, shapes_of
from varuna_capslog.profiling.skeleton import skeleton
from varuna_capslog.profiling.trim import TrimmedRun

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config

__all__ = ["Memo", "StageEstimate", "StageEstimator", "estimate_config", "estimate_stage", "estimate_workload"]

Progress = Callable[[int, int, str], None]
"""Called with (runs done, all runs, what has just ended); first with 0 runs done."""

_USUAL = (0.1, 0.5, 0.9)
"""Input sizes that fragmentation is simulated with besides the largest, as parts of the sampled minibatches."""
_SIMULATED = 6
"""Stages that it is simulated for."""


@dataclass(frozen=True)
class StageEstimate:
    """What layers [first, end) cost as one stage; bytes and seconds as in `record.Observation`.

    Attributes:
        attention: how its layers attend: "eager" (matrices of softmax are there), "fused"; empty: they do not.
        limits: what it met of `quirks.LIMITS`, because of which its bytes are too low.
        events: the step's allocations and releases in order, for `allocator.replay`.
    """

    layers: tuple[int, int]
    peak_bytes: int
    static_bytes: int
    saved_bytes: int
    transient_bytes: int
    boundary_in_bytes: int
    boundary_out_bytes: int
    forward_seconds: float
    backward_seconds: float
    attention: frozenset[str]
    limits: frozenset[str]
    events: tuple[tuple[int, int], ...]


class StageEstimator:
    """Estimates stages of one workload under one set of conditions.

    Args:
        device: "cpu" or "cuda"; the machine need not have it.
        microbatch_size, precision, recompute, stage_inputs: as in `measure.profile_workload`.
        blocks: accumulation blocks of one pipeline.
        speed: for the seconds; None: that of `roofline` for the device.
        memo: shared by estimators of related models, so that what they have in common is run once.
        inputs: specs of the chain's inputs; None: the workload's `profile_inputs`.

    Raises:
        CapslogError: there is no table of quirks for the device, or a layer cannot run on these inputs.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        device: str = "cpu",
        microbatch_size: int = 1,
        precision: str = "float32",
        recompute: bool = True,
        stage_inputs: str = "host",
        blocks: int = 1,
        speed: Speed | None = None,
        memo: Memo | None = None,
        inputs: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.workload = workload
        inputs = workload.profile_inputs(microbatch_size) if inputs is None else inputs
        self.conditions = RunConditions(
            device, microbatch_size, shapes_of(inputs), precision, recompute, stage_inputs, blocks
        )
        quirks = quirks_of(device)
        self.speed = speed or (calibrated_cpu() if device == "cpu" else SPEEDS["rtx a4000"])
        with torch.random.fork_rng(devices=[]):
            self.chain = skeleton(workload)
        with quirks.dispatch():
            # on CPU tensors in any case, as the runs: both then see the same operators
            self.specs = ShapeTable(self.chain, "cpu", precision).boundaries(inputs)
        self._targets, self._normalisers = workload.profile_targets(microbatch_size)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo = Memo() if memo is None else memo

    @classmethod
    def under(
        cls,
        workload: Workload,
        conditions: RunConditions,
        inputs: Mapping[str, TensorSpec],
        speed: Speed | None = None,
        memo: Memo | None = None,
    ) -> StageEstimator:
        """An estimator under known conditions, their `input` aside: chain inputs are of these sizes."""
        given = {item.name: getattr(conditions, item.name) for item in fields(conditions) if item.name != "input"}
        return cls(workload, **given, speed=speed, memo=memo, inputs=inputs)

    @classmethod
    def of_config(cls, config: Config, speed: Speed | None = None, memo: Memo | None = None) -> StageEstimator:
        """The estimator for the training run that a config describes, at the largest inputs that it can meet."""
        # here, for scripts on machines without the config library
        from varuna_capslog.model.workload import load_workload

        workload = load_workload(config)
        inputs = workload.profile_inputs(config.train.microbatch_size)
        return cls.under(workload, conditions_of_run(config, inputs), inputs, speed, memo)

    def at(self, inputs: Mapping[str, TensorSpec]) -> StageEstimator:
        """The same workload and conditions with inputs of another size."""
        return self.under(self.workload, self.conditions, inputs, self.speed, self._memo)

    def stage(self, first: int, end: int) -> StageEstimate:
        """The stage of layers first .. end-1; any range of the chain.

        Raises:
            CapslogError: a layer or the loss cannot run on fake tensors.
        """
        last = end == len(self.chain)
        run = TrimmedRun(
            first,
            end,
            len(self.chain),
            tuple(self.specs[first : end + 1]),
            self._targets if last else None,
            self._normalisers if last else {},
        )
        key = (run_key(self.chain, run, self.conditions, self.workload), self.speed)
        found = self._memo.find(key)
        if found is None:
            quirks = quirks_of(self.conditions.device)
            loss = self.workload.loss
            recipes = self._memo.recipes
            found = run_hollow(self._mode, self.chain, run, self.conditions, loss, quirks, self.speed, recipes)
            self._memo.keep(key, found, (self.chain, self.workload))
        return StageEstimate(
            layers=(first, end),
            peak_bytes=found.peak_bytes,
            static_bytes=found.static_bytes,
            saved_bytes=found.saved_bytes,
            transient_bytes=max(0, found.peak_bytes - found.static_bytes),
            boundary_in_bytes=sum(spec.num_bytes for spec in run.specs[0].values()),
            boundary_out_bytes=sum(spec.num_bytes for spec in run.specs[-1].values()),
            forward_seconds=found.forward_seconds,
            backward_seconds=found.backward_seconds,
            attention=found.attention,
            limits=found.limits,
            events=found.events,
        )


def estimate_stage(workload: Workload, first: int, end: int, **conditions: Any) -> StageEstimate:
    """One stage of a workload; see `StageEstimator`, which is better for many stages of one model."""
    return StageEstimator(workload, **conditions).stage(first, end)


def estimate_workload(workload: Workload, *, progress: Progress | None = None, **conditions: Any) -> Profile:
    """Profiles a workload, also one that no config describes, without running it.

    Args:
        conditions: keywords of `StageEstimator`.
    """
    estimator = StageEstimator(workload, **conditions)
    return _profile(estimator, input_sizes(workload, estimator.conditions.microbatch_size), "gloo", progress)


def estimate_config(
    config: Config,
    progress: Progress | None = None,
    memo: Memo | None = None,
    speed: Speed | None = None,
    use_cache: bool = False,
) -> Profile:
    """Profiles the model of a config under the conditions of its training run, without a device.

    Args:
        memo, speed: see `StageEstimator`.
        use_cache: take the estimate that was made of the same model and conditions before, and keep a new one.

    Raises:
        CapslogError: a layer or the loss cannot run on fake tensors.
    """
    estimator = StageEstimator.of_config(config, speed, memo)
    sizes, transport = input_sizes(estimator.workload, config.train.microbatch_size), config.pipeline.transport
    if use_cache:
        known = cache.load(_key(estimator, sizes, transport))
        if known is not None:
            return known
    profile = _profile(estimator, sizes, transport, progress)
    if use_cache:
        cache.store(profile)
    return profile


def _profile(estimator: StageEstimator, sizes: InputSizes, transport: str, progress: Progress | None) -> Profile:
    chain = estimator.chain
    names = [layer.name for layer in chain.layers]
    runs = stage_runs(len(chain))
    progress = progress or (lambda done, total, text: None)
    progress(0, len(runs), "starting")
    stages = []
    for number, (first, end) in enumerate(runs):
        stages.append(estimator.stage(first, end))
        progress(number + 1, len(runs), " + ".join(names[first:end]))
    rows = [_row(stage, estimator.conditions) for stage in stages]
    parameters = [
        sum(parameter.numel() * parameter.itemsize for parameter in layer.module.parameters()) for layer in chain.layers
    ]
    found: dict[str, Any] = {
        "attention": "+".join(sorted(frozenset().union(*(stage.attention for stage in stages)))) or "none",
        "seconds": f"roofline({estimator.speed.name})",
        "headroom": _headroom(estimator, stages, sizes, transport),
    }
    if limits := frozenset().union(*(stage.limits for stage in stages)):
        found["limits"] = sorted(limits)
    return Profile(
        layers=layers_of_runs(names, rows, parameters),
        model=chain.name,
        source="estimated",
        conditions=_key(estimator, sizes, transport) | found,
        shared=tuple(SharedParameter(shared.name, shared.num_bytes, shared.layers) for shared in chain.shared),
        observations=tuple(rows),
    )


def _row(stage: StageEstimate, conditions: RunConditions) -> Observation:
    return Observation(
        layers=stage.layers,
        device=conditions.device,
        microbatch_size=conditions.microbatch_size,
        input=dict(conditions.input),
        memory_action="recompute" if conditions.recompute else "none",
        peak_bytes=stage.peak_bytes,
        static_bytes=stage.static_bytes,
        saved_bytes=stage.saved_bytes,
        transient_bytes=stage.transient_bytes,
        boundary_in_bytes=stage.boundary_in_bytes,
        boundary_out_bytes=stage.boundary_out_bytes,
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
    )


def _headroom(
    estimator: StageEstimator, stages: Sequence[StageEstimate], sizes: InputSizes, transport: str
) -> dict[str, Any]:
    """What a device must have beyond a predicted peak, from the largest stages at the largest and at usual sizes."""
    device = estimator.conditions.device
    if device == "cpu":
        return state_headroom(device, transport, [])
    usual = [sizes.quantile(part) for part in _USUAL] if len(sizes.sampled) > 1 else []
    others = [estimator.at(inputs) for inputs in usual]
    largest = max(stage.peak_bytes for stage in stages)
    # plans even peaks out: stages much smaller than the largest layers and pairs decide nothing
    deciding = {id(stage.events): stage for stage in stages if 2 * stage.peak_bytes >= largest}
    picked = sorted(deciding.values(), key=lambda stage: -stage.peak_bytes)[:_SIMULATED]
    traces = [[stage, *(other.stage(*stage.layers) for other in others)] for stage in picked]
    return state_headroom(
        device, transport, [[StepTrace(one.peak_bytes, one.events) for one in sizes_of_one] for sizes_of_one in traces]
    )


def _key(estimator: StageEstimator, sizes: InputSizes, transport: str) -> dict[str, Any]:
    """All that the numbers depend on, as JSON has it, as far as it is known beforehand."""
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
        "dtype": conditions.precision,
        "microbatch_size": conditions.microbatch_size,
        "input": {name: list(shape) for name, shape in conditions.input.items()},
        "input_sizes": sizes.to_json(),
        "dilation": max(dilations, default=1),
        "optimizer": "adamw",
        "schedule": "varuna" if conditions.recompute else "1f1b",
        "recompute": conditions.recompute,
        "stage_inputs": conditions.stage_inputs,
        "transport": transport,
        "accumulation_blocks": conditions.blocks,
        "peak_source": "lifetimes of fake storages",
        "quirks": sorted(name for name, quirk in QUIRKS.items() if conditions.device in quirk.devices),
        "quirks_version": QUIRKS_VERSION,
        "torch": torch.__version__,
        "model_digest": cache.model_digest(estimator.workload, chain),
    }


def _whole_numbers(value: Any) -> list[int]:
    values = value if isinstance(value, tuple) else (value,)
    return [item for item in values if isinstance(item, int)]
