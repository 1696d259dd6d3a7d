"""Models that fix the sizes of their inputs, captured once per size: equal to the model itself, on its weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import Kept, OneOf
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import ShapeTable


class Fixed(nn.Module):
    """A position table of the image's size, built by Python; dropout and batch norm, which differ in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, image: Tensor) -> Tensor:
        rows, columns = int(image.shape[-2]), int(image.shape[-1])
        table = torch.tensor([[float(row * column % 7) for column in range(columns)] for row in range(rows)])
        hidden = self.blocks[0](image) + table
        hidden = F.dropout(self.norm(self.blocks[1](hidden)), 0.5, self.training)
        return self.blocks[2](hidden).flatten(1).sum(1) * torch.tensor(float(rows))


SIZES = ((2, 3, 6, 6), (2, 3, 6, 9), (2, 3, 4, 4))


def step(run: nn.Module | Chain, image: Tensor, model: nn.Module) -> list[Tensor]:
    """Return the output and the gradients of all of the model's parameters, with the same noise."""
    torch.manual_seed(1)
    (out,) = run.run({"image": image}).values() if isinstance(run, Chain) else (run(image),)
    return [out.detach(), *torch.autograd.grad(out.sum(), [*model.parameters()])]


def captured(model: nn.Module, kept: Kept | None = None) -> Chain:
    return Chain.from_module(model, None, OneOf([{"image": torch.zeros(size)} for size in SIZES]), kept=kept)


def test_every_size_runs_as_the_model_itself_on_one_set_of_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Fixed()
    kept = Kept(tmp_path / "captured")
    kept.writes = True
    made = captured(model, kept)
    assert len(list((tmp_path / "captured").iterdir())) == 2 * len(SIZES), "with eval mode, and for training alone"
    read = captured(model, Kept(tmp_path / "captured"))
    assert [*made.named_parameters()] == [*read.named_parameters()]
    assert {id(parameter) for parameter in made.named_parameters().values()} == {
        id(parameter) for parameter in model.parameters()
    }
    for training in (True, False):
        for size in SIZES:
            image = torch.randn(size)
            for module in [model, *(layer.module for chain in (made, read) for layer in chain.layers)]:
                module.train(training)
            before = copy.deepcopy(model.norm.state_dict())
            results = []
            for run in (model, made, read):
                model.norm.load_state_dict(before)
                results.append(step(run, image, model))
                if training:
                    assert model.norm.num_batches_tracked == before["num_batches_tracked"] + 1
            for chain_results in results[1:]:
                assert all(
                    torch.equal(expected, actual) for expected, actual in zip(results[0], chain_results, strict=True)
                )
    specs = [ShapeTable(made).boundaries({"image": TensorSpec(size)})[-1] for size in SIZES]
    assert [spec[made.outputs[0]].shape for spec in specs] == [(2,)] * 3


def test_copies_and_new_parameters_serve_all_sizes() -> None:
    torch.manual_seed(0)
    model = Fixed().eval()
    chain = captured(model)
    for layer in chain.layers:
        layer.module.eval()
    copied = copy.deepcopy(chain)
    with torch.no_grad():
        for parameter in copied.named_parameters().values():
            parameter.mul_(2)
        doubled = copy.deepcopy(model)
        for parameter in doubled.parameters():
            parameter.mul_(2)
        for size in SIZES:
            image = torch.randn(size)
            for run, reference in ((chain, model), (copied, doubled)):
                (out,) = run.run({"image": image}).values()
                assert torch.equal(out, reference(image))
    assert [layer_signature(layer) for layer in chain.layers] == [layer_signature(layer) for layer in copied.layers]
    single = Chain.from_module(model, None, {"image": torch.zeros(SIZES[0])})
    assert layer_signature(single.layers[0]) != layer_signature(chain.layers[0])
    state = {name for layer in chain.layers for name in layer.module.state_dict()}
    assert state == {*model.state_dict()}, "constants are no state"


def test_a_size_that_was_not_captured_is_refused() -> None:
    chain = captured(Fixed())
    with pytest.raises(CapslogError, match=r"was captured for 'image' of shape \[2, 3, 6, 6\] but got \[2, 3, 5, 5\]"):
        chain.run({"image": torch.zeros(2, 3, 5, 5)})


class Pooled(nn.Module):
    """The second layer gets 1 x 1 for every size, but multiplies by the size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)])

    def forward(self, image: Tensor) -> Tensor:
        pooled = self.blocks[1](F.adaptive_avg_pool2d(self.blocks[0](image), 1))
        return self.blocks[2](pooled * int(image.shape[-1]))


def test_a_layer_that_cannot_tell_sizes_apart_reads_the_input_too() -> None:
    torch.manual_seed(0)
    model, sizes = Pooled(), (4, 8)
    chain = Chain.from_module(model, None, OneOf([{"image": torch.zeros(2, 3, size, size)} for size in sizes]))
    readers = [layer.name for layer in chain.layers if "image" in layer.reads]
    assert len(readers) == 2, "the first layer, and the one that multiplies"
    assert len(chain) == 3
    for size in sizes:
        image = torch.randn(2, 3, size, size)
        plain, chained = (step(run, image, model) for run in (model, chain))
        assert all(torch.equal(*both) for both in zip(plain, chained, strict=True))


class Longer(nn.Module):
    """Model that runs one block more for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 2 if x.shape[0] < 4 else 3]:
            x = block(x)
        return x


def test_another_chain_of_layers_for_other_sizes_is_refused() -> None:
    with pytest.raises(
        CapslogError, match=r"Longer is not the same chain of layers for all sizes.*for one size, layer 'blocks.1'"
    ):
        Chain.from_module(Longer(), None, OneOf([{"x": torch.zeros(2, 4)}, {"x": torch.zeros(5, 4)}]))
