"""Estimates the peak of every stage range of a configuration directly, without any memory model.

`memory_models.py` calls it: 325 ranges of 25 layers, each as one stage on fake tensors. Takes a few minutes a
configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.config.reading import Config, load_config
from varuna_capslog.memory.costs import NEVER
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import Memo, StageEstimate, StageEstimator, estimate_config

__all__ = ["PAPER", "configuration", "estimator_of", "exact_ranges", "profile_of", "requested_bytes"]

PAPER = ("rn50_e6", "rn50_d_e6", "rn101_e6", "rn101_d_e6", "rn101_e12", "rn101_d_e12")

_CONFIGS = Path(__file__).parents[2] / "configs" / "paper"


def configuration(name: str) -> Config:
    """Load a configuration of the paper."""
    return load_config(_CONFIGS / f"{name}.yaml", [])


def profile_of(name: str, memo: Memo) -> Profile:
    """Return the estimated profile of a configuration."""
    return estimate_config(configuration(name), memo=memo)


def estimator_of(name: str, memo: Memo) -> StageEstimator:
    """Return an estimator of the configuration's stages."""
    config = configuration(name)
    return StageEstimator(
        load_workload(config),
        RunConditions(
            device=config.profile.device or "cuda",
            microbatch_size=config.train.microbatch_size,
            precision=config.train.precision,
            recompute=config.pipeline.recompute,
            stage_inputs=config.pipeline.stage_inputs,
        ),
        memo=memo,
    )


def requested_bytes(stage: StageEstimate) -> int:
    """Return the peak of the bytes that a stage requests, in blocks of 512 bytes, without the allocator's excess."""
    live: dict[int, int] = {}
    current = peak = 0
    for key, size in stage.events:
        if size:
            live[key] = -(-size // 512) * 512
            current += live[key]
        else:
            current -= live.pop(key)
        peak = max(peak, current)
    return peak


def exact_ranges(name: str, memo: Memo) -> NDArray[np.int64]:
    """Return the peak bytes of every range, [L, L + 1], NEVER where end <= first."""
    estimator = estimator_of(name, memo)
    size = len(estimator.chain)
    peaks = np.full((size, size + 1), NEVER, dtype=np.int64)
    for first in range(size):
        print(f"{name}: ranges that begin at layer {first} of {size}", file=sys.stderr, flush=True)
        for end in range(first + 1, size + 1):
            peaks[first, end] = estimator.stage(first, end).peak_bytes
    return peaks
