"""Functions of captured layers: the bits of autograd over cut lists and recomputation, and no more memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from tests.engine.compare import merged
from tests.engine.pool import WorkerPool
from varuna_capslog.engine import functions
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.functions import LayerFunctions, SharedFunctions
from varuna_capslog.engine.layers import take_layers
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.workload import Minibatch

NEVER = 10**9
MICROBATCHES = 3


class Tied(nn.Module):
    """Decoder of two blocks whose head is its embedding; each block also reads the embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.25), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.register_buffer("mask", torch.ones(5, 5).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embedding(tokens)
        for block in self.blocks:
            weights = (hidden @ hidden.transpose(1, 2)).masked_fill(self.mask == 0, -1e4).softmax(-1)
            hidden = hidden + block(weights @ hidden + first)
        return hidden @ self.embedding.weight.t()


class Stacked(nn.Module):
    """Blocks that stack three tensors, so that a backward adds to views of the gradient that comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stacking() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.stack((x, x, x))
        for block in self.blocks:
            parts = block(parts)
        return parts


class Stacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, parts: Tensor) -> Tensor:
        first, second, third = parts.unbind(0)
        hidden = self.linear(first + second * third)
        return torch.stack((hidden, hidden.tanh(), third))


MODELS: dict[str, Any] = {
    "convnext": lambda: ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)], 0.0, num_classes=5),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 16, dropout=0.1, batch_first=True),
    "tied": Tied,
    "stacked": Stacked,
}
INPUTS: dict[str, Any] = {
    "convnext": lambda: {"x": torch.randn(2, 3, 32, 32)},
    "transformer": lambda: {"src": torch.randn(2, 5, 16), "tgt": torch.randn(2, 4, 16)},
    "tied": lambda: {"tokens": torch.randint(11, (2, 5))},
    "stacked": lambda: {"x": torch.randn(2, 8)},
}


def inputs_of(name: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    made: dict[str, Tensor] = INPUTS[name]()
    return made


def captured(name: str) -> Chain:
    torch.manual_seed(0)
    return Chain.from_module(MODELS[name]().train(), None, inputs_of(name, 0))


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    return {"loss": sum(output.square().mean() for output in outputs.values()) / normalisers["microbatches"]}


def steps(communicator: Communicator, name: str, cuts: tuple[int, ...], calls: int, recompute: bool) -> dict[str, Any]:
    """Make three steps; return losses, this rank's weights, and the layers that have functions at the end."""
    before, functions.CALLS = functions.CALLS, calls
    try:
        chain = captured(name)
        inputs = [inputs_of(name, microbatch) for microbatch in range(MICROBATCHES)]
        specs = [{key: TensorSpec.of(tensor) for key, tensor in values.items()} for values in inputs]
        batch = Minibatch(specs, [None] * MICROBATCHES, {"microbatches": float(MICROBATCHES)}, [[0], [1], [2]])
        options = EngineOptions(MICROBATCHES, seed=1, recompute=recompute, clip_norm=0.5)
        engine = PipelineEngine(
            chain, loss, Layout.pipelines(cuts, len(chain)), options, communicator, torch.device("cpu")
        )
        losses = [train_step(engine, number, batch, inputs.__getitem__).parts["loss"] for number in (1, 2, 3)]
        weights = {key: parameter.detach().clone() for key, parameter in engine.optimizer.parameters.items()}
        made = [layer.name for layer in engine.layers if layer.functions is not None and layer.functions._made]
        return {"losses": losses, "weights": weights, "made": made}
    finally:
        functions.CALLS = before


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_functions_have_the_bits_of_autograd_under_any_cuts(pool: WorkerPool, name: str, recompute: bool) -> None:
    length = len(captured(name))
    expected = pool.run(steps, 1, name, (0,), NEVER, recompute)[0]
    assert expected["made"] == []
    for cuts in ((0,), (0, length // 2)):
        for calls in (1, MICROBATCHES):  # from the second microbatch on; from the second step on
            ranks = pool.run(steps, len(cuts), name, cuts, calls, recompute)
            assert sum(len(rank["made"]) for rank in ranks) >= length - 1
            assert all(rank["losses"] == expected["losses"] for rank in ranks)
            weights = merged(ranks, "weights")
            assert weights.keys() == expected["weights"].keys()
            assert [key for key in weights if not torch.equal(weights[key], expected["weights"][key])] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_call_of_functions_takes_no_more_memory_than_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = captured(name)
    tensors, peaks = inputs_of(name, 0), []
    for layer in take_layers(chain, range(len(chain)), torch.device("cpu")):
        reads = {
            key: tensors[key].detach().requires_grad_(tensors[key].is_floating_point()) for key in layer.layer.reads
        }
        layer.forward(reads, 0, 0, graph=True, record=True)
        monkeypatch.setattr(functions, "CALLS", 1)
        made = _made(layer, reads)
        rows = [_peak(layer, reads, made_or_none) for made_or_none in (None, made)]
        assert made is not None
        written = layer.forward(reads, 0, 0, True, True)
        sizes = [tensor.nbytes for tensor in written.values() if tensor.requires_grad]
        # gradients of several outputs stay until the backward of the layer ends
        assert rows[1] <= rows[0] + (sum(sizes) if len(sizes) > 1 else 0), layer.name
        peaks.append(rows)
        tensors |= {key: tensor.detach() for key, tensor in written.items()}
    assert len(peaks) == len(chain)


def _peak(layer: Any, reads: Mapping[str, Tensor], made: Any) -> int:
    """Return the peak of the second microbatch, whose gradients are added to those of the first."""
    for parameter in layer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    with PeakProbe(torch.device("cpu")) as probe:
        _run(layer, reads, made)
    return int(probe.peak_bytes)


def _run(layer: Any, reads: Mapping[str, Tensor], made: Any) -> list[Tensor | None]:
    """Run forward and backward, by autograd without `made`; return the gradients of the inputs."""
    if made is None:
        leaves = {key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in reads.items()}
        written = layer.forward(leaves, 0, 0, True, True)
        ends = [tensor for tensor in written.values() if tensor.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        return [leaf.grad for leaf in leaves.values() if leaf.requires_grad]
    outputs, saved = made.forward([*reads.values()])
    results: list[Tensor | None] = made.backward(saved, [torch.ones_like(output) for output in outputs])
    return results


def test_a_layer_is_traced_after_its_calls_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "CALLS", 2)
    layer = _layer()
    calls = [layer.functions.instead(layer, {"x": torch.ones(2, 4)}, lambda name: True) for _ in range(4)]
    assert [made is not None for made in calls] == [False, False, True, True]
    assert calls[2] is calls[3]
    assert layer.functions.instead(layer, {"x": torch.ones(4, 2).t()}, lambda name: True) is None  # another layout


@pytest.mark.parametrize(
    "other",
    [
        {"factor": -0.0},
        {"scale": torch.randn(4, 2).t()},
        {"counts": torch.ones(4, dtype=torch.int32)},
        {"trained": False},
    ],
    ids=["constant", "stride", "dtype", "requires_grad"],
)
def test_equal_layers_share_functions_and_similar_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(functions, "CALLS", 1)
    shared, reads = SharedFunctions(), {"x": torch.randn(2, 4).requires_grad_()}
    layers = [_captured(Similar(**kind), 2, 4) for kind in ({}, {}, other)]
    made = [_made(layer, reads, shared=shared) for layer in layers]
    assert made[0].traced is made[1].traced
    assert made[2].traced is not made[0].traced
    assert len(shared.traced) == 2
    for layer, its in zip(layers, made, strict=True):
        rows = []
        for call in (None, its):
            rows.append(_run(layer, reads, call) + [parameter.grad for parameter in layer.parameters.values()])
            layer.reset()
        assert all(one is two is None or torch.equal(one, two) for one, two in zip(*rows, strict=True))


def test_calls_of_layers_that_look_alike_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "CALLS", 4)
    shared, reads = SharedFunctions(), {"x": torch.ones(2, 4)}
    layers = [_layer() for _ in range(2)]
    rows = [LayerFunctions(layer.layer.module, shared) for layer in layers]
    calls = [
        [row.instead(layer, reads, lambda name: True) for layer, row in zip(layers, rows, strict=True)]
        for _ in range(4)
    ]
    assert [[made is not None for made in pair] for pair in calls] == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]
    late = LayerFunctions(layers[0].layer.module, shared)
    made = [late.instead(layers[0], reads, lambda name: True) for _ in range(2)]
    assert made[0] is None  # a layer's first call shows what it does
    assert made[1] is not None


def test_layers_that_functions_might_change_keep_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "CALLS", 1)
    reads = {"x": torch.ones(2, 4)}
    layer = _layer()
    assert _made(layer, reads) is not None
    assert _made(layer, reads, reached=False) is None  # the loss does not read the output
    layer.layer.module.register_forward_hook(lambda *_: None)
    assert _made(layer, reads) is None
    chain = Chain([Layer("linear", nn.Linear(4, 4))], ("x",), ("x",))
    by_hand = take_layers(chain, [0], torch.device("cpu"))[0]
    by_hand.forward(reads, 0, 0, graph=True, record=True)
    assert _made(by_hand, reads) is None  # its code may change


def test_a_gradient_in_another_layout_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the layout of the output, as one that crosses a cut does: sums in another order have other bits."""
    monkeypatch.setattr(functions, "CALLS", 1)
    layer = _layer(128, 64)
    bias = layer.parameters["linear.bias"]
    made, gradient = _made(layer, {"x": torch.ones(128, 64)}), torch.randn(128, 64)
    found = []
    for same in (gradient, gradient.t().contiguous().t()):
        bias.grad = None
        made.backward(made.forward([torch.ones(128, 64)])[1], [same])
        found.append(bias.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("broken", ["first", "later"])
def test_functions_that_give_other_bits_are_not_taken(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(functions, "CALLS", 1)
    layer, reads = _layer(), {"x": torch.ones(2, 4).requires_grad_()}
    assert _made(layer, reads) is not None
    traced = functions._Traced.of

    def wrong(*arguments: Any) -> Any:
        made = traced(*arguments)
        function = getattr(made, broken)
        setattr(made, broken, lambda *values: [*function(*values)[:-1], torch.zeros(2, 4)])
        return made

    monkeypatch.setattr(functions._Traced, "of", wrong)
    assert _made(layer, reads) is None


def _made(layer: Any, reads: Mapping[str, Tensor], reached: bool = True, shared: SharedFunctions | None = None) -> Any:
    """Return the functions of a layer after its second call."""
    layer_functions = LayerFunctions(layer.layer.module, shared or SharedFunctions())
    return [layer_functions.instead(layer, reads, lambda name: reached) for _ in range(2)][1]


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x


class Similar(nn.Module):
    def __init__(
        self,
        factor: float = 0.0,
        scale: Tensor | None = None,
        counts: Tensor | None = None,
        trained: bool = True,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.scale = nn.Parameter(torch.randn(2, 4) if scale is None else scale)
        self.bias = nn.Parameter(torch.randn(4), requires_grad=trained)
        self.register_buffer("counts", torch.ones(4, dtype=torch.int64) if counts is None else counts)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.bias) * self.counts + x * self.factor


def _layer(rows: int = 2, width: int = 4) -> Any:
    """Return the captured layer of a model, after one forward, with functions."""
    return _captured(Small(width), rows, width)


def _captured(model: nn.Module, rows: int, width: int) -> Any:
    chain = Chain.from_module(model.train(), [], {"x": torch.ones(rows, width)})
    layer = take_layers(chain, [0], torch.device("cpu"))[0]
    layer.forward({"x": torch.ones(rows, width)}, 0, 0, graph=True, record=True)
    layer.functions = LayerFunctions(layer.layer.module, SharedFunctions())
    return layer
