"""Random plans of seven models, and the real bytes of their ranks: the allocator's peak in a second training step.

`fold.py` compares these peaks with the rehearsal and with the fold. Chains, losses and layouts are those of the tests
and of the benchmark `truth`; nothing is predicted here.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "truth"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import models
import torch
from torch import Tensor

from detr_pipeline.task import DetrWorkload
from tests.engine.layouts import random_layout, round_layout, with_intervals
from tests.profiling.workloads import Crossed, Megabytes
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.schedules import RunShape, Schedule, from_strings, to_strings

__all__ = ["GRAINS", "JOINABLE", "MICROBATCHES", "MODELS", "Case", "draw_case", "draw_chunks", "real_peak"]
__all__ += ["workload_of"]

MICROBATCHES = 8
SCHEDULES = [("1f1b", False), ("1f1b", True), ("varuna", True), ("gpipe", False), ("zb-h1", False), ("zb-h1", True)]
CPU = torch.device("cpu")
SMALL = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "hidden_dim": 64,
    "attention_heads": 4,
    "feedforward": 128,
    "queries": 20,
    "dropout": 0.1,
    "num_classes": 5,
    "cut_points": "all",
    "backbone": "resnet18",
    "last_layer": "layer3",
    "freeze": "none",
}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny DETR, several tensors per cut": (1, SMALL | {"norm": "batch"}),
    "tiny DETR, shared heads": (2, SMALL | {"norm": "group", "heads": "every_decoder"}),
    "ResNet-18, BatchNorm": (2, {"side": 64}),
    "transformer": (2, {"blocks": 5, "dim": 128, "length": 96}),
    "decoder, checkpoints": (2, {"blocks": 5, "dim": 96, "length": 96}),
    "tied, frozen, masked": (4, {}),
    "two towers, joined": (4, {}),
}
"""Name -> samples of a microbatch and the keys of the model."""
GRAINS = (2, 4)
JOINABLE = (
    "transformer",
    "decoder, checkpoints",
    "tied, frozen, masked",
    "two towers, joined",
)
"""Models whose stages may take several microbatches in one call: those without BatchNorm and without
the queries of DETR, which are made for all samples together."""


@dataclass(frozen=True)
class Case:
    """Plan of a model, as arguments of the engine."""

    model: str
    layout: Layout
    schedule: str
    recompute: bool
    actions: tuple[tuple[str, ...], ...] | None
    edges: tuple[tuple[int, int], ...]

    @property
    def run(self) -> RunShape:
        return RunShape(MICROBATCHES, self.schedule, self.recompute, num_blocks=self.layout.num_blocks)

    def rows(self) -> Schedule:
        """Return the actions of every rank."""
        if self.actions is not None:
            return from_strings(self.actions)
        return scheduled(self.schedule, self.layout.stages, self.layout.graph(MICROBATCHES, self.edges), self.run)

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(
            MICROBATCHES,
            num_blocks=self.layout.num_blocks,
            schedule=self.schedule,
            recompute=self.recompute,
            clip_norm=1.0,
            actions=self.actions,
        )


def workload_of(model: str) -> tuple[Workload, int]:
    """Return the workload and the samples of a microbatch."""
    size, keys = MODELS[model]
    if model.startswith("tied"):
        return Megabytes(), size
    if model.startswith("two towers"):
        return Crossed(), size
    if model.startswith("tiny DETR"):
        values = {"workload": "detr_pipeline:workload", "model": keys, "profile": {"image_size": [96, 128]}}
        return DetrWorkload(Config.model_validate(values)), size
    config = Config.model_validate({"workload": "models:any", "model": keys})
    kind = {"ResNet": models.ResNet, "transformer": models.Tokens, "decoder": models.DecoderOnly}
    return next(made for name, made in kind.items() if model.startswith(name))(config), size


def draw_chunks(draw: random.Random, chains: dict[str, Chain], ranks: int) -> Case:
    """Draw a plan of schedule interleaved with two to four uneven chunks on every rank, some of them empty, and memory
    intervals half of the time."""
    model, blocks = draw.choice(list(chains)), draw.choice([1, 2, 4])
    layout = round_layout(draw.randrange(1 << 30), len(chains[model]), blocks, ranks)
    if draw.random() < 0.5:
        layout = with_intervals(layout, draw.randrange(1 << 30))
    return Case(model, layout, "interleaved", draw.random() < 0.5, None, tuple(chains[model].edges))


def draw_case(draw: random.Random, chains: dict[str, Chain], ranks: int, grains: bool = False) -> Case:
    """Draw a plan of a random model: layouts of any shape, schedules by name or as lists of actions. Where layers read
    more than the preceding layer, half of the plans have direct routes.

    grains: at least one stage takes several microbatches in one call, and no stage limits the calls in flight.
    """
    model, blocks = draw.choice(list(chains)), draw.choice([1, 2, 4])
    chain, edges = chains[model], tuple(chains[model].edges)
    direct = any(reader > writer + 1 for writer, reader in edges) and draw.random() < 0.5
    seed, most = draw.randrange(1 << 30), draw.randint(1, ranks)
    layout = random_layout(seed, len(chain), blocks, most, edges if direct else None)
    schedule, recompute = draw.choice(SCHEDULES)
    if grains:
        layout = _with_grains(draw, layout, MICROBATCHES // blocks)
    if schedule == "gpipe":
        stages = tuple(dataclasses.replace(stage, in_flight=None) for stage in layout.stages)
        layout = dataclasses.replace(layout, stages=stages)
    if draw.random() < 0.5:
        layout = with_intervals(layout, draw.randrange(1 << 30))
    case = Case(model, layout, schedule, recompute, None, edges)
    if draw.random() < 0.3:
        case = dataclasses.replace(case, actions=tuple(tuple(row) for row in to_strings(case.rows())))
    return case


def _with_grains(draw: random.Random, layout: Layout, of_block: int) -> Layout:
    sizes = [1, *(grain for grain in GRAINS if of_block % grain == 0)]
    grains = [draw.choice(sizes) for _ in layout.stages]
    grains[draw.randrange(len(grains))] = draw.choice(sizes[1:])
    pairs = zip(layout.stages, grains, strict=True)
    stages = [dataclasses.replace(stage, grain=grain, in_flight=None) for stage, grain in pairs]
    return dataclasses.replace(layout, stages=tuple(stages))


def real_peak(communicator: Communicator, case: Case) -> tuple[int, int]:
    """Return this rank's peak in the second step, and the peak of its host tier."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    workload, size = workload_of(case.model)
    tier, chain = HostTier(CPU), workload.build_chain()
    engine = PipelineEngine(chain, workload.loss, case.layout, case.options, communicator, CPU, Ready(tier=tier))
    inputs: dict[str, TensorSpec] = dict(workload.profile_inputs(size))
    targets, normalisers = workload.profile_targets(size)
    minibatch = Minibatch([inputs] * MICROBATCHES, [targets] * MICROBATCHES, normalisers)

    def load(_: int) -> dict[str, Tensor]:
        return {name: torch.ones(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()}

    train_step(engine, 1, minibatch, load)
    with PeakProbe(CPU, resident_tensors(engine.layers, engine.optimizer)) as probe:
        train_step(engine, 2, minibatch, load)
    return probe.peak_bytes, tier.peak_bytes
