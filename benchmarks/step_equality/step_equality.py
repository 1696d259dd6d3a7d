"""Compares a DETR step on several ranks with the same step in one process: loss, gradients, peak memory of every rank.

The unsplit model runs first, in a separate process, as one autograd graph per microbatch; then the pipeline, with
identical weights and inputs. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run_ranks, write_json

import detr_pipeline
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import HostTargets, Minibatch, Workload
from varuna_capslog.schedules import RunShape

MODELS: dict[str, dict[str, Any]] = {
    "rn50_e6": {"backbone": "resnet50", "norm": "frozen", "num_classes": 91, "cut_points": "heads_last"},
    "tiny": {
        "backbone": "resnet18", "last_layer": "layer3", "norm": "group", "freeze": "none", "encoder_layers": 2,
        "decoder_layers": 2, "hidden_dim": 32, "attention_heads": 4, "feedforward": 64, "queries": 10,
        "num_classes": 10,
    },
}  # fmt: skip
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "rn50_e6": ((320, 400), (400, 320), (320, 400), (400, 320)),
    "tiny": ((64, 96), (96, 64), (64, 96), (96, 64)),
}
CUTS = {"rn50_e6": (0, 5, 13, 20), "tiny": (0, 2, 5, 9)}
SEED = 7
CPU = torch.device("cpu")


def build(model: str) -> tuple[Workload, Chain]:
    """Return the workload and a chain whose weights are the same on every call."""
    config = Config.model_validate({"workload": "detr_pipeline:workload", "model": MODELS[model]})
    workload = detr_pipeline.workload(config)
    torch.manual_seed(0)
    return workload, workload.build_chain()


def make_minibatch(model: str) -> tuple[Minibatch, list[dict[str, Tensor]]]:
    """Return a minibatch with a random padded image and three to six boxes per microbatch, and its inputs."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = [], []
    for index, (height, width) in enumerate(SIZES[model]):
        images = torch.randn(1, 3, height, width, generator=generator)
        rows, columns = height - 32, width - 16
        images[:, :, rows:] = 0
        images[:, :, :, columns:] = 0
        inputs.append({"images": images, "sizes": torch.tensor([[rows, columns]])})
        boxes = 0.2 + 0.3 * torch.rand(3 + index, 4, generator=generator)
        labels = torch.randint(MODELS[model]["num_classes"], (3 + index,), generator=generator)
        targets.append([HostTargets(labels=labels, boxes=boxes, image_id=index)])
    specs = [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs]
    queries = MODELS[model].get("queries", 100) * len(inputs)
    normalisers = {"boxes": float(sum(len(group[0]["labels"]) for group in targets)), "queries": float(queries)}
    return Minibatch(specs, targets, normalisers, [[index] for index in range(len(inputs))]), inputs


def unsplit(communicator: Communicator, model: str, folder: Path, device: torch.device = CPU) -> dict[str, Any]:
    """Run the oracle: plain autograd over the whole chain. Gradients go to a file."""
    workload, chain = build(model)
    batch, inputs = make_minibatch(model)
    total = 0.0
    for layer in chain.layers:
        layer.module.train().to(device)
    held = [tensor for layer in chain.layers for tensor in (*layer.module.parameters(), *layer.module.buffers())]
    began = time.perf_counter()
    with PeakProbe(device, held) as probe:
        for index, values in enumerate(inputs):
            seed_layer(device, SEED, 1, index, 0)
            there = {key: value.to(device) for key, value in values.items()}
            outputs = chain.run(there, lambda done, index=index: seed_layer(device, SEED, 1, index, done + 1))
            loss = workload.loss(outputs, batch.targets[index], batch.normalisers)["loss"]
            loss.backward()
            total += loss.item()
            del outputs, loss
    seconds = time.perf_counter() - began
    gradients = {name: p.grad.cpu() for name, p in chain.named_parameters().items() if p.grad is not None}
    torch.save(gradients, folder / "unsplit.pt")
    return {
        "loss": total,
        "parameters": sum(parameter.numel() for parameter in chain.named_parameters().values()),
        "layers": len(chain),
        "seconds": seconds,
        "peak_bytes": probe.peak_bytes,
    }


def pipeline(
    communicator: Communicator,
    model: str,
    folder: Path,
    cuts: tuple[int, ...],
    shape: RunShape,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Run the step on this rank. Gradients before clipping go to a file."""
    workload, chain = build(model)
    batch, inputs = make_minibatch(model)
    options = EngineOptions(len(inputs), schedule=shape.schedule, recompute=shape.recompute, seed=SEED, clip_norm=0.1)
    layout = Layout.pipelines(cuts, len(chain))
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, device)
    del chain
    engine.table.boundaries(batch.inputs[0])

    def keep() -> None:
        # saved to a file, since copies would count as memory of the step
        gradients = {name: p.grad.cpu() for name, p in engine.optimizer.parameters.items() if p.grad is not None}
        torch.save(gradients, folder / f"rank-{communicator.rank}.pt")

    held = resident_tensors(engine.layers, engine.optimizer)
    communicator.barrier()
    began = time.perf_counter()
    with PeakProbe(engine.device, held) as probe:
        result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
    seconds = time.perf_counter() - began
    return {
        "loss": result.parts["loss"],
        "layers": [layer.name for layer in engine.layers],
        "seconds": seconds,
        "peak_bytes": probe.peak_bytes,
    }


def gradient_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest `max|a-b| / max(max|b|, 1e-3 * the model's largest gradient)` and its name."""
    missing = set(gradients) ^ set(expected)
    if missing:
        raise SystemExit(f"only one of the two runs has gradients of {sorted(missing)[:3]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        (float((gradients[name] - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest), name)
        for name, b in expected.items()
    )


def differences(folder: Path, oracle: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> tuple[float, str, float, int]:
    """Return the largest gradient error, its parameter, the relative difference of the losses, and the number of
    gradients.
    """
    gradients: dict[str, Tensor] = {}
    for rank in range(len(ranks)):
        gradients |= torch.load(folder / f"rank-{rank}.pt")
    error, worst = gradient_error(gradients, torch.load(folder / "unsplit.pt"))
    return error, worst, abs(ranks[0]["loss"] - oracle["loss"]) / abs(oracle["loss"]), len(gradients)


def main() -> None:
    """Run both steps and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="rn50_e6", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cuts", help="first layer of each stage, such as 0,5,13,20; default: not uniform, on 4 ranks")
    parser.add_argument("--schedule", default="varuna", choices=["varuna", "1f1b", "gpipe"])
    parser.add_argument("--no-recompute", dest="recompute", action="store_false")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    model = arguments.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        oracle = run_ranks(unsplit, 1, model, folder)[0]
        if arguments.cuts:
            cuts = tuple(int(cut) for cut in arguments.cuts.split(","))
        elif arguments.ranks == len(CUTS[model]):
            cuts = CUTS[model]
        else:
            cuts = tuple(round(stage * oracle["layers"] / arguments.ranks) for stage in range(arguments.ranks))
        if len(cuts) != arguments.ranks:
            parser.error(f"--cuts has {len(cuts)} stages for --ranks {arguments.ranks}; give one per rank")
        shape = RunShape(len(SIZES[model]), arguments.schedule, arguments.recompute)
        ranks = run_ranks(pipeline, len(cuts), model, folder, cuts, shape)
        error, worst, difference, count = differences(folder, oracle, ranks)
    print(
        f"{model}: {oracle['parameters']:,} parameters, {oracle['layers']} layers, images {sorted(set(SIZES[model]))}"
    )
    print(f"cuts {list(cuts)}, schedule {arguments.schedule}{'' if arguments.recompute else ' without recomputation'}")
    print(f"loss {oracle['loss']:.6f}, relative difference {difference:.1e} (aim 1e-5)")
    print(f"largest gradient error {error:.1e}, of {worst} (aim 1e-5), over {count} parameters")
    print("| process | layers | step s | peak MiB |")
    print("|---|---|---|---|")
    rows = [(f"rank {rank}", f"{r['layers'][0]} .. {r['layers'][-1]}", r) for rank, r in enumerate(ranks)]
    for process, layers, row in [("one process", f"all {oracle['layers']}", oracle), *rows]:
        print(f"| {process} | {layers} | {row['seconds']:.1f} | {row['peak_bytes'] / 2**20:.1f} |")
    result = {"model": model, "cuts": cuts, "loss_difference": difference, "gradient_error": error, "worst": worst}
    write_json(arguments.output, result | {"unsplit": oracle, "ranks": ranks})
    if max(error, difference) > 1e-5:
        sys.exit(1)


if __name__ == "__main__":
    main()
