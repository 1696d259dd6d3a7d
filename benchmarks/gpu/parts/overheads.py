"""Ratios of interleaved steps on one rank: the engine to a plain loop, and CPU offload to keeping activations."""

from __future__ import annotations

import functools
from typing import Any

import one_stage
import torch
import truth
from common import interleave, median_ratio, run_ranks
from parts.estimates import INTERVALS, MICROBATCHES
from parts.trained import TRANSFORMER, batch_of

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.parts import MemoryInterval, PlanStage

ENGINE, OFFLOAD = "engine / plain loop", "offload and recompute / keep"
ROWS = {device: {ENGINE: "", OFFLOAD: ""} for device in ("cuda", "cpu")}
ROUNDS = 15


def measure(device: torch.device, tell: Any) -> None:
    """Write the median ratio of seconds (on a CPU: of processor seconds) with its quartiles."""
    kind = 0 if device.type == "cuda" else 1
    run_ranks(measure_both, 1, device, kind, tell)


def measure_both(communicator: Communicator, device: torch.device, kind: int, tell: Any) -> None:
    """Measure both ratios in one process, which opens the device once."""
    times = one_stage.measure(communicator, "transformer, medium", ROUNDS, device)["times"]
    _tell(tell, ENGINE, times, "ours", "plain", kind)
    times = treated_and_kept(communicator, device)
    _tell(tell, OFFLOAD, times, "treated", "kept", kind)


def _tell(tell: Any, row: str, times: dict[str, list[tuple[float, float]]], first: str, second: str, kind: int) -> None:
    unit = ("seconds", "processor seconds")[kind]
    middle, low, high = median_ratio(*([pair[kind] for pair in times[name]] for name in (first, second)))
    tell(row, f"{middle:.3f} ({low:.3f}-{high:.3f}) of {unit}", ratio=[middle, low, high], rounds=ROUNDS)


def treated_and_kept(communicator: Communicator, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Return the times of the same step with memory intervals and without."""
    workload = load_workload(truth.config_of(TRANSFORMER))
    options = EngineOptions(MICROBATCHES, schedule="1f1b", recompute=False, clip_norm=0.1)
    minibatch, load = batch_of(workload, 4, MICROBATCHES)

    def runs(memory: tuple[MemoryInterval, ...]) -> functools.partial[Any]:
        torch.manual_seed(0)
        chain = workload.build_chain()
        layout = Layout((PlanStage(((0, len(chain)),), (0,), memory=memory),), 1)
        engine = PipelineEngine(chain, workload.loss, layout, options, communicator, device)
        return functools.partial(train_step, engine, 1, minibatch, load)

    return interleave({"treated": runs(INTERVALS), "kept": runs(())}, ROUNDS)
