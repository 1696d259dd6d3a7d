"""Trains two steps of a workload on random inputs on one rank and measures the second; for several parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import gpu_named
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload

__all__ = ["TRANSFORMER", "batch_of", "errors_told", "kind_of", "train_rank"]

WORDS = 512
TRANSFORMER = "transformer, 4 blocks, d=256, T=128"
"""Of `truth.MODELS`; several parts train it."""


def batch_of(workload: Workload, size: int, microbatches: int) -> tuple[Minibatch, Callable[[int], dict[str, Tensor]]]:
    """Return a minibatch of equal microbatches and its loader, which makes a microbatch when it is loaded."""
    specs = workload.profile_inputs(size)
    targets, normalisers = workload.profile_targets(size)
    total = {key: value * microbatches for key, value in normalisers.items()}

    def load(microbatch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(microbatch)
        return {name: _tensor(name, spec, specs, generator) for name, spec in specs.items()}

    return Minibatch([specs] * microbatches, [targets] * microbatches, total), load


def _tensor(name: str, spec: TensorSpec, specs: dict[str, TensorSpec], generator: torch.Generator) -> Tensor:
    if name == "sizes":  # of the images of a DETR: height and width of each
        return torch.tensor([specs["images"].shape[-2:]] * spec.shape[0])
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=spec.dtype, generator=generator)
    return torch.randint(WORDS, spec.shape, dtype=spec.dtype, generator=generator)


def train_rank(
    communicator: Communicator,
    make: Callable[[], Workload],
    layout: Layout,
    options: EngineOptions,
    size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return peak bytes, reserved bytes (None on a CPU) and seconds of this rank's second step, and the loss."""
    workload = make()
    torch.manual_seed(0)
    engine = PipelineEngine(workload.build_chain(), workload.loss, layout, options, communicator, device)
    minibatch, load = batch_of(workload, size, options.num_microbatches)
    train_step(engine, 1, minibatch, load)
    communicator.barrier()
    began = time.perf_counter()
    with PeakProbe(device, resident_tensors(engine.layers, engine.optimizer)) as probe:
        outcome = train_step(engine, 2, minibatch, load)
    return {
        "peak_bytes": probe.peak_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "seconds": time.perf_counter() - began,
        "loss": outcome.parts["loss"],
    }


def kind_of(facts: dict[str, Any]) -> str:
    """Return the kind of the first GPU (`varuna_capslog/base/gpus.py`), or a kind with workspaces of the same size."""
    try:
        return gpu_named(facts["gpus"][0]["name"])
    except CapslogError:
        return "h100-80gb" if facts["gpus"][0]["hopper"] else "a100-80gb"


def errors_told(predicted: list[int], measured: list[int]) -> tuple[str, list[float], bool]:
    """Compare predicted and measured bytes: a sentence, the errors, and True where the aim of a GPU is met."""
    errors = [guess / real - 1 for guess, real in zip(predicted, measured, strict=True)]
    sizes = sorted(map(abs, errors))
    middle = median(sizes)
    told = f"{len(errors)} peaks: median error {middle:.3%}, worst {sizes[-1]:.2%}, lowest {min(errors):+.2%}"
    return told, errors, middle <= 0.003 and min(errors) >= -0.005
