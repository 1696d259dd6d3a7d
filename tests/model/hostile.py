"""Models whose Python does what no graph can: custom backwards, Python's random numbers, state, changing attributes.

Their kinds are those of public bug reports (pytorch#193279, pytorch#95425, transformers#30113, WhisperSpeech#44 and
others); each model is ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


reverse = Reverse.apply


class Quantise(torch.autograd.Function):
    """Nearest code with the gradient of the input, as in a VQ layer. Its setup_context is separate from its forward."""

    @staticmethod
    def forward(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x, codes).argmin(-1)
        return codes[nearest], nearest

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        codes, nearest = ctx.saved_tensors
        return gradients[0], torch.zeros_like(codes).index_add(0, nearest, 0.1 * gradients[0])


class Binary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


class Base(nn.Module):
    """Blocks and two heads."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        self.head, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return self.head(x) + self.other(x)


class Reversal(Base):
    """Domain adaptation: a gradient reversal in the model's own forward, through a name that was bound before."""

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return {"label": self.head(x), "domain": self.other(reverse(x, 5.0))}


class VectorQuantised(Base):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Any:
        x, _ = Quantise.apply(self.body(x), self.codes)
        return self.head(x) + self.other(x)


class Hook(Base):
    """Two hooks of one tensor, and one of an output."""

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)
            x.register_hook(lambda gradient: gradient + 0.5)
        output = self.head(x)
        if output.requires_grad:
            output.register_hook(self.scaled)
        return output, self.other(x)

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * 3


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any], scale: float) -> dict[str, Any]:
        x = Binary.apply(self.linear(state["x"])) * scale
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return {"x": x + state["x"], "depth": state["depth"] + 1}


class DictBlocks(Base):
    def block(self) -> nn.Module:
        return DictBlock()

    def body(self, x: Tensor) -> Tensor:
        state = {"x": x, "depth": 0}
        for block in self.blocks:
            state = block(state, 0.5)
        return state["x"] / state["depth"]


class BackwardHook(DictBlocks):
    """A backward hook of a block that is no plain module of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 7, inputs[1]))

    def block(self) -> nn.Module:
        return Pair()

    def body(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + F.relu(self.linear(y + x)), y + x


class LayerDrop(Base):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 0.5:
                continue
            x = x + F.relu(block(x))
        return x


class RareLayerDrop(Base):
    """LayerDrop so rare that two captures with other seeds almost always agree."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and random.random() < 0.001):
                x = x + F.relu(block(x))
        return x


class NumpyLayerDrop(Base):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and np.random.uniform() < 0.5):  # noqa: NPY002
                x = x + F.dropout(F.relu(block(x)), 0.2, self.training)
        return x


class DroppingBlock(nn.Module):
    """Stochastic depth within a block that is called as a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + F.dropout(self.linear(x), 0.1, self.training) * random.uniform(0.5, 1.5)


class DroppingBlocks(Base):
    def block(self) -> nn.Module:
        return DroppingBlock()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DroppingSequential(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(DroppingBlock() for _ in range(4)), nn.Linear(WIDTH, 3))


class Encoder(nn.Module):
    """Module that draws in its own forward; it takes and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        states = []
        for block in random.sample(list(self.blocks), 3):
            x = F.relu(block(x)) * np.random.randint(1, 3)  # noqa: NPY002
            states.append(x)
        return {"last": x, "states": states}


class Roll(Base):
    """A draw that is an argument of an operator, not a branch."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(torch.roll(x, random.randint(0, WIDTH - 1), 1)) * random.uniform(0.5, 2)


class DrawingEncoder(Base):
    """Model of which only a part draws: the others become layers as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def body(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x, mask=None)
        return super().body(encoded["last"] + sum(encoded["states"]))


class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.draws = [random.Random(4)]

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * float(self.rng.uniform()) + self.draws[0].random())


class TorchGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + torch.randn(WIDTH, generator=self.noise))


class Branches(Base):
    """Both sides of a branch on values."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = x + (y if y.sum() > 0 else 2 * y)
        return x


class Seeds(Base):
    """The same noise in every forward, by a seed of its own (pytorch#107187)."""

    def body(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(42)
            noise = torch.randn_like(x)
        return super().body(x + noise)


class ReadsNumber(Base):
    """A scale that is a Python number."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * x.abs().max().item())


class Filling(Base):
    """Blocks that must stay Python and keep their outputs in their caller's list (pytorch#147213)."""

    def block(self) -> nn.Module:
        return FillingBlock()

    def body(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for block in self.blocks:
            x = block(x, outputs)
        return x + sum(outputs)


class FillingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        y = self.linear(x)
        outputs.append(x + F.relu(y) if x.sum() > 0 else x - y)
        return outputs[-1]


class FirstScale(Base):
    """Scales by the first batch for ever, as normalising flows do (glow-pytorch#2)."""

    scale: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0)
        return super().body(x / self.scale)


class Counter(Base):
    """A warm-up by the module's own counter."""

    steps = 0

    def body(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().body(x) * min(1.0, self.steps / 1000)


class LateCounter(Base):
    """A counter that changes something after many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"steps": 0}

    def body(self, x: Tensor) -> Tensor:
        self.state["steps"] += 1
        x = super().body(x)
        return x if self.state["steps"] < 500 else x.detach()


class HarmlessCounter(Base):
    """Counts for a log; nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.widths = 0, [0]

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.widths[0] = x.shape[-1]
        return super().body(x)


class Reassigned(Base):
    """A buffer that becomes another tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.ema = 0.9 * self.ema + 0.1 * x.mean(0).detach()
        return x - self.ema


class Previous(Base):
    """The last batch's result, in a plain attribute that is None at first."""

    previous: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        if self.previous is not None:
            x = x + 0.5 * self.previous
        self.previous = x.detach()
        return x


class Momentum(Base):
    """A state in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(WIDTH)]

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.states[0] = self.states[0] * 0.5 + x.detach().mean(0)
        return x * self.states[0]


class Cached(Base):
    """A table that is computed once: no state."""

    table: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).sin()
        return super().body(x + self.table)


class Keeping(Base):
    """Blocks that keep their outputs, for a loss of all of them in the model's own forward."""

    def block(self) -> nn.Module:
        return KeepingBlock()

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        aux = sum(block.aux for block in self.blocks)
        return {"loss": self.head(x).square().mean() + aux, "logits": self.head(x)}


class KeepingBlock(nn.Module):
    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.maps = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.square().mean()
        self.maps = [y.detach()]
        return x + F.relu(y)


class Alpha(Base):
    """A coefficient that the loop anneals."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.settings = {"beta": 0.5}

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.alpha * F.relu(block(x)) + self.settings["beta"]
        return x


RIGHT: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Reversal, VectorQuantised, Hook, DictBlocks, BackwardHook, LayerDrop, RareLayerDrop, NumpyLayerDrop),
        *(DroppingBlocks, DroppingSequential, Roll, DrawingEncoder, OwnGenerator, TorchGenerator, Branches),
        *(HarmlessCounter, Cached, Keeping, Seeds, ReadsNumber, Filling),
    )
}
"""Models that train as themselves."""
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Counter": (Counter, "'steps'"),
    "LateCounter": (LateCounter, "steps"),
    "Reassigned": (Reassigned, "'ema'"),
    "Previous": (Previous, "'previous'"),
    "Momentum": (Momentum, "states"),
}
"""Models with a state, and the name that the refusal gives."""
