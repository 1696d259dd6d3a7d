"""Layers of equal signature do the same work; a difference in any property that decides work changes the signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.signature import Signatures, layer_signature, run_signature


class Block(nn.Module):
    """Block with one example of every property that may differ between two blocks."""

    def __init__(self, rate: Any = 0.1, eps: float = 1e-5, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8, eps=eps), nn.Dropout(rate)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv = nn.Conv2d(4, 4, 3)
        self.register_buffer("scale", torch.ones(8))
        self._hidden, self.act = 1, act

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.other(self.one(self.norm(x)))) * self.scale)


def changed(change: Callable[[Block], Any]) -> Block:
    block = Block()
    change(block)
    return block


def made_alike() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return two functions of equal name and place."""
    return (lambda x: x.relu(), lambda x: x.sin())


def tie(block: Block) -> None:
    block.other.weight = block.one.weight


def test_equal_blocks_are_equal() -> None:
    assert layer_signature(Layer("a", Block())) == layer_signature(Layer("b", Block(0.1)))
    assert hash(layer_signature(Layer("a", Block()))) == hash(layer_signature(Layer("b", Block())))


ALMOST = {
    "rate": lambda: Block(0.2),
    "no dropout": lambda: Block(0.0),
    "a rate of another type": lambda: Block(0),
    "eps": lambda: Block(eps=1e-6),
    "function": lambda: Block(act=torch.tanh),
    "layout": lambda: changed(lambda block: block.conv.to(memory_format=torch.channels_last)),
    "type": lambda: changed(lambda block: block.one.to(torch.bfloat16)),
    "frozen": lambda: changed(lambda block: block.one.weight.requires_grad_(False)),
    "no bias": lambda: changed(lambda block: setattr(block.one, "bias", None)),
    "mode": lambda: changed(lambda block: block.drop.eval()),
    "shared parameter": lambda: changed(tie),
    "shared module": lambda: changed(lambda block: setattr(block, "other", block.one)),
    "private attribute": lambda: changed(lambda block: setattr(block, "_hidden", 2)),
    "type of an attribute": lambda: changed(lambda block: setattr(block, "_hidden", True)),
    "buffer": lambda: changed(lambda block: block.register_buffer("scale", torch.ones(1))),
    "hook": lambda: changed(lambda block: block.one.register_forward_hook(lambda *_: None)),
    "own forward": lambda: changed(lambda block: setattr(block.one, "forward", lambda x: x)),
    "unknown object": lambda: changed(lambda block: setattr(block, "held", object())),
}


@pytest.mark.parametrize("almost", ALMOST)
def test_an_almost_equal_block_is_not_taken_for_its_twin(almost: str) -> None:
    assert layer_signature(Layer("a", ALMOST[almost]())) != layer_signature(Layer("a", Block()))


def test_functions_of_one_name_differ() -> None:
    """Functions were compared by name: a block with another lambda of the same line was costed as its neighbour."""
    first, second = made_alike()
    assert layer_signature(Layer("a", Block(act=first))) != layer_signature(Layer("a", Block(act=second)))


def test_what_two_layers_share_counts_in_their_run() -> None:
    apart = [Layer("a", nn.Linear(8, 8)), Layer("b", nn.Linear(8, 8))]
    tied = [Layer("a", nn.Linear(8, 8)), Layer("b", nn.Linear(8, 8))]
    tied[1].module.weight = tied[0].module.weight
    assert [layer_signature(layer) for layer in apart] == [layer_signature(layer) for layer in tied]
    assert run_signature(apart) != run_signature(tied)
    described = [Signatures(layers).run(0, 2) for layers in (apart, tied, [*reversed(apart)])]
    assert described[0] == described[2] != described[1]
    wider = Signatures([apart[0], Layer("c", nn.Linear(8, 9))])
    assert wider.run(0, 2) != described[0]
    assert wider.run(0, 1) == Signatures(tied).run(1, 2)


class Scaled(nn.Module):
    """Blocks whose captured graphs differ in a constant, an operation, or nothing."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            y = block(x)
            x = {"a": y.add(x, alpha=2), "b": y.add(x, alpha=3), "c": y.sub(x, alpha=2)}[kind]
        return x


def test_blocks_of_a_captured_model_are_compared_by_their_graphs() -> None:
    kinds = "aabca"
    chain = Chain.from_module(Scaled(kinds), [f"blocks.{index}" for index in range(5)], (torch.zeros(2, 8),))
    signatures = [layer_signature(layer) for layer in chain.layers]
    assert [[first == second for second in signatures] for first in signatures] == [
        [a == b for b in kinds] for a in kinds
    ]


def test_a_module_may_hold_its_own_name_but_no_other() -> None:
    def layers(names: list[str]) -> list[object]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in names))
        for block, name in zip(model, names, strict=True):
            block[0].kept = {"target": [name]}
        chain = Chain.from_module(model, ["0", "1", "2"], (torch.zeros(2, 4),))
        return [layer_signature(layer) for layer in chain.layers]

    first, second, third = layers(["0.0", "1.0", "0.0"])
    assert first == second != third


def test_rates_that_grow_with_depth_are_told_apart_at_0_and_1_only() -> None:
    depth = pytest.importorskip("torchvision").ops.StochasticDepth
    none, some, more, all_ = (layer_signature(Layer("a", depth(rate, "row"))) for rate in (0.0, 0.1, 0.2, 1.0))
    assert some == more
    assert len({none, some, all_}) == 3
    assert some != layer_signature(Layer("a", depth(0.1, "batch")))
