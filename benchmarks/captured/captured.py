"""Compares steps of captured models over three cut lists and three sizes with the model and with captures of each size.

A model is captured once, with its batch (and length) left open. The engine trains every step on one, two and three
ranks, and its loss and gradients are compared bit by bit with those of one rank whose model was captured at exactly
that size, and with plain autograd over the model itself. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run_ranks

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture import Kept, Varying
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: VisionTransformer(32, 8, 4, 4, 64, 128, num_classes=10),
    "Swin": lambda: SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=10),
    "ConvNeXt": lambda: ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], 0.0, num_classes=10),
    "ResNet-18": lambda: ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10),
    "nn.Transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True),
}
SIZES = {"nn.Transformer": [(2, 9, 5), (3, 4, 7), (5, 6, 3)]}
IMAGES = [(2,), (3,), (5,)]
MICROBATCHES = 2


def make_inputs(name: str, sizes: tuple[int, ...], microbatch: int) -> dict[str, Tensor]:
    """Return the inputs of one microbatch."""
    generator = torch.Generator().manual_seed(microbatch)
    if name in SIZES:
        rows, source, target = sizes
        shapes = {"src": (rows, source, 32), "tgt": (rows, target, 32)}
    else:
        shapes = {"x": (*sizes, 3, 32, 32)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def new_model(name: str) -> nn.Module:
    """Return the model, the same on every call; weights of zeros (ViT's head) are redrawn, else all gradients are 0."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the mean square of the output, as a share of the minibatch."""
    (output,) = outputs.values()
    return {"loss": output.square().mean() / normalisers["microbatches"]}


def build(name: str, sizes: tuple[int, ...] | None, folder: Path) -> Chain:
    """Return the model captured at these sizes, or (None) with open sizes, from the folder that keeps the capture."""
    model = new_model(name)
    if sizes is not None:
        return Chain.from_module(model, None, make_inputs(name, sizes, 0))
    kept = Kept(folder)
    kept.writes = True
    open_sizes = (0, 1) if name in SIZES else (0,)
    example = make_inputs(name, SIZES.get(name, IMAGES)[0], 0)
    return Chain.from_module(
        model, None, {key: Varying(tensor, open_sizes) for key, tensor in example.items()}, kept=kept
    )


def step(
    communicator: Communicator, chain: Chain, name: str, sizes: tuple[int, ...], cuts: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Train one step; return the loss, and the gradients of this rank's layers by the model's own names."""
    inputs = [make_inputs(name, sizes, index) for index in range(MICROBATCHES)]
    specs = [{key: TensorSpec.of(tensor) for key, tensor in values.items()} for values in inputs]
    batch = Minibatch(specs, [None] * MICROBATCHES, {"microbatches": float(MICROBATCHES)}, [[0], [1]])
    layout, options = Layout.pipelines(cuts, len(chain)), EngineOptions(MICROBATCHES, seed=1, clip_norm=0.1)
    engine = PipelineEngine(chain, loss, layout, options, communicator, torch.device("cpu"))
    gradients: dict[str, np.ndarray] = {}

    def keep() -> None:
        for key, parameter in engine.optimizer.parameters.items():
            if parameter.grad is not None:
                gradients[key] = parameter.grad.numpy().copy()  # a tensor could be read only while its process lives

    result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
    return {**gradients, "loss": np.array(result.parts["loss"])}


def open_steps(
    communicator: Communicator, name: str, folder: Path, cuts: tuple[int, ...]
) -> list[dict[str, np.ndarray]]:
    """Train a step for each size with the capture of open sizes."""
    sizes = SIZES.get(name, IMAGES)
    return [step(communicator, build(name, None, folder), name, shape, cuts) for shape in sizes]


def fixed_steps(communicator: Communicator, name: str, folder: Path) -> list[tuple[dict[str, np.ndarray], float]]:
    """Train a step for each size on one rank, captured at that size; return it and its error against plain autograd."""
    results = []
    for sizes in SIZES.get(name, IMAGES):
        chain = build(name, sizes, folder)
        made = step(communicator, chain, name, sizes, (0,))
        model = new_model(name)
        for index in range(MICROBATCHES):
            loss({"": model(**make_inputs(name, sizes, index))}, None, {"microbatches": MICROBATCHES})[
                "loss"
            ].backward()
        plain = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in plain.values())
        errors = []
        for key, gradient in plain.items():
            engine_gradient = next(
                made[address] for layer in chain.layers if (address := f"{layer.name}.{key}") in made
            )
            errors.append(
                float(abs(engine_gradient - gradient.numpy()).max()) / max(float(gradient.abs().max()), 1e-3 * largest)
            )
        results.append((made, max(errors)))
    return results


def num_layers(communicator: Communicator, name: str, folder: Path) -> int:
    """Return the number of layers of the capture, which is kept for the other ranks."""
    return len(build(name, None, folder))


def main() -> None:
    """Runs all models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    failed = False
    print("| model | layers | cut lists | sizes | equal bits | largest difference from plain autograd |")
    print("|---|---|---|---|---|---|")
    for name in parser.parse_args().models:
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            layers = run_ranks(num_layers, 1, name, folder)[0]
            expected = run_ranks(fixed_steps, 1, name, folder)[0]
            cut_lists = [(0,), (0, layers // 2), (0, layers // 4, layers - 2)]
            equal = 0
            for cuts in cut_lists:
                ranks = run_ranks(open_steps, len(cuts), name, folder, cuts)
                for number, (wanted, _) in enumerate(expected):
                    actual = {key: value for rank in ranks for key, value in rank[number].items()}
                    equal += actual.keys() == wanted.keys() and all(
                        np.array_equal(actual[key], wanted[key]) for key in wanted
                    )
        steps, worst = len(cut_lists) * len(expected), max(error for _, error in expected)
        failed |= equal != steps or worst > 1e-5
        print(
            f"| {name} | {layers} | {cut_lists} | {SIZES.get(name, IMAGES)} | {equal} of {steps} | {worst:.1e} |",
            flush=True,
        )
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
