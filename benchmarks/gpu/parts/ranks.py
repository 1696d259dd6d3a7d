"""Compares measured and predicted peaks of eight pipeline ranks on one device, as on the paper's eight GPUs.

Their tensors go over gloo through host memory, so ranks may share a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from common import plan, run_ranks
from parts.trained import errors_told, kind_of, train_rank

from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimate_workload
from varuna_capslog.profiling.estimation.headroom import HOPPER_CONTEXT_BYTES
from varuna_capslog.profiling.rehearsal import rank_peaks

ROOT = Path(__file__).resolve().parents[3]
RANKS, MICROBATCHES = 8, 4
GPU_AIM = "median <= 0.3 %, never > 0.5 % under"
CASES = {
    "cuda": {
        "RN50-E6, cuts of capslog": ("rn50_e6", "capslog", (1333, 1333)),
        "RN101-D-E6, cuts of exact": ("rn101_d_e6", "exact", (1333, 1333)),
        "RN50-E6, cuts of varuna": ("rn50_e6", "varuna", (1333, 1333)),
    },
    "cpu": {"RN50-E6 at 64 x 64, cuts of exact": ("rn50_e6", "exact", (64, 64))},
}
ROWS = {device: dict.fromkeys(cases, GPU_AIM if device == "cuda" else "") for device, cases in CASES.items()}


def workload_of(name: str, size: tuple[int, int]) -> Workload:
    """Return the workload of a configuration of the paper whose images all have one size."""
    config = load_config(ROOT / "configs/paper" / f"{name}.yaml", [f"profile.image_size=[{size[0]},{size[1]}]"])
    return load_workload(config)


def measure(device: torch.device, tell: Any) -> None:
    """Write the errors of all ranks, their reserved bytes, and the seconds of a step."""
    for row, (name, planner, size) in CASES[device.type].items():
        make = functools.partial(workload_of, name, size)
        conditions = RunConditions(device.type, gpu=kind_of(tell.facts) if device.type == "cuda" else "")
        cuts = plan(estimate_workload(make(), conditions), RANKS, planner=planner).cuts
        options = EngineOptions(MICROBATCHES, clip_norm=0.1)
        estimator = StageEstimator(make(), conditions)
        layout = Layout.pipelines(cuts, len(estimator.chain))
        predicted = rank_peaks(estimator, layout, options)
        why = _too_full(sum(predicted), tell.facts) if device.type == "cuda" else ""
        if why:
            tell.not_run(row, why)
            continue
        ranks = run_ranks(train_rank, RANKS, make, layout, options, 1, device, timeout=120.0)
        told, errors, met = errors_told(predicted, [rank["peak_bytes"] for rank in ranks])
        seconds = max(rank["seconds"] for rank in ranks)
        reserved = [rank["reserved_bytes"] for rank in ranks]
        if device.type == "cuda":
            told += f"; reserved at most {max(reserved) / 2**30:.2f} GiB"
        passed = met if device.type == "cuda" else None
        numbers = {"errors": errors, "predicted_bytes": predicted, "reserved_bytes": reserved, "step_seconds": seconds}
        tell(row, f"{told}; a step of {seconds:.2f} s", passed, cuts=list(cuts), ranks=ranks, **numbers)


def _too_full(bytes_: int, facts: dict[str, Any]) -> str:
    """Return the reason why the ranks do not fit on the first GPU; empty where they do."""
    needed, gpu = bytes_ + RANKS * HOPPER_CONTEXT_BYTES, facts["gpus"][0]
    if needed <= gpu["free_bytes"]:
        return ""
    free, total, least = (size / 2**30 for size in (gpu["free_bytes"], gpu["total_bytes"], needed))
    return (
        f"8 ranks need about {least:.1f} GiB, and {free:.1f} of {total:.1f} GiB of the first GPU are free; end what "
        "fills it, or choose another one with CUDA_VISIBLE_DEVICES"
    )
