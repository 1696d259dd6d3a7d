"""Cases that the pool's workers run: module-level functions on (communicator, ...) that return plain results."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine import models
from tests.engine.layouts import Cuts, layout_for
from tests.engine.shapes import SharedShapes
from tests.rig import nccl_failures
from tests.rig.faults import Fault
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import EngineKind, EngineParts, Engines, Verdict
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostRegion, HostTier, TierOptions, Wait
from varuna_capslog.engine.pipeline import PipelineEngine, Ready, build
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, LayerFactory
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training import checkpoint
from varuna_capslog.training.loop import verify_copies
from varuna_capslog.training.run import Run

CPU = torch.device("cpu")
ALL_GRAPHS = models.GRAPHS | models.SPLIT | models.LINE
SECOND = datetime.timedelta(seconds=1)
SETTINGS: dict[str, Any] = {"num_microbatches": 4, "num_blocks": 2, "seed": 7, "recipe": Recipe(LearningRate(1e-3))}


def _built(made: str, dtype: torch.dtype, dropout: float) -> Chain:
    graph = ALL_GRAPHS.get(made)
    chain: Chain = (graph.build_chain if graph else getattr(models, made))(dtype=dtype, dropout=dropout)
    return chain


TINY = "tests.engine.workload:workload"


def shapes_of(
    made: str = "build_chain",
    dtype: torch.dtype = torch.float32,
    precision: str = "float32",
    weights: str = "float32",
) -> ShapeTable:
    """The shapes of a chain, which a process traces once: a trace takes longer than a step."""
    return _shapes_of("build_chain" if made.startswith("factory_chain") else made, dtype, precision, weights)


@functools.cache
def _shapes_of(made: str, dtype: torch.dtype, precision: str, weights: str) -> ShapeTable:
    return SharedShapes(_built(made, dtype, 0.1), "cpu", precision, weights)


def train(
    communicator: Communicator,
    layout: Layout | Cuts,
    options: dict[str, Any],
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
    twist: str | None = None,
    copies: str | None = None,
    made: str = "build_chain",
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Train the tiny chain for some steps.

    Args:
        device: device of this rank; the returned tensors lie on the CPU.
        made: the function of `models` that gives the chain, or the name of one of its graphs.
        twist: "even" gives a graph's microbatches one size, and no dropout; "pair groups" sends over one group per
            ordered pair, as NCCL does; "overflow" gives one microbatch of step 2 a target so far away that gradients of
            float16 overflow; the others break the engine on purpose, to see that a comparison notices: "drop"
            loses a gradient, "swap" gives two microbatches each other's targets, "reseed" draws other dropout masks.
        copies: how copies to and from the host tier are made; see `copying`.
    """
    model: Any = ALL_GRAPHS.get(made, models)
    chain = _built(made, dtype, 0.0 if twist == "even" else 0.1)
    settings = EngineOptions(**(SETTINGS | options))
    placed = layout_for(layout, len(chain), settings.num_blocks)
    tier = None if copies is None else copying(copies, settings, device)
    ready = Ready(shapes_of(made, dtype, settings.precision, settings.weights), tier=tier)
    engine = PipelineEngine(chain, model.loss, placed, settings, communicator, device, ready)
    first: dict[str, Tensor] = {}
    results = []

    def keep_gradients() -> None:
        for address, parameter in engine.optimizer.parameters.items():
            if parameter.grad is not None:
                first[address] = parameter.grad.clone().cpu()

    if twist == "pair groups":
        os.environ[nccl_failures.MANNERS] = "0,0,0"
        communicator.open_pair_groups(engine.pairs(), nccl_failures.open_group, torch.device("cpu"))
    if twist == "drop":
        victims = [p for layer in engine.layers for p in layer.parameters.values() if p.requires_grad]
        victims[0].register_hook(torch.zeros_like)
    for step in range(1, steps + 1):
        even = {"even": True} if twist == "even" else {}
        minibatch, inputs = model.make_minibatch(settings.num_microbatches, step, dtype, **even)
        if twist == "swap":
            minibatch.targets[0], minibatch.targets[3] = minibatch.targets[3], minibatch.targets[0]
        if twist == "overflow" and step == 2:
            minibatch.targets[1] = 1e15 * minibatch.targets[1]
        if twist == "reseed":
            engine.options = EngineOptions(**(SETTINGS | options | {"seed": 8}))
        results.append(
            train_step(engine, step, minibatch, inputs.__getitem__, before_commit=keep_gradients if step == 1 else None)
        )
    verify_copies(engine)
    layers = engine.layers
    moments = [
        moment for address in engine.optimizer.parameters for moment in engine.optimizer.moments(address).values()
    ]
    waiting = sum(moment.nbytes for moment in moments) - sum(moment.nbytes for moment in engine.optimizer.resident())
    return {
        # without the bytes of moments, which stay in the tier
        "host bytes": (0, 0) if tier is None else (tier.bytes - waiting, tier.peak_bytes - waiting),
        "parts": [result.parts for result in results],
        "norms": [result.grad_norm for result in results],
        "scales": [(result.loss_scale, result.skipped) for result in results],
        "gradients": first,
        "state": {f"{layer.name}.{n}": p.detach().clone().cpu() for layer in layers for n, p in layer.values.items()},
        "weights": {
            f"{layer.name}.{n}": p.detach().clone().cpu() for layer in layers for n, p in layer.parameters.items()
        },
        "moments": {
            f"{address}.{key}": moment.clone().cpu()
            for address in engine.optimizer.parameters
            for key, moment in engine.optimizer.moments(address).items()
        },
        "buffers": {f"{layer.name}.{n}": b.clone().cpu() for layer in layers for n, b in layer.buffers.items()},
    }


class Reordered(HostTier):
    """Copies that end in another order than they began, each after a different time."""

    def __init__(self, device: torch.device, options: TierOptions) -> None:
        super().__init__(device, options)
        self._thread = ThreadPoolExecutor(4)
        self._draw = random.Random(0)

    def carry(self, source: Tensor, target: Tensor) -> None:
        time.sleep(self._draw.choice([0.0, 0.0, 0.0, 0.001, 0.004]))
        super().carry(source, target)


class Late(HostTier):
    """Copies that begin late; until then their target holds no number."""

    def _copy(self, source: Tensor, target: Tensor, overlap: bool) -> Wait:
        target.fill_(255)
        return super()._copy(source, target, overlap)

    def carry(self, source: Tensor, target: Tensor) -> None:
        time.sleep(0.005)
        super().carry(source, target)


class Early(Late):
    """Says that a copy has come back as soon as it has begun: a sabotage."""

    def load_back(self, region: HostRegion, overlap: bool) -> tuple[Tensor, Wait]:
        return super().load_back(region, overlap)[0], lambda: None


class Failing(HostTier):
    """The tenth copy fails."""

    count = 0

    def carry(self, source: Tensor, target: Tensor) -> None:
        self.count += 1
        if self.count == 10:
            raise OSError(5, "Input/output error")
        super().carry(source, target)


def copying(kind: str, options: EngineOptions, device: torch.device) -> HostTier:
    """A host tier whose copies are "plain", "slow" (64 KiB in a second), "late", "early", "reordered" or "failing"."""
    if kind == "slow":
        return HostTier(device, dataclasses.replace(options.tier, bandwidth=1 << 16))
    kinds = {"plain": HostTier, "late": Late, "early": Early, "reordered": Reordered, "failing": Failing}
    return kinds[kind](device, options.tier)


def _tensors(engine: PipelineEngine) -> list[Tensor]:
    return [t for layer in engine.layers for t in (*layer.parameters.values(), *layer.buffers.values())]


def refuse_a_step(communicator: Communicator, layout: Cuts, poison: str) -> str:
    """Make a good step, then one with a value that is not finite; check that nothing changed and return the refusal."""
    chain = models.build_chain()
    settings = EngineOptions(**SETTINGS)
    placed = layout_for(layout, len(chain), settings.num_blocks)
    engine = PipelineEngine(chain, models.loss, placed, settings, communicator, torch.device("cpu"), Ready(shapes_of()))
    minibatch, inputs = models.make_minibatch(4, 1)
    train_step(engine, 1, minibatch, inputs.__getitem__)
    before = [tensor.clone() for tensor in _tensors(engine)]
    minibatch, inputs = models.make_minibatch(4, 2)
    if poison == "loss":
        minibatch.targets[2][0, 0, 0] = float("nan")
    else:
        trainable = [p for layer in engine.layers for p in layer.parameters.values() if p.requires_grad]
        trainable[0].register_hook(lambda gradient: gradient * float("inf"))
    try:
        train_step(engine, 2, minibatch, inputs.__getitem__)
    except Exception as error:
        unchanged = [torch.equal(a, b) for a, b in zip(before, _tensors(engine), strict=True)]
        assert all(unchanged), "a refused step changed the model"
        assert all(p.grad is None for layer in engine.layers for p in layer.parameters.values())
        return f"{type(error).__name__}: {error}"
    return "accepted"


def run_config(run_dir: str, **sections: Any) -> Config:
    """A config of the tiny workload: 4 microbatches of 2 in 2 blocks, no evaluation unless asked."""
    train = {
        "minibatch_size": 8,
        "microbatch_size": 2,
        "accumulation_blocks": 2,
        "max_steps": 6,
        "lr": 1e-3,
        "evaluate_every": None,
        "seed": 3,
    }
    values: dict[str, Any] = {"workload": TINY, "run_dir": run_dir, "device": "cpu"}
    values |= {"train": train | sections.pop("train", {})} | sections
    return Config.model_validate(values)


def train_run(
    communicator: Communicator,
    config: Config,
    plan: tuple[int, ...] | Plan,
    stop_after: int | None = None,
    full_disk_at: int | None = None,
    starve: tuple[int, str] | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Train with a whole `Run` on these ranks.

    Args:
        plan: of any form, or the cuts of one pipeline of the tiny chain.
        stop_after: the last rank wishes to stop once this step is committed.
        full_disk_at: rank 1 finds the disk full when it writes the checkpoint of this step.
        starve: rank 1 finds no memory in the update of this step, as the fault of this kind and name says.
    """
    holder: dict[str, Any] = {}
    last = communicator.world_size - 1

    class Starved(PipelineEngine):
        def apply(self, verdict: Verdict) -> float:
            if starve is None or (communicator.rank, verdict.step) != (1, starve[0]):
                return super().apply(verdict)
            begun = Fault("rank 1", "apply", "starve", name=starve[1]).happen(config.run_dir)
            try:
                return super().apply(verdict)
            finally:
                if begun is not None:
                    begun.__exit__(None, None, None)

    def build(parts: EngineParts) -> PipelineEngine:
        made = config.model.get("graph") or config.model.get("chain", "build_chain")
        types = {"precision": parts.options.precision, "weights": parts.options.weights}
        own = config.workload != TINY
        ready = Ready(SharedShapes(parts.chain, device.type, **types) if own else shapes_of(made, **types))
        return Starved(parts.chain, parts.loss, parts.layout, parts.options, parts.communicator, parts.device, ready)

    run = Run(
        config,
        plan if isinstance(plan, Plan) else Plan.of_cuts(num_layers=11, cuts=plan, model="tiny"),
        load_workload(config),
        communicator,
        device,
        stop_wished=lambda: (
            communicator.rank == last and stop_after is not None and holder["run"].loop.step + 1 >= stop_after
        ),
        engines=Engines({"capslog": EngineKind(build)}),
    )
    holder["run"] = run
    resumed = run.resume()
    original = checkpoint.write_synced

    def write(path: Any, state: Any) -> Any:
        if full_disk_at is not None and f"step-{full_disk_at:08d}" in str(path) and communicator.rank == 1:
            raise OSError(28, "No space left on device")
        return original(path, state)

    checkpoint.write_synced = write
    try:
        end = run.train()
        return {
            "resumed": resumed.step if resumed else None,
            "step": end.step,
            "stopped": end.stopped,
            "scores": end.scores,
        }
    except CapslogError as error:
        return {"resumed": resumed.step if resumed else None, "error": f"{type(error).__name__}: {error}"}
    finally:
        checkpoint.write_synced = original
        run.loop.close()


def bytes_of_parameters(communicator: Communicator, layout: Cuts, made: str = "build_chain") -> int:
    """Bytes of this rank's parameters, the chain's included, once a run has its engine and has made two steps."""
    chain, settings = getattr(models, made)(), EngineOptions(**SETTINGS)
    placed, cpu = layout_for(layout, len(chain), settings.num_blocks), torch.device("cpu")
    minibatch, inputs = models.make_minibatch(4, 1)
    example = lambda: (inputs[0], minibatch.targets[0], minibatch.normalisers)  # noqa: E731
    engine = build(EngineParts(chain, models.loss, placed, settings, communicator, cpu, example, 30.0))
    for step in (1, 2):
        train_step(engine, step, minibatch, inputs.__getitem__)
    held = [*chain.named_parameters().values(), *(p for layer in engine.layers for p in layer.parameters.values())]
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in held if p.device.type != "meta"}
    return sum(storages.values())


BULK_BYTES = 4 << 20


def peak_of_building(communicator: Communicator, factories: bool) -> int:
    """Peak of the bytes that are alive while four layers of `BULK_BYTES` become the engines of four ranks."""
    options = EngineOptions(**SETTINGS)
    layout, cpu = Layout.pipelines((0, 1, 2, 3), 4, None, 1, options.num_blocks), torch.device("cpu")
    makers = [LayerFactory(f"layer.{k}", lambda: nn.Linear(1024, 1024, bias=False)) for k in range(4)]
    with PeakProbe(cpu) as probe:
        made = (
            Chain.from_factories(makers) if factories else Chain([Layer(maker.name, maker.make()) for maker in makers])
        )
        engine = build(EngineParts(made, models.loss, layout, options, communicator, cpu, lambda: ({}, None, {}), 30.0))
        assert sum(parameter.nbytes for layer in engine.layers for parameter in layer.parameters.values()) == BULK_BYTES
    return probe.peak_bytes
