"""A capture that exports equal blocks once has the graph of one that exports all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from varuna_capslog.model.capture import export
from varuna_capslog.model.capture.export import Captured, module_calls
from varuna_capslog.model.capture.exporting import graph_text
from varuna_capslog.model.capture.repeats import EqualBlocks, storage_key
from varuna_capslog.model.capture.runtime import Varying


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(self.norm(x)).view(2, 4) * scale, x.t()


class PassingOn(Block):
    """Hands its number to a function that needs it for a cache alone, as DeepSeek-V4's attention does."""

    cache: tuple[float, ...] | None = None

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y, z = super().forward(x, scale)
        return _cached(y, self.cache, self.number), z


def _cached(x: Tensor, cache: tuple[float, ...] | None, number: int) -> Tensor:
    assert isinstance(number, int)
    return x if cache is None else x + cache[number]


class OfCache(PassingOn):
    cache = (1.0, 2.0, 3.0, 4.0, 5.0)


class Sharing(Block):
    """Has a whole number that is another block's own number, and a set."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.heads, self.names = 2, {"x"}


class ByNumber(Block):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * (self.number + 1), x.t()


class Counting(Block):
    """Writes its number."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        self.number = len(self._modules) - 2
        return x, x.t()


class Told(Block):
    """Depends on what the model tells it before each call."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (x.exp() if vars(self).get("turn", 0) % 2 else x.neg()), x.t()


class InPlace(Block):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(self.linear(x)), x.t()


class OfOthers(Block):
    """Reads a tensor that is not given to it."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(Model.doubled), x.t()


class WithRegion(Block):
    """Has a part without gradients, which is a graph of its own."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            mask = x.abs() > 0.5
        return self.linear(x) * mask, x.t()


class ByValue(Block):
    """Has a tensor whose size depends on values."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(torch.nonzero(x).to(x.dtype).sum() + x), x.t()


class Sized(Block):
    """Computes with the size that is left open, and has a tensor of another open size."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([x, x.new_zeros(x.shape[0], 2)], 1).reshape(-1, 3)
        return x + self.linear(y.reshape(x.shape[0], -1)[:, :4]) * scale / x.shape[0], x.t()


class Named(Block):
    """Holds its own name, as peft's adapters do."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear.kept, self.kept = {"target": f"blocks.{number}.linear", "rank": [4]}, f"blocks.{number}"


class NamedApart(Named):
    """Computes with its name."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * len(self.linear.kept["target"]), x.t()


class Model(nn.Module):
    doubled: Tensor

    def __init__(self, kind: Callable[[int], nn.Module], last: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(0), kind(1), kind(2), last(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, turned = x.exp(), x.t()
        Model.doubled = 2 * x
        x = x + 1
        for number, block in enumerate(self.blocks):
            if isinstance(block, Told):
                block.turn = number % 2
            x, turned = block(x, scale)
            vars(block).pop("turn", None)
        return x, turned


class AskingOthers(Model):
    """Reads a parameter of its last block."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * self.blocks[3].linear.bias)


class AskingAll(Model):
    """Adds all its parameters, and goes on where that fails."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with contextlib.suppress(Exception):
            x = x + sum(parameter.sum() for parameter in self.parameters())
        return super().forward(x)


class Wider(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear = nn.Linear(4, 4, bias=False)


def _told(captured: Captured) -> tuple[object, ...]:
    """Return the text of a graph, the modules that each node ran in, and which nodes share memory."""
    nodes, storages = list(captured.graph.nodes), dict[int | fx.Node, int]()
    for place, node in enumerate(nodes):
        node.name = f"node_{place}"
    values = [node.meta.get("val") for node in nodes]
    shared = [
        storages.setdefault(storage_key(node), len(storages)) if isinstance(value, Tensor) else None
        for node, value in zip(nodes, values, strict=True)
    ]
    shapes = [str(value.shape) if isinstance(value, Tensor) else str(value) for value in values]
    return graph_text(captured), [list(module_calls(node).values()) for node in nodes], shared, shapes, captured.unary


@pytest.mark.parametrize(
    ("kind", "last", "copied"),
    # the first block's input has no gradient, unlike those of the others
    [(Block, Block, 2), (Block, Wider, 1), (ByNumber, ByNumber, 0), (InPlace, InPlace, 0), (OfOthers, OfOthers, None)]
    + [(WithRegion, WithRegion, 2), (Counting, Counting, 0), (Told, Told, 2), (PassingOn, PassingOn, 2)]
    + [(OfCache, OfCache, 0), (Sharing, Sharing, 2)]
    + [(Named, Named, 2), (NamedApart, NamedApart, 0), (ByValue, ByValue, None)],
)
def test_the_graph_is_that_of_all_blocks(kind, last, copied, monkeypatch):
    _compare(kind, last, copied, torch.zeros(2, 4), monkeypatch)


@pytest.mark.parametrize(("kind", "copied"), [(Sized, 2), (OfOthers, None)])
def test_the_graph_is_that_of_all_blocks_where_a_size_is_left_open(kind, copied, monkeypatch):
    _compare(kind, kind, copied, Varying(torch.zeros(3, 4), [0]), monkeypatch)


@pytest.mark.parametrize(
    ("model", "exports"), [(Model, [True]), (AskingOthers, [True, False]), (AskingAll, [True, False])]
)
def test_parameters_of_equal_blocks_are_hidden_unless_code_reads_them(model, exports, monkeypatch):
    hides: list[bool] = []
    monkeypatch.setattr(export, "EqualBlocks", lambda model, hide: hides.append(hide) or EqualBlocks(model, hide))
    with torch.device("meta"):
        asking = model(Block, Block)
    once, whole = (export.export_model(asking, (), {"x": torch.zeros(2, 4)}, once=once) for once in (True, False))
    assert _told(once) == _told(whole)
    assert hides == exports
    assert all(len(block.linear._parameters) == 2 for block in asking.blocks)


def _compare(kind, last, copied, x, monkeypatch):
    seen: list[int] = []
    copy_parts = export.EqualBlocks.copy_parts

    def counted(blocks, graph, extra):
        copies = copy_parts(blocks, graph, extra)
        seen.append(len(blocks.calls))
        return copies

    monkeypatch.setattr(export.EqualBlocks, "copy_parts", counted)
    with torch.device("meta"):
        model = Model(kind, last)
    once, whole = (export.export_model(model, (), {"x": x}, once=once) for once in (True, False))
    texts, others = zip(*((graph, rest) for graph, *rest in map(_told, (once, whole))), strict=True)
    assert others[0] == others[1]
    assert texts[0] == texts[1] or kind is WithRegion  # whose nodes have other names
    assert seen == ([] if copied is None else [copied])
    assert {type(block) for block in model.blocks} == {kind, last}
