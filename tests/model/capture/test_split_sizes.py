"""Dynamic sizes: one capture runs other batches and lengths as the model itself does, and refuses all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import Kept, Varying
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable


class Noisy(nn.Module):
    """Two inputs of different lengths, sizes computed from both, and noise without an operand (stochastic depth)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        rows, length = source.shape[:2]
        hidden = self.blocks[0](source).reshape(rows * length, 4).tanh().view(rows, length, 4)
        hidden = self.blocks[1](hidden) * torch.empty([rows, length, 1]).bernoulli_(0.5)
        scores = self.blocks[2](target) @ hidden.transpose(1, 2)
        return scores + torch.arange(target.shape[1]).view(-1, 1) / length


def inputs(rows: int, length: int, target_length: int) -> dict[str, Tensor]:
    return {"source": torch.randn(rows, length, 4), "target": torch.randn(rows, target_length, 4)}


def test_one_capture_runs_every_size_as_the_model_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Noisy()
    example = {name: Varying(tensor, (0, 1)) for name, tensor in inputs(2, 5, 3).items()}
    kept = Kept(tmp_path / "captured")
    kept.writes = True
    made = Chain.from_module(model, None, example, kept=kept)
    read = Chain.from_module(model, None, example, kept=Kept(tmp_path / "captured"))
    # the input does not travel to later layers only for its size
    assert [layer.name for layer in made.layers if "source" in layer.reads] == ["blocks.0"]
    for sizes in ((2, 5, 3), (4, 7, 2), (3, 4, 6)):
        batch = inputs(*sizes)
        for training in (True, False):
            for module in [model, *(layer.module for layer in [*made.layers, *read.layers])]:
                module.train(training)
            results = [step(model, lambda batch=batch: [model(**batch)])]
            results += [
                step(model, lambda chain=chain, batch=batch: [*chain.run(batch).values()]) for chain in (made, read)
            ]
            plain, captured, reread = results
            assert all(torch.equal(expected, actual) for expected, actual in zip(plain, captured, strict=True))
            assert all(torch.equal(expected, actual) for expected, actual in zip(plain, reread, strict=True))
        specs = ShapeTable(made).boundaries({name: TensorSpec.of(tensor) for name, tensor in batch.items()})
        assert specs[-1][made.outputs[0]].shape[0] == sizes[0]


def step(model: nn.Module, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    torch.manual_seed(1)
    outputs = run()
    gradients = torch.autograd.grad(sum(value.square().sum() for value in outputs), list(model.parameters()))
    return [*outputs, *gradients]


class Decides(nn.Module):
    """Blocks whose code branches on the length."""

    def __init__(self, decide: Callable[[int], bool]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return x * 2 if self.decide(x.shape[1]) else x


def open_length(decide: Callable[[int], bool], length: int = 6) -> Chain:
    return Chain.from_module(Decides(decide), None, [Varying(torch.randn(2, length, 4), (1,))])


def test_sizes_for_which_the_model_does_something_else_are_refused() -> None:
    made = open_length(lambda length: length % 2 == 0)
    made.run({"x": torch.randn(2, 8, 4)})
    with pytest.raises(
        CapslogError, match=r"captured where .* % 2.* == 0, but got .*=7: the model does something else"
    ):
        made.run({"x": torch.randn(2, 7, 4)})
    made = open_length(lambda length: length > 4)
    made.run({"x": torch.randn(2, 5, 4)})
    with pytest.raises(CapslogError, match=r"of shape \[2, s\d+ \(from 5\), 4\] but got \[2, 4, 4\]"):
        made.run({"x": torch.randn(2, 4, 4)})
    with pytest.raises(CapslogError, match=r"but got \[3, 5, 4\]"):  # the batch was not dynamic
        made.run({"x": torch.randn(3, 5, 4)})


@pytest.mark.parametrize(("decide", "length"), [(lambda length: length == 6, 6), (lambda length: True, 1)])
def test_a_size_that_the_model_or_the_example_fixes_is_refused(decide: Callable[[int], bool], length: int) -> None:
    with pytest.raises(CapslogError, match=f"size 1 of the input 'x' cannot change: .* fixes it to {length}; give an"):
        open_length(decide, length)
