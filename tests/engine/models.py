"""Tiny chains that hold every kind of layer the engine must get right, and data whose microbatches differ in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.model.chain import Chain, Layer, LayerFactory, TensorSpec
from varuna_capslog.model.workload import Minibatch

DIM = 8


class FrozenStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, DIM, 3, padding=1)
        self.conv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(DIM, DIM, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ToSequence(nn.Module):
    """Writes a float sequence, a boolean mask and integer positions: three tensors of three dtypes cross the cut."""

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = x.flatten(2).transpose(1, 2)
        count = memory.shape[1]
        positions = torch.arange(count, device=x.device).expand(x.shape[0], count).contiguous()
        mask = positions >= sizes[:, :1]
        return memory, mask, positions


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        # without a bias: a key bias has a gradient of zero in theory and of rounding noise in practice
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, memory: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(memory) @ self.key(memory).transpose(1, 2) / DIM**0.5
        weights = scores.masked_fill(mask[:, None], -1e9).softmax(-1)
        return self.norm(memory + self.dropout(weights @ self.value(memory)))


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, DIM)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        state = self.embedding(positions[:, :4] % 64)
        return state, state.new_zeros(1, *state.shape[:2], 3)


class Decoder(nn.Module):
    """Applies a head that all decoders share and adds its output to the list that travels on."""

    def __init__(self, head: nn.Module, dropout: float) -> None:
        super().__init__()
        self.cross = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(dropout)
        self.head = head

    def forward(self, state: Tensor, memory: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.cross(state) @ memory.transpose(1, 2)).softmax(-1)
        state = F.layer_norm(state + self.dropout(weights @ memory), (DIM,))
        return state, torch.cat([outputs, self.head(state)[None]])


def layer_factories(
    dropout: float = 0.1, dtype: torch.dtype = torch.float32, head: Callable[[], nn.Module] | None = None
) -> list[LayerFactory]:
    """11 layers: frozen, BatchNorm, without parameters, three tensors per cut, dropout, a head for each of three.

    Args:
        head: gives the decoders' heads; None: makes a new one for each.
    """
    head = head or make_head
    decoded = ("state", "memory", "outputs"), ("state", "outputs")
    layers = [
        LayerFactory("stem", FrozenStem),
        LayerFactory("conv1", ConvNorm),
        LayerFactory("pool", lambda: nn.AvgPool2d(2)),
        LayerFactory("conv2", ConvNorm),
        LayerFactory("sequence", ToSequence, ("x", "sizes"), ("memory", "mask", "positions")),
        LayerFactory("encoder.0", lambda: Encoder(dropout), ("memory", "mask"), ("memory",)),
        LayerFactory("encoder.1", lambda: Encoder(dropout), ("memory", "mask"), ("memory",)),
        LayerFactory("queries", Queries, ("positions",), ("state", "outputs")),
        *(LayerFactory(f"decoder.{i}", lambda: Decoder(head(), dropout), *decoded) for i in range(3)),
    ]
    return [dataclasses.replace(one, make=lambda make=one.make: make().to(dtype)) for one in layers]


def make_head() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 3))


def _ready_made(layers: Sequence[LayerFactory], seeds: Sequence[int] | None = None) -> Chain:
    made = []
    for index, one in enumerate(layers):
        if seeds is not None:
            torch.manual_seed(seeds[index])
        made.append(Layer(one.name, one.make(), one.reads, one.writes))
    return Chain(made, ("x", "sizes"), ("outputs",), "tiny")


def build_chain(dropout: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Chain:
    """The layers made one after the other, with one head shared by three."""
    torch.manual_seed(seed)
    head = make_head()
    return _ready_made(layer_factories(dropout, dtype, lambda: head))


def factory_chain(dropout: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Chain:
    """The layers from factories, their heads tied."""
    heads = tuple(f"decoder.{i}.head" for i in range(3))
    factories = layer_factories(dropout, dtype)
    return Chain.from_factories(factories, ("x", "sizes"), ("outputs",), "tiny", tied=[heads], seed=seed)


def factory_chain_by_hand(dropout: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Chain:
    """The oracle of `factory_chain`: every layer made in this process as its factory's seed says, heads shared."""
    layers = layer_factories(dropout, dtype)
    chain = _ready_made(layers, [mix(seed, index) for index in range(len(layers))])
    for layer in chain.layers[9:]:
        layer.module.head = chain.layers[8].module.head
    return chain


def make_minibatch(
    microbatches: int, step: int, dtype: torch.dtype = torch.float32
) -> tuple[Minibatch, list[dict[str, Tensor]]]:
    """Microbatches of two images whose size changes from one to the next; targets of another number each."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs, targets = [], []
    for index in range(microbatches):
        height, width = 4 + 2 * (index % 3), 6 + 2 * ((index + step) % 2)
        x = torch.randn(2, 3, height, width, generator=generator).to(dtype)
        cells = (height // 2) * (width // 2)
        inputs.append({"x": x, "sizes": torch.tensor([[cells, 1], [cells - 2, 1]])})
        targets.append(torch.randn(2, 4, 3, generator=generator).to(dtype))
    minibatch = Minibatch(
        [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs],
        targets,
        {"count": float(microbatches * 2)},
        [[f"image-{index}"] for index in range(microbatches)],
    )
    return minibatch, inputs


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Squared and absolute errors of all decoders' outputs."""
    error = outputs["outputs"][1:] - targets
    square, absolute = error.square().sum() / normalisers["count"], error.abs().sum() / normalisers["count"]
    return {"loss": square + 0.1 * absolute, "square": square, "absolute": absolute}


def plain_step(
    chain: Chain, minibatch: Minibatch, inputs: Sequence[Mapping[str, Tensor]], seed: int, step: int
) -> dict[str, float]:
    """The oracle: the unsplit model in one autograd graph per microbatch; gradients in `.grad`, loss parts returned."""
    device, total = torch.device("cpu"), {}
    for layer in chain.layers:
        layer.module.train()
    for index, values in enumerate(inputs):
        seed_layer(device, seed, step, index, 0)
        outputs = chain.run(values, lambda done, index=index: seed_layer(device, seed, step, index, done + 1))
        parts = loss(outputs, minibatch.targets[index], minibatch.normalisers)
        parts["loss"].backward()
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + float(part.detach())
    return total
