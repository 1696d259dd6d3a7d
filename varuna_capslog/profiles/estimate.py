"""Profiles without a device: every stage's real program of a step on fake tensors, its storages followed.

`capslog profile --estimate` and `prepare` call this. The runs, the record and the meaning of every number are those of
`measure`; the bytes are those of `hollow`, the seconds those of `roofline`. Runs that do the same work are run once.
Nothing is allocated, and the device that the profile is for need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.profiles import cache
from varuna_capslog.profiles.hollow import HollowRun, run_hollow
from varuna_capslog.profiles.quirks import quirks_of
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiles.skeleton import skeleton
from varuna_capslog.profiles.trim import RunConditions, TrimmedRun
from varuna_capslog.schedules import ALWAYS_RECOMPUTE
from varuna_capslog.trace import ShapeTable, layer_signature
from varuna_capslog.workload import Workload

if TYPE_CHECKING:
    from varuna_capslog.config import Config

__all__ = ["StageEstimate", "StageEstimator", "estimate_config", "estimate_stage", "estimate_workload"]

Progress = Callable[[int, int, str], None]
"""Called with (runs done, all runs, what has just ended); first with 0 runs done."""


@dataclass(frozen=True)
class StageEstimate:
    """What layers [first, end) cost as one stage; bytes and seconds as in `record.Observation`.

    Attributes:
        events: the step's allocations and releases in order, for `allocator.replay`.
    """

    layers: tuple[int, int]
    peak_bytes: int
    static_bytes: int
    saved_bytes: int
    transient_bytes: int
    boundary_in_bytes: int
    boundary_out_bytes: int
    forward_seconds: float | None
    backward_seconds: float | None
    events: tuple[tuple[int, int], ...]


class StageEstimator:
    """Estimates stages of one workload under one set of conditions.

    Args:
        device: "cpu" or "cuda"; the machine need not have it.
        microbatch_size, precision, recompute, stage_inputs: as in `measure.profile_workload`.
        blocks: accumulation blocks of one pipeline.
        memo: shared by estimators of related models, so that what they have in common is run once.
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
        memo: Memo | None = None,
    ) -> None:
        self.workload = workload
        inputs = workload.profile_inputs(microbatch_size)
        shapes = {name: list(spec.shape) for name, spec in inputs.items()}
        self.conditions = RunConditions(
            device, microbatch_size, shapes, precision, recompute, stage_inputs, blocks
        )
        quirks_of(device)  # refuses an unknown device at once
        self.chain = skeleton(workload)
        with quirks_of(device).dispatch():
            # on CPU tensors in any case, as the runs: both then see the same operators
            self.specs = ShapeTable(self.chain, "cpu", precision).boundaries(inputs)
        self._targets, self._normalisers = workload.profile_targets(microbatch_size)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo = Memo() if memo is None else memo

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
        key = self._key(run)
        found = self._memo.find(key)
        if found is None:
            quirks = quirks_of(self.conditions.device)
            found = run_hollow(self._mode, self.chain, run, self.conditions, self.workload.loss, quirks)
            self._memo.keep(key, found, (self.chain, self.workload))
        return StageEstimate(
            layers=(first, end),
            peak_bytes=found.peak_bytes,
            static_bytes=found.static_bytes,
            saved_bytes=found.saved_bytes,
            transient_bytes=max(0, found.peak_bytes - found.static_bytes),
            boundary_in_bytes=sum(spec.num_bytes for spec in run.specs[0].values()),
            boundary_out_bytes=sum(spec.num_bytes for spec in run.specs[-1].values()),
            forward_seconds=None,
            backward_seconds=None,
            events=found.events,
        )

    def _key(self, run: TrimmedRun) -> object:
        """Equal for runs that do the same work: layers, tensors at every cut, neighbours, ties, conditions, loss."""
        layers = self.chain.layers[run.first : run.end]
        inside = set(range(run.first, run.end))
        ties = tuple(
            (
                tuple((index - run.first, name) for index, name in shared.uses if index in inside),
                # uses elsewhere send their gradients here
                tuple(index < run.first for index in shared.layers if index not in inside),
            )
            for shared in self.chain.shared
            if inside & set(shared.layers)
        )
        conditions = self.conditions
        return (
            tuple((layer.reads, layer.writes, layer_signature(layer), _kinds(layer.module)) for layer in layers),
            tuple(tuple(sorted(cut.items())) for cut in run.specs),
            (run.has_upstream, run.has_downstream, ties),
            (conditions.device, conditions.precision, conditions.recompute, conditions.stage_inputs, conditions.blocks),
            None if run.has_downstream else (id(self.workload), conditions.microbatch_size),
        )


def _kinds(module: torch.nn.Module) -> tuple[object, ...]:
    """The very classes of all parts (a name may stand for two), and what is hooked on them."""
    return tuple(
        (type(part), tuple(map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))))
        for part in module.modules()
    )


class Memo:
    """Results of runs by all that they depend on. Keeps what its keys name by identity."""

    def __init__(self) -> None:
        self._found: dict[object, HollowRun] = {}
        self._alive: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: object) -> HollowRun | None:
        return self._found.get(key)

    def keep(self, key: object, run: HollowRun, named: Sequence[object]) -> None:
        self._found[key] = run
        self._alive |= {id(item): item for item in named}


def estimate_stage(workload: Workload, first: int, end: int, **conditions: Any) -> StageEstimate:
    """One stage of a workload; see `StageEstimator`, which is better for many stages of one model."""
    return StageEstimator(workload, **conditions).stage(first, end)


def estimate_workload(
    workload: Workload,
    *,
    device: str = "cpu",
    microbatch_size: int = 1,
    precision: str = "float32",
    recompute: bool = True,
    stage_inputs: str = "host",
    blocks: int = 1,
    memo: Memo | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Profiles a workload, also one that no config describes, without running it; see `StageEstimator`."""
    estimator = StageEstimator(
        workload,
        device=device,
        microbatch_size=microbatch_size,
        precision=precision,
        recompute=recompute,
        stage_inputs=stage_inputs,
        blocks=blocks,
        memo=memo,
    )
    return _profile(estimator, _describe(estimator), progress)


def estimate_config(config: Config, progress: Progress | None = None, memo: Memo | None = None) -> Profile:
    """Profiles the model of a config under the conditions of its training run, without a device.

    Raises:
        CapslogError: a layer or the loss cannot run on fake tensors.
    """
    from varuna_capslog.config import load_workload

    device = config.profile.device or config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    estimator = StageEstimator(
        load_workload(config),
        device=device,
        microbatch_size=config.train.microbatch_size,
        precision=config.train.precision,
        recompute=config.pipeline.recompute or config.pipeline.schedule in ALWAYS_RECOMPUTE,
        stage_inputs=config.pipeline.stage_inputs,
        blocks=config.num_blocks // config.pipeline.replicas,
        memo=memo,
    )
    return _profile(estimator, _describe(estimator), progress)


def _profile(estimator: StageEstimator, described: Mapping[str, Any], progress: Progress | None) -> Profile:
    chain, conditions = estimator.chain, estimator.conditions
    names = [layer.name for layer in chain.layers]
    runs = stage_runs(len(chain))
    progress = progress or (lambda done, total, text: None)
    progress(0, len(runs), "starting")
    rows = []
    for number, (first, end) in enumerate(runs):
        rows.append(_row(estimator.stage(first, end), conditions))
        progress(number + 1, len(runs), " + ".join(names[first:end]))
    parameters = [
        sum(parameter.numel() * parameter.itemsize for parameter in layer.module.parameters()) for layer in chain.layers
    ]
    return Profile(
        layers=layers_of_runs(names, rows, parameters),
        model=chain.name,
        source="estimated",
        conditions=described,
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


def _describe(estimator: StageEstimator) -> dict[str, Any]:
    conditions = estimator.conditions
    return {
        "device": conditions.device,
        "dtype": conditions.precision,
        "microbatch_size": conditions.microbatch_size,
        "input": {name: list(shape) for name, shape in conditions.input.items()},
        "optimizer": "adamw",
        "schedule": "varuna" if conditions.recompute else "1f1b",
        "recompute": conditions.recompute,
        "stage_inputs": conditions.stage_inputs,
        "accumulation_blocks": conditions.blocks,
        "peak_source": "fake tensors",
        "torch": torch.__version__,
        "model_digest": cache.model_digest(estimator.workload, estimator.chain),
    }
