"""Models that were refused wrongly, or with torch's traceback: kinds of public bug reports; each model is ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator

WIDTH = 8
BATCH = 4


def x(seed: int = 0, *size: int) -> Tensor:
    return torch.randn(*(size or (BATCH, WIDTH)), generator=torch.Generator().manual_seed(seed))


class Blocks(nn.Module):
    """A list of blocks and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Box:
    """Container registered with torch's pytrees without names of its parts."""

    def __init__(self, logits: Any, hidden: Any) -> None:
        self.logits, self.hidden = logits, hidden


pytree.register_pytree_node(Box, lambda box: ([box.logits, box.hidden], None), lambda parts, _: Box(*parts))


class Boxed(Blocks):
    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return Box(self.head(hidden), {"last": hidden})


@dataclass
class Result:
    """A plain dataclass, which torch does not know."""

    logits: Tensor
    hidden: Tensor


class Plain(Blocks):
    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return Result(self.head(hidden), hidden)


class NormBlock(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Siamese(nn.Module):
    """An encoder with batch norm, called twice, and a predictor with its own batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(NormBlock() for _ in range(3)))
        self.predictor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        first, second = self.encoder(u), self.encoder(v)
        return -F.cosine_similarity(self.predictor(first), second.detach()).mean()


class Looped(Blocks):
    """A block with batch norm that runs three times, between others."""

    def block(self) -> nn.Module:
        return NormBlock()

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(3):
            x = self.blocks[1](x)
        return self.blocks[3](self.blocks[2](x))


class CumulativeAverage(Blocks):
    def block(self) -> nn.Module:
        return NormBlock(None)


class Fourier(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Parameter(torch.randn(5, dtype=torch.complex64)) for _ in range(4)]
        self.weights, self.blocks = nn.ParameterList(parts), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight, block in zip(self.weights, self.blocks, strict=True):
            x = block(torch.fft.irfft(torch.fft.rfft(x) * weight, n=WIDTH))
        return x


class Nested(Blocks):
    """A batch that is a dict, or holds lists."""

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.head(self.body(batch["image"] + batch["Extra"][0] * batch["Extra"][1]["scale"]))


class HalfBlocks(Blocks):
    """Blocks in bfloat16 between norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def block(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def body(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x).to(torch.bfloat16)).float().relu()
        return x


class AutocastBlocks(Blocks):
    """Autocast around each block."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.autocast("cpu", torch.bfloat16):
                x = block(x).relu()
        return x.float()


class AutocastAll(Blocks):
    """Autocast around all blocks."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.head(self.body(x))
        return x.float()


class OldWeightNorm(Blocks):
    def block(self) -> nn.Module:
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Blocks):
    def block(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Packed(nn.Module):
    """Packed sequences shorter than their tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (x, _) = self.rnn(packed)
        x = x[-1]
        for block in self.blocks:
            x = x + block(x).relu()
        return x


class PackedInside(nn.Module):
    """The same in a submodule: the others become layers as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.blocks = Packed(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.reader(ids, lengths)
        for block in self.blocks:
            x = x + block(x).relu()
        return x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, WIDTH, sparse=True, mode="sum")
        self.embed = nn.Embedding(11, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mean(1) + self.bag(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return x


class Forces(nn.Module):
    """The gradient of an energy is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            positions = positions.requires_grad_()
            x = positions
            for block in self.blocks:
                x = x + block(x).tanh()
            energy = x.square().sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return {"energy": energy, "forces": -forces}


class ForcesInside(Blocks):
    """The same in a module between others."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Forces()

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        return x + self.energy(x)["forces"]


class Case(NamedTuple):
    """model, example; layers: least number of them, if it can be cut."""

    model: Callable[[], nn.Module]
    example: Callable[[], Any]
    layers: int


def nested() -> Any:
    return ({"image": x(1), "Extra": [x(2), {"scale": x(3)}]},)


def words() -> Any:
    ids = torch.randint(0, 11, (BATCH, 6), generator=torch.Generator().manual_seed(1))
    return (ids, torch.tensor([6, 3, 4, 1]))


CASES: dict[str, Case] = {
    "output class without names": Case(Boxed, lambda: (x(),), 5),
    "batch norm called twice": Case(Siamese, lambda: (x(1), x(2)), 1),
    "looped batch norm": Case(Looped, lambda: (x(),), 3),
    "batch norm of momentum None": Case(CumulativeAverage, lambda: (x(),), 5),
    "complex parameters": Case(Fourier, lambda: (x(),), 4),
    "nested batch": Case(Nested, nested, 5),
    "bfloat16 blocks": Case(HalfBlocks, lambda: (x(),), 5),
    "autocast around each block": Case(AutocastBlocks, lambda: (x(),), 5),
    "autocast around all": Case(AutocastAll, lambda: (x(),), 4),
    "old weight_norm": Case(OldWeightNorm, lambda: (x(),), 5),
    "packed sequences": Case(Packed, words, 1),
    "packed sequences in a module": Case(PackedInside, words, 4),
    "sparse embeddings": Case(Sparse, lambda: words()[:1], 4),
    "forces": Case(Forces, lambda: (x(),), 1),
    "forces in a module": Case(ForcesInside, lambda: (x(),), 5),
}


def loss(outputs: Mapping[str, Tensor], targets: Any = None, normalisers: Mapping[str, float] | None = None) -> Any:
    share = (normalisers or {"microbatches": 1.0})["microbatches"]
    return {"loss": torch.stack([output.square().mean() for output in outputs.values()]).sum() / share}


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
        return case.model()


def tensors_of(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def examples(case: Case) -> list[Any]:
    """Return three microbatches with other numbers; integers stay."""
    return [
        pytree.tree_map(lambda leaf: leaf * scale if leaf.is_floating_point() else leaf, case.example())  # noqa: B023
        for scale in (1.0, 0.5, 2.0)
    ]


def plain_step(model: nn.Module, batches: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the model itself."""
    total = 0.0
    for batch in batches:
        outputs = {str(number): output for number, output in enumerate(tensors_of(model(*batch)))}
        part = loss(outputs, None, {"microbatches": float(len(batches))})["loss"]
        part.backward()
        total += part.item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return total, {
        name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in gradients.items()
    }


def engine_step(
    chain: Chain, batches: list[Any], recompute: bool
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, gradients and buffers of one step on one rank, by the model's own names."""
    inputs = [dict(zip(chain.inputs, tensors_of(batch), strict=True)) for batch in batches]
    specs = [{name: TensorSpec.of(tensor) for name, tensor in sample.items()} for sample in inputs]
    count = len(batches)
    minibatch = Minibatch(specs, [None] * count, {"microbatches": float(count)}, [[number] for number in range(count)])
    options = EngineOptions(count, seed=5, clip_norm=0.0, recompute=recompute)
    layout, communicator = Layout.pipelines((0,), len(chain)), SilentCommunicator(0, 1, False)
    engine = PipelineEngine(chain, loss, layout, options, communicator, torch.device("cpu"))
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for layer in engine.layers:
            gradients.update(
                {
                    name: parameter.grad.clone()
                    for name, parameter in layer.parameters.items()
                    if parameter.grad is not None
                }
            )

    verdict = train_step(engine, 1, minibatch, inputs.__getitem__, before_commit=keep)
    return verdict.parts["loss"], gradients, {k: v for layer in engine.layers for k, v in layer.buffers.items()}


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rtol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=rtol, atol=rtol, msg=name)
