"""Small models whose Python no graph can express; kinds of public bug reports, each model written here.

Every model takes `x` [rows, WIDTH]. `between` is the code of its user's loop before a step, from the second step on.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.model.hostile import Quantise, Reverse

__all__ = ["MODELS", "WIDTH", "Hostile"]

WIDTH = 16


class Block(nn.Module):
    """An ordinary block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Hostile(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def block(self) -> nn.Module:
        return Block()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))

    def between(self, step: int) -> None:
        """Apply the user's changes before step `step`, counted from 0."""


# -- custom backwards --------------------------------------------------------------------------------------------------


class GradientReversal(Hostile):
    """Domain adaptation: features maximize the second loss. An export traces the Function's forward, the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return {"label": self.head(x), "domain": self.domain(Reverse.apply(x, 3.0))}


class VectorQuantised(Hostile):
    """VQ by a Function of two outputs: the encoder's gradient is the decoder's. Traced, the encoder gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, x: Tensor) -> Any:
        z = self.blocks[1](self.blocks[0](x))
        q, _ = Quantise.apply(z, self.codes)
        commitment = (z - q.detach()).square().mean() + (q - z.detach()).square().mean()
        return self.head(self.blocks[3](self.blocks[2](q))), commitment


class DetachedCodes(Hostile):
    """The straight-through estimator by `detach`, as most VQ code has it: simplified, z + (q - z) is q."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(7, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        z = self.blocks[1](self.blocks[0](x))
        q = self.codes[torch.cdist(z, self.codes).argmin(-1)]
        return self.blocks[3](self.blocks[2](z + (q - z).detach()))


class LocalFunction(Hostile):
    """A Function whose class is created in the forward, so that it is unknown before."""

    def body(self, x: Tensor) -> Tensor:
        class Clip(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                return gradients[0].clamp(-1e-3, 1e-3)

        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](Clip.apply(x)))


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Block(), 0.1

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.inner(features["x"])
        if x.requires_grad:
            x.register_hook(self.damp)
        return {"x": x, "sum": features["sum"] + x}

    def damp(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale


class HookedDicts(Hostile):
    """Blocks that pass dicts damp the gradient by a tensor hook, which no graph has."""

    def block(self) -> nn.Module:
        return DictBlock()

    def body(self, x: Tensor) -> Tensor:
        features = {"x": x, "sum": torch.zeros_like(x)}
        for block in self.blocks:
            features = block(features)
        return features["x"] + features["sum"]


class NodeHook(Hostile):
    """A hook of a node of the graph (`grad_fn.register_prehook`), which no call of a torch function shows."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 0.25,))
        return self.blocks[3](self.blocks[2](x))


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(), Block()

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = streams
        first = first + self.f(second)
        return first, second + self.g(first)


class BackwardHook(Hostile):
    """A full backward hook changes the gradients of a block that takes and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].g.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.blocks[2].f.up.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))

    def block(self) -> nn.Module:
        return TwoStreams()

    def body(self, x: Tensor) -> Tensor:
        streams = x, x
        for block in self.blocks:
            streams = block(streams)
        return streams[0] - streams[1]


class TiedHook(Hostile):
    """A hook of a parameter that two layers share freezes some of its rows; a copy of the parameter has no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        mask = torch.ones(WIDTH, 1)
        mask[:4] = 0
        self.embedding.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embedding(x)))


# -- random numbers ----------------------------------------------------------------------------------------------------


class LayerDrop(Hostile):
    """LayerDrop by `random`: a block dropped in the capture would never train."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and random.random() < 0.4):
                x = block(x)
        return x


class NumpyLayerDrop(Hostile):
    """LayerDrop by numpy, with torch's dropout between."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and np.random.uniform(0, 1) < 0.4:  # noqa: NPY002
                continue
            x = F.dropout(block(x), 0.1, self.training)
        return x


class TorchLayerDrop(Hostile):
    """LayerDrop as in wav2vec 2.0: a branch on a number drawn by torch."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and torch.rand([]) < 0.4):
                x = block(x)
        return x


class DepthBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.empty(x.shape[0], 1).bernoulli_(0.7) if self.training else torch.ones(1)
        return x + (super().forward(x) - x) * keep / 0.7


class StochasticDepth(Hostile):
    """Stochastic depth of each row by torch: the same numbers on every rank and in recomputation."""

    def block(self) -> nn.Module:
        return DepthBlock()


# -- changes between steps ---------------------------------------------------------------------------------------------


class Annealed(Hostile):
    """A coefficient that the loop anneals: the graph has its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.alpha * block(x)
        return x

    def between(self, step: int) -> None:
        self.alpha = 1.0 / (step + 1)


class Settings:
    """A schedule that the loop advances; it has no `__dict__`."""

    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 1.0


class SlottedSchedule(Annealed):
    """The coefficient is kept on an object with `__slots__`."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Settings()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.schedule.alpha * block(x)
        return x

    def between(self, step: int) -> None:
        self.schedule.alpha = 1.0 / (step + 1)


class ClassAttribute(Annealed):
    """The coefficient is an attribute of the class, as `Model.temperature = ...` sets it."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        type(self).temperature = 1.0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) / self.temperature
        return x

    def between(self, step: int) -> None:
        type(self).temperature = 1.0 + step


class ClosedOver(Annealed):
    """The coefficient is in a dict that is closed over by a function of the model."""

    def __init__(self) -> None:
        super().__init__()
        shared = {"alpha": 1.0}
        self.read, self.write = (lambda: shared["alpha"]), shared.update

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.read() * block(x)
        return x

    def between(self, step: int) -> None:
        self.write(alpha=1.0 / (step + 1))


class TensorAttribute(Annealed):
    """The coefficient is a plain tensor, not a buffer, that the loop fills."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = torch.ones(())

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.strength * block(x)
        return x

    def between(self, step: int) -> None:
        self.strength.fill_(1.0 / (step + 1))


class ReplacedHead(Hostile):
    """The loop replaces the head after the first step."""

    def between(self, step: int) -> None:
        if step == 1:
            self.head = nn.Linear(WIDTH, 5).requires_grad_()
            with torch.no_grad():
                self.head.weight.copy_(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH))
                self.head.bias.zero_()


class TiedLater(Hostile):
    """The loop ties two blocks' weights after the first step."""

    def between(self, step: int) -> None:
        if step == 1:
            self.blocks[3].up.weight = self.blocks[0].up.weight


class DroppingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, rate: float) -> Tensor:  # type: ignore[override]
        return self.drop(super().forward(x)) + F.dropout(x, rate, self.training)


class ScheduledDropout(Hostile):
    """The loop changes dropout rates: those of modules, and one that the forward passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def block(self) -> nn.Module:
        return DroppingBlock()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rate)
        return x

    def between(self, step: int) -> None:
        self.rate = 0.5 / (step + 1)
        for block in self.blocks:
            block.drop.p = self.rate


# -- state -------------------------------------------------------------------------------------------------------------


class MovingAverage(Hostile):
    """A buffer that is replaced by a new tensor in each forward, and is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x - self.ema


class EveryThird(Hostile):
    """Every third call takes another branch, by a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().body(x)
        return x * 2 if self.calls % 3 == 0 else x


class Turns(Hostile):
    """Every third call takes another branch, by an iterator, whose position no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = iter([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 2.0] * 1000)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * next(self.turns)


@functools.cache
def _table(module: nn.Module, rows: int) -> Tensor:
    return torch.arange(WIDTH, dtype=torch.float32).sin() / rows


class CachedTable(Hostile):
    """A table in a cache keyed by the module: an export leaves fake tensors in it."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + _table(self, x.shape[0]))


# -- modes, and autograd in the forward --------------------------------------------------------------------------------


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class FrozenNorms(Hostile):
    """Batch norms in eval mode, some by an overridden `train`, one by its user; each has its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.norm.running_mean.fill_(0.1 * number)
            block.norm.running_var.fill_(2.0)
        self.blocks[3].norm.eval()

    def block(self) -> nn.Module:
        return NormBlock()

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for block in (self.blocks[0], self.blocks[1], self.blocks[3]):
            block.norm.eval()
        return self


class DroppedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class Checkpointed(Hostile):
    """Blocks with dropout under torch's checkpointing, one reentrant, which runs its block without gradients."""

    def block(self) -> nn.Module:
        return DroppedBlock()

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number == 2) if self.training else block(x)
        return x


class Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-3) / 10


class Parametrised(Hostile):
    """A user-defined parametrization, computed once for two uses (`parametrize.cached`)."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrize.register_parametrization(block.up, "weight", Centred())

    def body(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().body(super().body(x))


class GradientPenalty(Hostile):
    """Computes gradients in its forward, and differentiates its penalty again in the backward."""

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            score = self.head(at).square().sum()
            (slope,) = torch.autograd.grad(score, at, create_graph=True)
        return self.head(x), slope.square().mean()


class InPlaceViews(Hostile):
    """Writes into views of tensors that cross the cut."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x[:, number : number + 4].mul_(0.5)
            x.view(-1, 4, WIDTH // 4).select(1, number).add_(1.0)
        return x


class Teacher(Hostile):
    """Computes its own targets in training mode under `no_grad`; its result in eval mode has another shape."""

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.body(x))
        if not self.training:
            return logits
        with torch.no_grad():
            target = self.head(self.body(x.flip(1))).softmax(-1)
        return -(target * logits.log_softmax(-1)).sum(-1).mean()


class TopHook(Hostile):
    """A forward hook of the model itself changes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 3)


MODELS: dict[str, Callable[[], Hostile]] = {
    kind.__name__: kind
    for kind in (
        *(GradientReversal, VectorQuantised, DetachedCodes, LocalFunction, HookedDicts, NodeHook, BackwardHook),
        *(TiedHook, LayerDrop, NumpyLayerDrop, TorchLayerDrop, StochasticDepth, Annealed, SlottedSchedule),
        *(ClassAttribute, ClosedOver, TensorAttribute, ReplacedHead, TiedLater, ScheduledDropout, MovingAverage),
        *(EveryThird, Turns, CachedTable, FrozenNorms, Checkpointed, Parametrised, GradientPenalty, InPlaceViews),
        *(Teacher, TopHook),
    )
}
