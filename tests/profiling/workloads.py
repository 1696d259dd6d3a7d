"""Workloads whose layers hold megabytes, so that allocation granularity becomes negligible."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Workload

WIDTH, TOKENS = 192, 96


class Feed(nn.Module):
    """Wide feed-forward layer that saves much transient memory; two instances differ only in width."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attend(nn.Module):
    """Attention that reads a mask that crosses the cuts and carries no gradient; saves squares of the token count."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(mask[:, None], -6e4)
        return self.norm(x + self.dropout(scores.softmax(-1)) @ value)


class Head(nn.Module):
    """Head that uses the first layer's embedding again (tied)."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.T


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[tokens], tokens == 0


class Frozen(Feed):
    def __init__(self) -> None:
        super().__init__(2)
        self.requires_grad_(False)


class Megabytes(Workload):
    """Seven layers: tied, frozen, attention, feed-forward; every cut is crossed by activations and a mask."""

    name = "megabytes"

    def build_chain(self) -> Chain:
        embed = Embed()
        layers = [
            Layer("embed", embed, ("tokens",), ("x", "mask")),
            Layer("frozen", Frozen()),
            Layer("attend.0", Attend(), ("x", "mask"), ("x",)),
            Layer("feed.0", Feed(4)),
            Layer("feed.1", Feed(8)),
            Layer("attend.1", Attend(), ("x", "mask"), ("x",)),
            Layer("head", Head(embed.table)),
        ]
        return Chain(layers, ("tokens",), ("x",), self.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        loss = F.cross_entropy(outputs["x"].flatten(0, 1), targets.flatten(), reduction="sum") / normalisers["tokens"]
        return {"loss": loss}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"tokens": TensorSpec((microbatch_size, TOKENS), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return torch.ones(microbatch_size, TOKENS, dtype=torch.int64), {"tokens": 1.0}


class Watching(nn.Linear):
    """Linear layer that records the most parameter bytes that were real while it ran."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        # not isinstance: checking half a million objects would take seconds
        real = {p.data_ptr(): p.nbytes for p in gc.get_objects() if type(p) is nn.Parameter and not p.is_meta}
        Watching.seen = max(Watching.seen, sum(real.values()))
        return super().forward(x)


class Equal(Workload):
    """`length` equal layers of `width` squared weights."""

    name = "equal"
    kind: type[nn.Linear] = nn.Linear

    def __init__(self, length: int = 4, width: int = 128, wide_output: int = 0) -> None:
        self.length, self.width, self.wide_output = length, width, wide_output

    def build_chain(self) -> Chain:
        return Chain([Layer(f"layer.{index}", self.kind(self.width, self.width)) for index in range(self.length)])

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        scratch = torch.zeros(self.wide_output)
        return {"loss": outputs["x"].square().mean() + scratch.sum()}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, self.width))}


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class TwoTowers(Equal):
    """Two towers of two equal layers each, and their sum."""

    name = "two towers"

    def build_chain(self) -> Chain:
        layer = lambda name, *names: Layer(name, nn.Linear(self.width, self.width), *((read,) for read in names))  # noqa: E731
        towers = [layer(f"{tower}{n}", tower, tower) for tower in "ab" for n in range(2)]
        return Chain([*towers, Layer("sum", Add(), ("a", "b"), ("x",))], ("a", "b"), ("x",), self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return dict.fromkeys("ab", TensorSpec((microbatch_size, self.width)))


class Crossed(Megabytes):
    """Two towers, one with an embedding and one with attention, a layer that reads both, and two that read a tower
    again.
    """

    name = "crossed"

    def build_chain(self) -> Chain:
        embed = Embed()
        layers = [
            Layer("embed", embed, ("tokens",), ("x", "mask")),
            Layer("feed.0", Feed(4)),
            Layer("side.0", Feed(8), ("y",), ("y",)),
            Layer("side.1", nn.Linear(WIDTH, WIDTH), ("y",), ("y",)),
            Layer("attend", Attend(), ("x", "mask"), ("x",)),
            Layer("join", Add(), ("x", "y"), ("z",)),
            Layer("again.0", Add(), ("z", "y"), ("z",)),
            Layer("feed.1", Feed(2), ("z",), ("z",)),
            Layer("again.1", Add(), ("z", "x"), ("x",)),
            Layer("head", Head(embed.table)),
        ]
        return Chain(layers, ("tokens", "y"), ("x",), self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        more = TensorSpec((microbatch_size, TOKENS, WIDTH))
        return {**super().profile_inputs(microbatch_size), "y": more}


class Watched(Equal):
    name = "watched"
    kind = Watching


class Dies(nn.Module):
    """Layer that works while shapes are traced and kills its process when it runs for real."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Deadly(Equal):
    name = "deadly"

    def build_chain(self) -> Chain:
        layers = [Layer(f"layer.{index}", self.kind(self.width, self.width)) for index in range(3)]
        return Chain([*layers, Layer("deadly", Dies())])


class Unlucky(Equal):
    """Its loss fails on any input."""

    name = "unlucky"

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        raise RuntimeError("no loss today")


class EndsNeighbour(nn.Module):
    """Layer that kills the process that plays the stages around its run, as the system does when memory runs out."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            for process in multiprocessing.active_children():
                process.kill()
        return x


class Abandoned(Equal):
    """The middle layer loses the neighbours of its run."""

    name = "abandoned"

    def build_chain(self) -> Chain:
        layers = [Layer(f"layer.{index}", self.kind(self.width, self.width)) for index in range(2)]
        return Chain([layers[0], Layer("lonely", EndsNeighbour()), layers[1]])
