"""Compares peaks estimated without a device with the allocator's, for one rank that trains a whole model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import truth
from common import run_ranks
from parts.ranks import workload_of
from parts.trained import kind_of, train_rank

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions, LossScale, Recipe
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.rehearsal import rank_peaks

AIM = "within 0.3 %, never > 0.5 % under"
INTERVALS = (MemoryInterval(1, 3, "offload"), MemoryInterval(3, 5, "recompute+offload"))
"""Of the chain embedding, block 0 .. 3, head."""
MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """Model, recomputation and memory intervals of a training run.

    Attributes:
        values: a config of `truth.MODELS`; None: DETR R50 of the paper on images of 512 x 512.
        recompute: stages recompute their forwards.
        memory: memory intervals, whose layers have another memory action.
    """

    values: dict[str, Any] | None
    recompute: bool = False
    memory: tuple[MemoryInterval, ...] = ()

    def workload(self) -> Workload:
        """Return the workload to train."""
        if self.values is None:
            return workload_of("rn50_e6", (512, 512))
        return load_workload(truth.config_with(self.values))

    @property
    def size(self) -> int:
        """Samples of a microbatch."""
        return 1 if self.values is None else int(self.values["train"]["microbatch_size"])

    @property
    def types(self) -> dict[str, Any]:
        """Options that follow from the run's dtypes."""
        return {} if self.values is None else truth.types_of(truth.config_with(self.values))

    def layout(self, layers: int) -> Layout:
        """All layers on one rank."""
        return Layout((PlanStage(((0, layers),), (0,), memory=self.memory),), 1)

    def options(self) -> EngineOptions:
        """Return the engine's options."""
        schedule = "varuna" if self.recompute else "1f1b"
        types = {"recipe": Recipe()} | self.types
        scale = LossScale(1024.0, dynamic=False) if types.get("precision") == "float16" else None
        return EngineOptions(
            MICROBATCHES, schedule=schedule, recompute=self.recompute, clip_norm=0.1, loss_scale=scale, **types
        )


_LARGE = truth.other("transformer", 16, blocks=8, dim=1024, length=512)
_LOW = {"weights": "bfloat16", "moments": "bfloat16"}
CASES = {
    "cuda": {
        "transformer, 8 blocks, d=1024, T=512": Case(_LARGE),
        "the same, offloaded and recomputed by layers": Case(_LARGE, memory=INTERVALS),
        "the same, autocast bfloat16": Case(truth.other("transformer", 16, "bfloat16", blocks=8, dim=1024, length=512)),
        "the same, weights and moments of 16 bits": Case(
            truth.other("transformer", 16, "bfloat16", _LOW, blocks=8, dim=1024, length=512)
        ),
        "decoder-only with fused attention, float16": Case(
            truth.other("decoder", 16, "float16", blocks=8, dim=1024, length=512)
        ),
        "ResNet-18, BatchNorm trained, 224x224": Case(truth.other("resnet", 32, side=224), recompute=True),
        "DETR R50, 512x512": Case(None, recompute=True),
    },
    "cpu": {
        "transformer, autocast bfloat16": Case(truth.other("transformer", 4, "bfloat16")),
        "transformer, offloaded and recomputed by layers": Case(truth.other("transformer", 4), memory=INTERVALS),
    },
}
ROWS = {device: dict.fromkeys(cases, AIM if device == "cuda" else "") for device, cases in CASES.items()}


def measure(device: torch.device, tell: Any) -> None:
    """Write the errors; on the CPU without an aim, since the aim does not apply to stages this small."""
    run_ranks(measure_all, 1, device, kind_of(tell.facts) if device.type == "cuda" else "", tell, timeout=600.0)


def measure_all(communicator: Communicator, device: torch.device, gpu: str, tell: Any) -> None:
    """Train all cases in one process, which opens the device once; a failed case is written, and the next one runs."""
    for name, case in CASES[device.type].items():
        guess = estimated(case, device.type, gpu)
        try:
            layers = len(case.workload().build_chain())
            make = functools.partial(case.workload)
            rank = train_rank(communicator, make, case.layout(layers), case.options(), case.size, device)
        except (CapslogError, RuntimeError) as error:
            tell.not_run(name, f"it failed: {str(error).splitlines()[0]}", lacks=False)
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.reset_peak_memory_stats()
        error = guess / rank["peak_bytes"] - 1
        passed = -0.005 <= error <= 0.003 if device.type == "cuda" else None
        result = f"{rank['peak_bytes'] / 2**20:.0f} MiB, {error:+.3%}; a step of {rank['seconds']:.3f} s"
        tell(name, result, passed, predicted_bytes=guess, **rank)


def estimated(case: Case, device: str, gpu: str) -> int:
    """Return the predicted peak of the rank."""
    conditions = RunConditions(device, case.size, recompute=case.recompute, stage_inputs="host", gpu=gpu, **case.types)
    estimator = StageEstimator(case.workload(), conditions)
    return rank_peaks(estimator, case.layout(len(estimator.chain)), case.options())[0]
