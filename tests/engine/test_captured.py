"""Steps of captured models: over cut lists and sizes the bits of one rank, and the unsplit model's to 1e-5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from tests.engine.compare import gradient_error, merged
from tests.engine.pool import WorkerPool
from tests.model.capture.test_text_by_shape import SIZES, Fixed
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture import Kept, OneOf, Varying
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch


class Quiet(Fixed):
    """Without noise, which the engine seeds layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, image: Tensor) -> Tensor:
        rows, columns = int(image.shape[-2]), int(image.shape[-1])
        table = torch.tensor([[float(row * column % 7) for column in range(columns)] for row in range(rows)])
        hidden = self.norm(self.blocks[1](self.blocks[0](image) + table))
        return self.blocks[2](hidden).flatten(1).sum(1, keepdim=True) * rows


MODELS = {
    # sizes stay open: one capture
    "convnext": lambda: ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)], 0.0, num_classes=5),
    # attention, fused; the batch stays open
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 16, dropout=0.0, batch_first=True),
    # sizes are fixed: a capture for each
    "fixed": Quiet,
}
SHAPES = {
    "convnext": [{"x": (rows, 3, 32, 32)} for rows in (2, 3, 5)],
    "transformer": [{"src": (rows, long, 16), "tgt": (rows, 4, 16)} for rows, long in ((2, 5), (3, 7), (4, 6))],
    "fixed": [{"image": size} for size in SIZES],
}
OPEN = {"convnext": (0,), "transformer": (0, 1)}


def inputs_of(shapes: Mapping[str, tuple[int, ...]], microbatch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def new_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    (output,) = outputs.values()
    return {"loss": output.square().mean() / normalisers["microbatches"]}


def captured(name: str, folder: Path, writes: bool = False) -> Chain:
    kept = Kept(folder)
    kept.writes = writes
    some = [inputs_of(shapes, 0) for shapes in SHAPES[name]]
    example: Any = OneOf(some)
    if name in OPEN:
        example = {key: Varying(tensor, OPEN[name] if key != "tgt" else (0,)) for key, tensor in some[0].items()}
    return Chain.from_module(new_model(name), None, example, evaluates=False, kept=kept)


def steps(communicator: Communicator, name: str, folder: Path, cuts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Make a step per size, its second microbatch of the next size; return losses and this rank's gradients."""
    results, sizes, ready = [], SHAPES[name], Ready()
    for number in range(len(sizes)):
        chain = captured(name, folder)
        inputs = [inputs_of(sizes[(number + index) % len(sizes)], index) for index in range(2)]
        specs = [{key: TensorSpec.of(tensor) for key, tensor in values.items()} for values in inputs]
        batch = Minibatch(specs, [None] * 2, {"microbatches": 2.0}, [[0], [1]])
        layout, options = Layout.pipelines(cuts, len(chain)), EngineOptions(2, seed=1)
        engine = PipelineEngine(chain, loss, layout, options, communicator, torch.device("cpu"), ready)
        ready = Ready(engine.table)  # a size is traced once
        gradients: dict[str, Tensor] = {}

        def keep(engine: PipelineEngine = engine, gradients: dict[str, Tensor] = gradients) -> None:
            for key, parameter in engine.optimizer.parameters.items():
                if parameter.grad is not None:
                    gradients[key] = parameter.grad.clone()

        result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
        results.append({"loss": result.parts["loss"], "gradients": gradients})
    return results


@pytest.mark.parametrize("name", MODELS)
def test_cuts_and_sizes_change_no_bit_and_the_step_is_the_models(pool: WorkerPool, name: str, tmp_path: Path) -> None:
    chain = captured(name, tmp_path, writes=True)
    single = pool.run(steps, 1, name, tmp_path, (0,))[0]
    for cuts in ((0, len(chain) // 2), (0, 1, len(chain) - 1)):
        ranks = pool.run(steps, len(cuts), name, tmp_path, cuts)
        for number, expected in enumerate(single):
            rows = [rank[number] for rank in ranks]
            assert {row["loss"] for row in rows} == {expected["loss"]}
            gradients = merged(rows, "gradients")
            assert gradients.keys() == expected["gradients"].keys()
            assert all(torch.equal(gradients[key], expected["gradients"][key]) for key in gradients)
    for number, expected in enumerate(single):
        model = new_model(name)
        for index in range(2):
            shapes = SHAPES[name][(number + index) % 3]
            loss({"": model(**inputs_of(shapes, index))}, None, {"microbatches": 2.0})["loss"].backward()
        plain = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        chain_gradients = {
            next(key for key in plain if address.endswith(key)): gradient
            for address, gradient in expected["gradients"].items()
        }
        error, worst = gradient_error(chain_gradients, plain)
        assert error <= 1e-5, f"{worst}: {error:.2e}"
