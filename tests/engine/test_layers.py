"""Layers share an autograd graph only where nothing can tell; gradients inside it look as if they had crossed a cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import keep_layout, take_layers
from varuna_capslog.engine.routes import Reach
from varuna_capslog.engine.segments import SegmentState
from varuna_capslog.engine.stage import MicrobatchContext, Stage
from varuna_capslog.model.chain import Chain, Layer, TensorSpec, Value


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors).sum(0) * self.weight


def graphs_kept(chain: Chain) -> tuple[int, Stage, MicrobatchContext]:
    """How many graphs one forward of the whole chain leaves."""
    device = torch.device("cpu")
    stage = Stage(0, chain, take_layers(chain, range(len(chain)), device), lambda out, *_: {"loss": out["x"].sum()})
    specs = {value: TensorSpec((3, 4), requires_grad=value.writer >= 0) for value in chain.readers}
    context = MicrobatchContext((0,), specs, Reach(chain, specs), [None], {}, (1, 1))
    stage.forward(context, {Value("x", -1): torch.ones(3, 4)}, whole=True)
    return len(stage._held[0].states[0].graphs), stage, context


def test_a_line_of_layers_is_one_graph() -> None:
    count, _, _ = graphs_kept(Chain([Layer(f"layer.{index}", Scale()) for index in range(4)]))
    assert count == 1


def test_a_tensor_that_passes_by_separates_the_graphs_and_gets_the_sum_of_its_gradients() -> None:
    torch.manual_seed(0)
    layers = [
        Layer("first", Scale(), ("x",), ("memory",)),
        Layer("second", Scale(), ("memory",), ("x",)),
        Layer("third", Scale(), ("x", "memory"), ("x",)),
        Layer("fourth", Scale()),
    ]
    chain = Chain(layers)
    chain.run({"x": torch.ones(3, 4)})["x"].sum().backward()
    expected = {name: parameter.grad for name, parameter in chain.named_parameters().items()}
    for parameter in chain.named_parameters().values():
        parameter.grad = None
    count, stage, context = graphs_kept(chain)
    assert count == 3
    stage.backward(context, {})
    for layer in stage.layers:
        torch.testing.assert_close(layer.parameters["weight"].grad, expected[f"{layer.name}.weight"])


def test_where_graphs_end_is_what_the_specs_of_the_call_say() -> None:
    """What passes by wants a gradient in some calls only."""
    layers = [
        Layer("first", Scale(), ("x",), ("memory",)),
        Layer("second", Scale(), ("memory",), ("x",)),
        Layer("third", Scale(), ("x", "memory"), ("x",)),
    ]
    _, stage, context = graphs_kept(Chain(layers))
    (segment,) = stage.segments
    for wanted, count in ((True, 3), (False, 1), (True, 3)):
        specs = {
            value: TensorSpec((3, 4), requires_grad=value.writer >= 0 and (wanted or value.name != "memory"))
            for value in context.specs
        }
        state = SegmentState()
        values = {Value("x", -1): torch.ones(3, 4)}
        segment.run(dataclasses.replace(context, specs=specs), values, state, graph=True, record=False)
        assert len(state.graphs) == count


class Both(torch.autograd.Function):
    """Twice the same; its gradient is that of the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        assert gradients[0] is None
        return gradients[1]


def test_a_gradient_takes_the_layout_of_its_tensor() -> None:
    """A permuted gradient would choose other kernels than the contiguous one that a cut delivers, and so other bits."""

    def layout_of_its_gradient(written: Tensor, before: Tensor, kept: bool) -> tuple[int, ...]:
        seen = []
        before.register_hook(lambda gradient: seen.append(gradient.stride()))
        if kept:
            keep_layout(written)
        (written.t() * torch.randn(4, 3)).sum().backward()
        return seen[0]

    leaf = torch.randn(3, 4, requires_grad=True)
    for kept, stride in ((True, (4, 1)), (False, (1, 3))):
        before = leaf * 1
        assert layout_of_its_gradient(before * 2, before, kept) == stride
        before = leaf * 1
        written = Both.apply(before)[1]
        assert layout_of_its_gradient(written, before, kept) == stride, "two outputs of one operation"
    own = torch.randn(3, 4, requires_grad=True)
    keep_layout(own)
    (own.t() * torch.randn(4, 3)).sum().backward()
    assert own.grad is not None
    assert own.grad.stride() == (4, 1), "a layer may hand on a leaf"


def test_a_layer_keeps_a_graph_only_where_it_is_asked_to() -> None:
    chain = Chain([Layer("only", Scale(), ("x",), ("x",))], inputs=("x",), outputs=("x",))
    (layer,) = take_layers(chain, [0], torch.device("cpu"))
    for graph in (True, False, True, False):  # the first forward looks at more than the later ones
        found = layer.forward({"x": torch.randn(3, 4)}, 0, 0, graph, record=False)["x"]
        assert found.requires_grad is graph
