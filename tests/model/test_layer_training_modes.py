"""A BatchNorm that its user froze stays frozen, wherever the model trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.test_capture import tiny_gpt2, tokens
from varuna_capslog.engine.layers import take_layers
from varuna_capslog.fitting.module import fit
from varuna_capslog.fitting.search import SegmentedChain
from varuna_capslog.model.capture import Kept
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.layer import put_in_training
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.variants.registry import apply_variants

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Backbone(Net):
    """Freezes its first block in its own `train`, as detectors do."""

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.blocks[0].eval()
        return self


class Functional(Net):
    """The model's own code calls the norm of one block, which a capture cuts open."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.dropout(block.norm(block.linear(x)), 0.5, block.training)
        return self.head(x)


def by_user() -> tuple[nn.Module, list[str]]:
    model = Net()
    model.get_submodule("blocks.1.norm").eval()
    return model, ["blocks.1.norm"]


def by_its_own_train() -> tuple[nn.Module, list[str]]:
    return Backbone(), ["blocks.0.norm"]


def by_its_own_train_after_an_evaluation() -> tuple[nn.Module, list[str]]:
    return Backbone().eval(), ["blocks.0.norm"]


def in_open_code() -> tuple[nn.Module, list[str]]:
    model = Functional()
    model.get_submodule("blocks.2").eval()
    return model, ["blocks.2.norm"]


def in_a_sequential() -> tuple[nn.Module, list[str]]:
    model = nn.Sequential(*Net().blocks, nn.Linear(8, 2))
    model[1].norm.eval()
    return model, ["1.norm"]


def a_whole_model_that_was_evaluated() -> tuple[nn.Module, list[str]]:
    return Net().eval(), []


CASES = [
    by_user,
    by_its_own_train,
    by_its_own_train_after_an_evaluation,
    in_open_code,
    in_a_sequential,
    a_whole_model_that_was_evaluated,
]


def same_gradients(plain: nn.Module, model: nn.Module) -> bool:
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all(torch.equal(expected.grad, parameter.grad) for expected, parameter in pairs)


def norms_in_eval(layers: Any) -> list[str]:
    return [
        name for layer in layers for name, part in layer.named_modules() if name.endswith("norm") and not part.training
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_stays_frozen_in_every_door(case: Any, tmp_path: Any) -> None:
    """The engine, the trace of shapes, and a capture kept for other processes put every module into training mode:
    frozen statistics changed, and so did every loss that depends on them.
    """
    model, frozen = case()
    modes = [part.training for part in model.modules()]
    kept = Kept(tmp_path)
    kept.writes = True
    first = Chain.from_module(model, None, (X,), kept=kept, evaluates=False)
    assert [part.training for part in model.modules()] == modes
    for chain in (first, Chain.from_module(model, None, (X,), kept=kept, evaluates=False)):
        assert norms_in_eval(layer.module for layer in ShapeTable(chain)._layers) == frozen
        chain = copy.deepcopy(chain)
        layers = take_layers(chain, range(len(chain)), torch.device("cpu"))
        for _ in range(2):  # also after an evaluation
            assert norms_in_eval(layer.layer.module for layer in layers) == frozen
            for layer in layers:
                layer.layer.module.eval()
                layer.reset()


def test_a_layer_of_ones_own_that_is_frozen() -> None:
    layers = [Layer("first", nn.Linear(8, 8)), Layer("norm", nn.BatchNorm1d(8).eval())]
    chain = Chain(layers)
    assert norms_in_eval([nn.ModuleDict({"norm": ShapeTable(chain)._layers[1].module})]) == ["norm"]
    taken = take_layers(chain, [0, 1], torch.device("cpu"))
    assert [layer.layer.module.training for layer in taken] == [True, False]
    for layer in taken:
        layer.layer.module.eval()
        layer.reset()
    assert [layer.layer.module.training for layer in taken] == [True, False]
    for layer in layers:
        layer.module.eval()  # the full model was evaluated
    put_in_training(layer.module for layer in layers)
    assert all(layer.module.training for layer in layers)


def test_a_module_that_is_frozen_between_capture_and_training_is_frozen() -> None:
    model = Net()
    chain = Chain.from_module(model, None, (X,), evaluates=False)
    model.blocks[2].norm.eval()
    layers = take_layers(chain, range(len(chain)), torch.device("cpu"))
    assert norms_in_eval(layer.layer.module for layer in layers) == ["blocks.2.norm"]


def test_frozen_statistics_do_not_change_and_gradients_are_the_modules_own() -> None:
    for case in CASES[:-1]:
        model, frozen = case()
        plain = copy.deepcopy(model)
        if isinstance(plain, Backbone):
            plain.train()
        chain = Chain.from_module(model, None, (X,), evaluates=False)
        layers = take_layers(chain, range(len(chain)), torch.device("cpu"))
        torch.manual_seed(0)
        plain(X).square().sum().backward()
        torch.manual_seed(0)
        next(iter(chain.run({chain.inputs[0]: X}).values())).square().sum().backward()
        for name in frozen:
            assert model.get_submodule(name).num_batches_tracked == 0
        assert same_gradients(plain, model), case
        assert len(layers) == len(chain)


def test_fit_trains_in_the_modes_of_the_loop() -> None:
    """`fit` of a model in eval mode refused its first step, and `train()` of the fitted module bypassed the model's
    own `train`, so that modules frozen by it trained.
    """
    model = Backbone().eval()
    plain = copy.deepcopy(model)
    fitted = fit(model, X, "1GB")
    assert fitted.fits[0].peak_bytes == fit(copy.deepcopy(model).train(), X, "1GB").fits[0].peak_bytes
    for module in (plain, fitted):
        module.train()
        module(X).square().sum().backward()
    assert norms_in_eval([model]) == ["blocks.0.norm"]
    assert model.blocks[0].norm.num_batches_tracked == 0
    assert same_gradients(plain, model)
    chain = Chain.from_module(model, None, (X,), evaluates=False)
    recomputed = SegmentedChain(chain, [MemoryInterval(0, len(chain), "recompute")], len(chain))
    model.zero_grad()
    next(iter(recomputed.run({"x": X}).values())).square().sum().backward()
    assert same_gradients(plain, model)


@pytest.mark.parametrize("frozen", [True, False])
def test_splits_and_variants_keep_what_is_frozen(frozen: bool) -> None:
    """Modules that they add to a layer are not the user's, whatever their mode."""
    for change in ("variant", "split"):
        model = tiny_gpt2()
        (model.get_submodule("transformer.h.1.mlp.dropout") if frozen else model).eval()
        chain = Chain.from_module(model, None, {"input_ids": tokens()})
        if change == "split":
            chain = split_chain(chain, {"*.h.*": "tensor-2"}, "close")
        else:
            apply_variants([(layer.name, layer.module) for layer in chain.layers], {"*.h.*": "sdpa"}, "close")
        put_in_training(layer.module for layer in chain.layers)
        off = {name for layer in chain.layers for name, part in layer.module.named_modules() if not part.training}
        assert off == ({"transformer.h.1.mlp.dropout"} if frozen else set())
