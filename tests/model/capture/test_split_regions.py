"""Autocast and no_grad around several blocks, with cuts inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.model import unusual
from tests.model.unusual import WIDTH, Blocks, Case, NormBlock, assert_close, engine_step, examples, made, plain_step
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import export, repeats
from varuna_capslog.model.chain import Chain


class Frozen(Blocks):
    """Blocks without gradients, by a no_grad block of the model's own code."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.body(x)
        return self.head(x)


class TwiceUnderAutocast(Blocks):
    """Autocast makes a single copy of a weight that is used twice, so both uses are in one layer."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in (self.blocks[0], self.blocks[1], self.blocks[2], self.blocks[1], self.blocks[3]):
                x = x + block(x).relu()
        return x.float()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.first(x).relu() + self.other(x).sigmoid()).float()


class ResidualUnderAutocast(Blocks):
    """A tensor that crossed a cut and is read twice is no weight: autocast converts it each time."""

    def block(self) -> nn.Module:
        return Pair()

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x


@pytest.mark.parametrize(("kind", "layers"), [(Frozen, 5), (TwiceUnderAutocast, 3), (ResidualUnderAutocast, 5)])
def test_what_runs_under_a_mode_of_its_own_is_cut(kind: type[nn.Module], layers: int) -> None:
    case = Case(kind, lambda: (unusual.x(),), layers)
    wanted_loss, wanted = plain_step(made(case), examples(case))
    chain = Chain.from_module(made(case), None, case.example(), evaluates=False)
    assert len(chain) == layers, [layer.name for layer in chain.layers]
    found_loss, gradients, _ = engine_step(chain, examples(case), True)
    assert found_loss == pytest.approx(wanted_loss, rel=1e-7)
    assert_close(gradients, wanted, 0.0)


def test_what_crossed_a_cut_is_no_weight_for_autocast() -> None:
    """Two linear layers of a block read it: their gradients are added in float32, as in the model."""
    case = Case(ResidualUnderAutocast, lambda: (unusual.x(),), 5)
    layer = Chain.from_module(made(case), None, case.example(), evaluates=False).layers[1]
    crossed, kept = (unusual.x().requires_grad_() for _ in range(2))
    for read in (crossed, kept * 1.0):
        (written,) = layer.run({layer.reads[0]: read}).values()
        written.square().sum().backward()
    assert crossed.grad is not None
    assert kept.grad is not None
    assert torch.equal(crossed.grad, kept.grad)


class NormsUnderAutocast(Blocks):
    def block(self) -> nn.Module:
        return NormBlock()

    def body(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().body(x)


def test_a_batch_norm_under_autocast_of_the_model_keeps_it_whole() -> None:
    """The model was refused as a module that is no batch norm."""
    case = Case(NormsUnderAutocast, lambda: (unusual.x(),), 1)
    chain = Chain.from_module(made(case), None, case.example(), evaluates=False)
    (why,) = chain.kept_whole
    assert "its code calls a batch norm under autocast (test_split_regions.py:" in why
    assert_close(engine_step(chain, examples(case), True)[1], plain_step(made(case), examples(case))[1], 0.0)


class Changing(nn.Module):
    """Linear layers with a function in place after each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_()
        return x


def test_the_work_for_functions_in_place_grows_with_the_layers_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = 0

    def counting(node: fx.Node) -> int | fx.Node:
        nonlocal counted
        counted += 1
        return repeats.storage_key(node)

    monkeypatch.setattr(export, "storage_key", counting)
    counts = []
    for depth in (8, 32):
        counted = 0
        Chain.from_module(Changing(depth), [f"layers.{layer}" for layer in range(1, depth)], {"x": torch.ones(2, 4)})
        counts.append(counted)
    assert 0 < counts[1] <= 5 * counts[0]


class TwoViews(Blocks):
    """A block's output that a later block changes in place through one view, and the head reads through another."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        view = x.view(x.shape[0], 2, -1)
        hidden = self.blocks[2](self.blocks[1](x.relu()).relu())
        view.add_(hidden.view_as(view))
        return self.head(self.blocks[3](hidden + x))


def test_layers_between_two_views_and_a_change_in_place_are_one() -> None:
    """The model was refused, at cut points that nobody had asked for."""
    case = Case(TwoViews, lambda: (unusual.x(),), 3)
    chain = Chain.from_module(made(case), None, case.example(), evaluates=False)
    assert [layer.name for layer in chain.layers] == ["blocks.0", "blocks.3", "head"]
    assert_close(engine_step(chain, examples(case), True)[1], plain_step(made(case), examples(case))[1], 0.0)
    with pytest.raises(CapslogError, match="changes in place a tensor that crosses the cut before layer 2 in 2 views"):
        Chain.from_module(made(case), ["blocks.1", "blocks.2"], case.example(), evaluates=False)
