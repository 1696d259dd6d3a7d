"""A backward in two halves gives the bits of a whole one, however the module uses its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from varuna_capslog.engine.halves import input_half


class Twice(nn.Module):
    """Module with a weight at two depths and in a branch beside, and a scale that only paths to parameters read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight * self.scale
        return self.inner(torch.tanh(self.inner(x))) + x @ weight + self.inner(x).sigmoid()


class SharedBeside(nn.Module):
    """A parameter used three times side by side, whose gradients are added in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(2, dim=1)
        return torch.cat([part @ self.weight[:2].exp() + self.bias for part in parts], dim=1)


class Heads(nn.Module):
    """Outputs that depend on the input, on parameters alone, and on neither's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mix = nn.Parameter(torch.rand(5, 6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.mix(self.query + x[:5]), self.mix(self.query), x.detach() * 2, x


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten()
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


class Cast(nn.Module):
    """Autocast reads one cast of each weight at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(self.inner(x)).float()


class Checkpointed(nn.Module):
    """A module that computes again inside its own backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return result


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 6)),
    "twice": Twice,
    "shared beside": SharedBeside,
    "heads": Heads,
    "convolution": conv,
    "attention": Attention,
    "cast": Cast,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "checkpointed": lambda: nn.Sequential(nn.Linear(6, 6), Checkpointed(False), nn.Linear(6, 6)),
    "checkpointed, reentrant": lambda: nn.Sequential(nn.Linear(6, 6), Checkpointed(True), nn.Linear(6, 6)),
    "frozen": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6)),
    "no parameters": lambda: nn.Sequential(nn.Tanh(), nn.Flatten()),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.GRU(2, 2, batch_first=True), Second(), nn.Flatten()),
}


class Second(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def _outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    result = module(x)
    return [output for output in ([result] if isinstance(result, Tensor) else result) if output.requires_grad]


@pytest.mark.parametrize("reads_gradient", [True, False], ids=["inside", "first layer"])
@pytest.mark.parametrize("name", MODULES)
def test_two_halves_are_a_whole_backward(name: str, reads_gradient: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    halves = copy.deepcopy(module)
    for microbatch in range(3):  # gradients of microbatches add up in one order
        torch.manual_seed(microbatch)
        x = torch.randn(7, 6)
        leaves = [x.clone().requires_grad_(reads_gradient) for _ in range(2)]
        expected, outputs = _outputs(module, leaves[0]), _outputs(halves, leaves[1])
        seeds = [torch.randn_like(output) for output in expected]
        if expected:
            torch.autograd.backward(expected, seeds)
        before = {key: None if p.grad is None else p.grad.clone() for key, p in halves.named_parameters()}
        edges = [(get_gradient_edge(output), seed) for output, seed in zip(outputs, seeds, strict=True)]
        del outputs
        gradients, parameter_half = input_half(edges, {"x": leaves[1]} if reads_gradient else {})
        if "reentrant" not in name:
            assert all(_equal(before[key], p.grad) for key, p in halves.named_parameters()), "it is of inputs"
        assert _equal(gradients.get("x"), leaves[0].grad)
        parameter_half.run()
        for (key, ours), theirs in zip(halves.named_parameters(), module.parameters(), strict=True):
            assert _equal(ours.grad, theirs.grad), key


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def test_the_first_half_does_not_compute_what_parameters_need() -> None:
    """The matrix products are counted: one for each half of each Linear."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    edge = get_gradient_edge(module(x))

    def products(work: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            work()
        return sum(event.count for event in seen.key_averages() if event.key == "aten::mm")

    kept = []
    assert products(lambda: kept.append(input_half([(edge, torch.ones(4, 8))], {"x": x})[1])) == 3
    assert products(kept[0].run) == 3
    assert [len(group) for group in (kept[0].groups, kept[0].noted, kept[0].outputs)] == [0, 0, 0]
