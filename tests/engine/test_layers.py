"""Layers share an autograd graph only where nothing can tell; gradients inside it look as if they had crossed a cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import keep_layout, take_layers
from varuna_capslog.engine.routes import Reach
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


def test_a_gradient_takes_the_layout_of_its_tensor() -> None:
    """A permuted gradient would choose other kernels than the contiguous one that a cut delivers, and so other bits."""
    seen = []
    leaf = torch.randn(3, 4, requires_grad=True)
    written = leaf * 2
    keep_layout(written)
    written.register_hook(lambda gradient: seen.append(gradient.stride()))
    (written.t() * torch.randn(4, 3)).sum().backward()
    assert seen == [(4, 1)]
    seen.clear()
    written = leaf * 2
    written.register_hook(lambda gradient: seen.append(gradient.stride()))
    (written.t() * torch.randn(4, 3)).sum().backward()
    assert seen == [(1, 3)]
