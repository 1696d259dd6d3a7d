"""Traces of a model, and the stages that are made of them. Varuna is not needed: a stand-in CutPoint is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.varuna_plugin import models
from tests.varuna_plugin.models import DIM, PlainCut
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.stages import ANCHOR, StageRun, reduce_to_stage
from varuna_capslog.varuna_plugin.tracing import (
    Partition,
    Phantom,
    TieGroup,
    Trace,
    find_phantom,
    tie_groups,
    trace_model,
    uniform_cuts,
)


def traced(model: nn.Module, **inputs: Any) -> Trace:
    return trace_model(model, inputs, PlainCut)


def test_every_use_is_seen_and_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = models.Model(PlainCut, dropout=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    trace = traced(model, **models.get_batch(2))
    assert trace.num_pieces == 6
    # a Linear is a builtin to Python's tracing, a root parameter belongs to no module that is called
    assert trace.parameters["blocks.0.project.weight"] == (3, 4, 5)
    assert "blocks.1.project.weight" not in trace.parameters
    assert trace.parameters["position"] == (2,)
    assert trace.buffers["scale"] == (2,)
    assert trace.parameters["stem.weight"] == (0,)
    assert trace.buffers["norm.running_mean"] == trace.buffers["norm.num_batches_tracked"] == (1,)
    assert trace.parameters["head.bias"] == (5,)
    first, second = trace.cuts[0], trace.cuts[1]
    assert [spec.requires_grad for spec in first.tensors] == [True]
    assert [(spec.dtype, spec.requires_grad) for spec in second.tensors] == [
        (torch.float32, True),
        (torch.bool, False),
    ]
    assert trace.moving == ()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_used_through_a_view_behind_the_cut_belongs_there_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cut = nn.Embedding(5, DIM), PlainCut()

        def forward(self, ids: Tensor) -> Tensor:
            output = self.embed.weight.t()
            return (self.cut(self.embed(ids)) @ output).mean()

    assert traced(Tied(), ids=torch.tensor([1, 2])).parameters == {"embed.weight": (0, 1)}


def test_attention_and_recurrent_layers_keep_all_their_parameters() -> None:
    # parts of both are never called as modules, and an LSTM's weights are held in a list besides
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.cut = nn.LSTM(DIM, DIM, batch_first=True), PlainCut()
            self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
            self.unused = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.cut(self.lstm(x)[0])
            return self.attention(x, x, x)[0].mean()

    model = Model()
    trace = traced(model, x=torch.randn(2, 3, DIM))
    assert {name for name, pieces in trace.parameters.items() if pieces == (0,)} == {
        f"lstm.{name}" for name, _ in model.lstm.named_parameters()
    }
    assert trace.parameters["attention.out_proj.weight"] == (1,)
    assert trace.parameters["unused.weight"] == (1,), "an unused parameter stays with its neighbour"
    reduce_to_stage(model, StageRun(Partition(trace, (0, 1)), 1, ()))
    assert all(weight.numel() == 0 for weight in model.lstm._flat_weights)


def test_unused_parameters_in_front_keep_their_place() -> None:
    # they once came after the first used parameter, and the ranks then took their equal models for different ones
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.first, self.cut, self.last = nn.Linear(1, 1), nn.Linear(2, 2), PlainCut(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cut(self.first(x))).mean()

    model = Model()
    trace = traced(model, x=torch.randn(2, 2))
    assert list(trace.parameters) == [name for name, _ in model.named_parameters()]
    assert trace.parameters["unused.weight"] == (0,)


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_keeps_what_it_uses_and_skips_the_rest(stage: int) -> None:
    torch.manual_seed(0)
    model = models.Model(PlainCut)
    trace = traced(model, **models.get_batch(2))
    partition = Partition(trace, (0, 2, 4))
    run = StageRun(partition, stage, tie_groups(partition))
    reduce_to_stage(model, run)
    kept = {name for name, _ in model.named_parameters()}
    assert kept == {name for name, stages in partition.stages_of.items() if stage in stages} & set(trace.parameters)
    assert [tie.names[0] for tie in run.ties] == ["blocks.0.project.bias", "blocks.0.project.weight"]
    assert all(tie.stages == (1, 2) for tie in run.ties)
    run.begin()
    if stage > 0:
        assert isinstance(model.stem(torch.zeros(1, 3, 4, 4)), Phantom)
        batch, channels, _, _ = model.conv(Phantom("x")).shape
        assert find_phantom((batch, channels)) is batch
        # a foreign module behind the cut gives no numbers either: at the next cut or the loss this is an error
        run.active = True
        assert isinstance(model.stem(torch.zeros(1, 3, 4, 4)), Phantom)


def test_a_stage_without_parameters_gets_an_empty_one() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), PlainCut(), nn.ReLU())
    trace = traced(model, input=torch.zeros(2, DIM))
    reduce_to_stage(model, StageRun(Partition(trace, (0, 1)), 1, ()))
    assert [(name, p.numel()) for name, p in model.named_parameters()] == [(ANCHOR, 0)]
    torch.optim.SGD(model.parameters(), lr=1.0)


def test_state_that_would_move_twice_is_named() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = PlainCut()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.cut(x).sum()

    model = Counting()
    assert traced(model, x=torch.zeros(1)).moving == ("seen",)
    assert float(model.seen) == 0.0


@pytest.mark.parametrize(
    ("crossing", "message"),
    [
        (lambda cut, x: cut(cut(x)), "is reached twice"),
        (lambda cut, x: cut(x, 3)[0], "is given a int"),
    ],
)
def test_what_cannot_be_cut_is_refused(crossing: Any, message: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = PlainCut()

        def forward(self, x: Tensor) -> Tensor:
            return crossing(self.cut, x).sum()

    with pytest.raises(CapslogError, match=message):
        traced(Model(), x=torch.ones(2))


def trace_of(uses: dict[str, tuple[int, ...]], pieces: int) -> Trace:
    cuts: Any = (None,) * (pieces - 1)
    return Trace(cuts, uses, {}, ())


def test_cut_lists_that_do_not_fit_are_refused() -> None:
    trace = trace_of({"a": (0,)}, 4)
    for cuts in ((1, 2), (0, 0), (0, 4), ()):
        with pytest.raises(CapslogError, match="3 CutPoints, so pieces 0 to 3"):
            Partition(trace, cuts)
    assert [list(Partition(trace, (0, 1)).pieces(stage)) for stage in (0, 1)] == [[0], [1, 2, 3]]
    assert uniform_cuts(7, 3) == (0, 2, 4)


def test_ties_are_joined_over_declared_pairs() -> None:
    trace = trace_of({"a": (0,), "b": (3,), "c": (1, 2), "d": (2,), "e": (0,)}, 4)
    partition = Partition(trace, (0, 1, 2, 3))
    assert tie_groups(partition, [("a", "b"), ("b", "d")]) == (
        TieGroup(("a", "b", "d"), (0, 2, 3)),
        TieGroup(("c",), (1, 2)),
    )
    # within a stage a single parameter is no tie, two declared parameters are
    assert tie_groups(Partition(trace, (0,)), [("a", "b")]) == (TieGroup(("a", "b"), (0,)),)
    with pytest.raises(CapslogError, match="shared_weights names 'lm_head_weight'"):
        tie_groups(partition, [("a", "lm_head_weight")])


def test_a_phantom_takes_part_in_tensor_code_and_decides_nothing() -> None:
    ghost = Phantom("the result of 'stem'", dims=3)
    real = torch.ones(2)
    for value in (
        real + ghost,
        ghost * 2 - real,
        torch.cat([real, ghost]),
        F.relu(ghost).view(-1, 4).transpose(0, 1)[..., 0],
        F.linear(real, ghost),
        -ghost,
        ghost > 3,
        ghost == 3,
        1 / ghost,
    ):
        assert isinstance(value, Phantom)
    assert ghost.ndim == 3
    assert len(ghost.shape) == 3
    assert isinstance(torch.zeros(ghost), Phantom)
    ghost[0] = 1
    ghost.training = False
    for ask in (bool, int, float, list, len, lambda g: range(g), lambda g: [0, 1][g]):
        with pytest.raises((CapslogError, TypeError), match=r"the result of 'stem'|Phantom"):
            ask(ghost)
