"""Peaks that are estimated without a device, beside the allocator's: single stages, autocast, offloaded intervals."""

from __future__ import annotations

import functools
from typing import Any

import torch
import truth
from common import run_ranks
from parts.trained import errors_told, kind_of, train_rank

from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.rehearsal import rank_peaks

GPU_AIM = "median <= 0.3 %, never > 0.5 % under"
SINGLE, AUTOCAST, OFFLOAD = "single stages", "single stages, autocast bfloat16", "intervals, offloaded and recomputed"
ROWS = {"cuda": dict.fromkeys((SINGLE, AUTOCAST, OFFLOAD), GPU_AIM), "cpu": {AUTOCAST: "", OFFLOAD: ""}}
TRANSFORMER = "transformer, 4 blocks, d=256, T=128"
INTERVALS = (MemoryInterval(1, 3, "offload"), MemoryInterval(3, 5, "recompute+offload"))
"""Of the chain embedding, block 0 .. 3, head."""
MICROBATCHES = 4


def measure(device: torch.device, tell: Any) -> None:
    """Tells the errors; on the CPU without an aim, for stages this small are not what the aim is about."""
    gpu = kind_of(tell.facts) if device.type == "cuda" else ""
    autocast = [name for name in truth.MODELS if "bfloat16" in name]
    if device.type == "cuda":
        others = [name for name in truth.MODELS if name not in autocast]
        _tell(tell, SINGLE, device, *_single(others, device, gpu))
    _tell(tell, AUTOCAST, device, *_single(autocast, device, gpu))
    _tell(tell, OFFLOAD, device, *_offloaded(device, gpu))


def _tell(tell: Any, row: str, device: torch.device, predicted: list[int], measured: list[int]) -> None:
    told, errors, met = errors_told(predicted, measured)
    passed = met if device.type == "cuda" else None
    tell(row, told, passed, errors=errors, predicted_bytes=predicted, measured_bytes=measured)


def _single(names: list[str], device: torch.device, gpu: str) -> tuple[list[int], list[int]]:
    trials = [trial for name in names for trial in truth.single_stages(name, device.type, gpu)]
    return [trial.estimated for trial in trials], [trial.measured for trial in trials]


def _offloaded(device: torch.device, gpu: str) -> tuple[list[int], list[int]]:
    """One rank with everything kept, and with intervals."""
    config = truth.config_of(TRANSFORMER)
    size = config.train.microbatch_size
    options = EngineOptions(MICROBATCHES, schedule="1f1b", recompute=False, clip_norm=0.1)
    conditions = RunConditions(device=device.type, microbatch_size=size, recompute=False, gpu=gpu)
    make = functools.partial(load_workload, config)
    estimator = StageEstimator(make(), conditions)
    layers = ((0, len(estimator.chain)),)
    predicted, measured = [], []
    for memory in ((), INTERVALS):
        layout = Layout((PlanStage(layers, (0,), memory=memory),), 1)
        predicted += rank_peaks(estimator, layout, options)
        measured += [run_ranks(train_rank, 1, make, layout, options, size, device)[0]["peak_bytes"]]
    return predicted, measured
