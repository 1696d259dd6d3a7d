"""Tiny chains that hold every kind of layer the engine must get right, and data whose microbatches differ in size.

Most tests use `build_chain`; the chains of `GRAPHS` have layers that form branches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.model.capture import Varying
from varuna_capslog.model.chain import Chain, Layer, LayerFactory, TensorSpec
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.model.trace import autocast_context
from varuna_capslog.model.workload import Minibatch

DIM = 8
MASKED = -6e4
"""What float16 can hold and softmax makes 0 of."""


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

    def forward(self, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(memory) @ self.key(memory).transpose(1, 2) / DIM**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None], MASKED)
        weights = scores.softmax(-1)
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
    return [dataclasses.replace(layer, make=lambda make=layer.make: make().to(dtype)) for layer in layers]


def make_head() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 3))


def _ready_made(layers: Sequence[LayerFactory], seeds: Sequence[int] | None = None) -> Chain:
    made = []
    for index, factory in enumerate(layers):
        if seeds is not None:
            torch.manual_seed(seeds[index])
        made.append(Layer(factory.name, factory.make(), factory.reads, factory.writes))
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
    """Microbatches of two images whose size changes from one to the next; each has another number of targets."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs, targets = [], []
    for index in range(microbatches):
        height, width = 4 + 2 * (index % 3), 6 + 2 * ((index + step) % 2)
        x = torch.randn(2, 3, height, width, generator=generator).to(dtype)
        cells = (height // 2) * (width // 2)
        inputs.append({"x": x, "sizes": torch.tensor([[cells, 1], [cells - 2, 1]])})
        targets.append(torch.randn(2, 4, 3, generator=generator).to(dtype))
    return _described(inputs, targets), inputs


def _described(inputs: Sequence[Mapping[str, Tensor]], targets: list[Any]) -> Minibatch:
    return Minibatch(
        [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs],
        targets,
        {"count": float(len(inputs) * 2)},
        [[f"image-{index}"] for index in range(len(inputs))],
    )


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Squared and absolute errors of all decoders' outputs."""
    error = outputs["outputs"][1:] - targets
    square, absolute = error.square().sum() / normalisers["count"], error.abs().sum() / normalisers["count"]
    return {"loss": square + 0.1 * absolute, "square": square, "absolute": absolute}


def plain_step(
    chain: Chain,
    minibatch: Minibatch,
    inputs: Sequence[Mapping[str, Tensor]],
    seed: int,
    step: int,
    loss: Callable[..., dict[str, Tensor]] = loss,
    precision: str = "float32",
    scaler: torch.amp.GradScaler | None = None,
    after_backward: Callable[[int], None] = lambda index: None,
) -> dict[str, float]:
    """The oracle: the unsplit model in one autograd graph per microbatch; gradients in `.grad`, loss parts returned.

    scaler: scales the loss, and so the gradients. after_backward: called with each microbatch.
    """
    device, total = torch.device("cpu"), {}
    for layer in chain.layers:
        layer.module.train()
    for index, values in enumerate(inputs):
        seed_layer(device, seed, step, index, 0)
        with autocast_context("cpu", precision):
            outputs = chain.run(values, lambda done, index=index: seed_layer(device, seed, step, index, done + 1))
        parts = loss(outputs, minibatch.targets[index], minibatch.normalisers)
        (parts["loss"] if scaler is None else scaler.scale(parts["loss"])).backward()
        after_backward(index)
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + float(part.detach())
    return total


class Tokens(nn.Module):
    """Embeds (batch, length) token ids; a 0 is padding, which the mask names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, DIM)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), ids == 0


class Contrast(nn.Module):
    """Layer where two towers meet: the similarity of every image and every text of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.image(image.mean(1)) @ self.text(text.mean(1)).T


class ConvBlock(nn.Sequential):
    def __init__(self, size: int, channels: int = DIM) -> None:
        super().__init__(nn.Conv2d(channels, DIM, size, padding=size // 2), nn.ReLU())


class Concatenate(nn.Module):
    """Layer where the branches of an Inception block meet."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(branches * DIM, DIM, 1)

    def forward(self, *branches: Tensor) -> Tensor:
        return self.mix(torch.cat(branches, 1))


class MeanHead(nn.Module):
    """Three numbers of the mean over some dimensions."""

    def __init__(self, over: Sequence[int]) -> None:
        super().__init__()
        self.linear, self.over = nn.Linear(DIM, 3), tuple(over)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(self.over))


class CrossDecoder(nn.Module):
    """Self-attention, then attention over the encoder's output, which every decoder reads."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.own, self.cross, self.norm = Encoder(dropout), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, state: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        state = self.own(state)
        scores = (self.cross(state) @ memory.transpose(1, 2)).masked_fill(mask[:, None], MASKED)
        return self.norm(state + scores.softmax(-1) @ memory)


def _tower_layers(dropout: float) -> list[Layer]:
    return [
        Layer("image.stem", nn.Linear(3, DIM), ("pixels",), ("image",)),
        *(Layer(f"image.{i}", Encoder(dropout), ("image",), ("image",)) for i in range(3)),
        Layer("text.embed", Tokens(), ("tokens",), ("text", "padding")),
        *(Layer(f"text.{i}", Encoder(dropout), ("text", "padding"), ("text",)) for i in range(2)),
        Layer("join", Contrast(), ("image", "text"), ("logits",)),
    ]


def _inception_layers(dropout: float) -> list[Layer]:
    return [
        Layer("stem", ConvBlock(3, 3)),
        Layer("norm", ConvNorm(), ("x",), ("a",)),
        Layer("deep.0", ConvBlock(1), ("x",), ("b",)),
        Layer("deep.1", nn.Sequential(ConvBlock(3), nn.Dropout(dropout)), ("b",), ("b",)),
        Layer("pool", nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvBlock(1)), ("x",), ("c",)),
        Layer("join", Concatenate(3), ("a", "b", "c"), ("x",)),
        Layer("head", MeanHead([2, 3]), ("x",), ("scores",)),
    ]


class InRows(nn.Module):
    """An image as a sequence of its cells."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


def _line_layers(dropout: float) -> list[Layer]:
    return [
        Layer("stem", ConvBlock(3, 3)),
        Layer("norm", ConvNorm()),
        Layer("rows", InRows()),
        *(Layer(f"encoder.{i}", Encoder(dropout)) for i in range(2)),
        Layer("head", MeanHead([1]), ("x",), ("scores",)),
    ]


class Gate(nn.Linear):
    """Zeros and ones, which carry no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) > 0).to(x.dtype)


class Gated(nn.Linear):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x * gate)


def _dead_end_layers(dropout: float) -> list[Layer]:
    return [
        Layer("stem", nn.Linear(3, DIM), ("x",), ("h",)),
        Layer("unread", nn.Linear(DIM, DIM), ("h",), ("unread",)),
        Layer("side.0", nn.Linear(DIM, DIM), ("h",), ("side",)),
        Layer("gate", Gate(DIM, DIM), ("h",), ("gate",)),
        Layer("side.1", nn.Linear(DIM, DIM), ("side",), ("lost",)),
        Layer("gated", Gated(DIM, DIM), ("h", "gate"), ("h",)),
        Layer("head", MeanHead([1]), ("h",), ("scores",)),
    ]


def _draw_dead_ends(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(2, 3 + size, 3, generator=generator)}, torch.randn(2, 3, generator=generator)


def _translation_layers(dropout: float) -> list[Layer]:
    return [
        Layer("encoder.embed", Tokens(), ("source",), ("memory", "padding")),
        *(Layer(f"encoder.{i}", Encoder(dropout), ("memory", "padding"), ("memory",)) for i in range(2)),
        Layer("decoder.embed", nn.Embedding(16, DIM), ("target",), ("state",)),
        *(Layer(f"decoder.{i}", CrossDecoder(dropout), ("state", "memory", "padding"), ("state",)) for i in range(3)),
        Layer("head", MeanHead([1]), ("state",), ("scores",)),
    ]


def _ids(length: int, generator: torch.Generator) -> Tensor:
    ids = torch.randint(1, 16, (2, length), generator=generator)
    ids[1, -2:] = 0
    return ids


def _draw_towers(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    pixels = torch.randn(2, 4 + size, 3, generator=generator)
    return {"pixels": pixels, "tokens": _ids(5 + size, generator)}, torch.randn(2, 2, generator=generator)


def _draw_inception(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(2, 3, 4 + size, 6, generator=generator)
    return {"x": x}, torch.randn(2, 3, generator=generator)


def _draw_translation(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    source, target = _ids(5 + size, generator), torch.randint(1, 16, (2, 4 + size), generator=generator)
    return {"source": source, "target": target}, torch.randn(2, 3, generator=generator)


def _errors(output: Tensor, targets: Tensor, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    error = output - targets
    square, absolute = error.square().sum() / normalisers["count"], error.abs().sum() / normalisers["count"]
    return {"loss": square + 0.1 * absolute, "square": square, "absolute": absolute}


def _towers_loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    parts = _errors(outputs["logits"], targets, normalisers)
    image = outputs["image"].mean(1).square().sum() / normalisers["count"]
    return {**parts, "loss": parts["loss"] + 0.05 * image, "image": image}


def _scores_loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    return _errors(outputs["scores"], targets, normalisers)


@functools.cache
def _captured(dropout: float) -> list[Layer]:
    """A GPT-2 of transformers whose two layers are split into 2 and 4 parts; sequences may have any length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 2 * DIM, "n_layer": 2, "n_head": 4, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    ids = Varying(torch.zeros(2, 5, dtype=torch.long), [1])
    chain = Chain.from_module(model, None, {"input_ids": ids}, outputs=["logits"], evaluates=False)
    return split_chain(chain, {"transformer.h.0": "tensor-2", "transformer.h.1": "tensor-4"}, "close").layers


def _draw_captured(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return {"input_ids": _ids(4 + size, generator)}, torch.randn(2, 4 + size, 16, generator=generator)


def _logits_loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    return _errors(outputs["logits"], targets, normalisers)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model whose layers form branches, with its data and its loss.

    Attributes:
        layers: makes them, with this probability of dropout.
        draw: the inputs and the target of one microbatch, by its size (0 to 2).
        loss: takes outputs, a microbatch's target and normalisers, as `loss` does.
    """

    layers: Callable[[float], list[Layer]]
    draw: Callable[[int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
    loss: Callable[..., dict[str, Tensor]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def build_chain(self, dropout: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Chain:
        """Build the graph's chain, as this module's `build_chain` does."""
        torch.manual_seed(seed)
        layers = self.layers(dropout)
        for layer in layers:
            layer.module.to(dtype)
        return Chain(layers, self.inputs, self.outputs, "graph")

    def make_minibatch(
        self, microbatches: int, step: int, dtype: torch.dtype = torch.float32, even: bool = False
    ) -> tuple[Minibatch, list[dict[str, Tensor]]]:
        """Make a minibatch, as this module's `make_minibatch` does: two samples in each microbatch, of a size that
        changes from microbatch to microbatch unless `even`."""
        generator = torch.Generator().manual_seed(100 + step)
        drawn = [self.draw(0 if even else (index + step) % 3, generator) for index in range(microbatches)]
        inputs = [
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in values.items()}
            for values, _ in drawn
        ]
        return _described(inputs, [target.to(dtype) for _, target in drawn]), inputs


GRAPHS = {
    # two towers of 4 and 3 layers without an edge between them; the loss reads their join and the first one's output
    "towers": Graph(_tower_layers, _draw_towers, _towers_loss, ("pixels", "tokens"), ("logits", "image")),
    # a fork into three branches, one with BatchNorm, one of two layers, joined by a concatenation
    "inception": Graph(_inception_layers, _draw_inception, _scores_loss, ("x",), ("scores",)),
    # layers from which no way leads to the loss: an output that nobody reads, two layers in a row, and a gate without a
    # gradient; their parameters have no gradient under any plan
    "dead ends": Graph(_dead_end_layers, _draw_dead_ends, _scores_loss, ("x",), ("scores",)),
    # every decoder reads the encoder's output and its mask: two values with many readers
    "translation": Graph(_translation_layers, _draw_translation, _scores_loss, ("source", "target"), ("scores",)),
}
LINE = {"line": Graph(_line_layers, _draw_inception, _scores_loss, ("x",), ("scores",))}
"""Every tensor has one reader and every parameter one use, so that one graph of the whole model adds no gradients of 16
bits in another order."""
SPLIT = {
    "split, captured": Graph(
        lambda dropout: copy.deepcopy(_captured(dropout)), _draw_captured, _logits_loss, ("input_ids",), ("logits",)
    )
}
"""Captured models whose layers are split into parts, for a few tests."""
