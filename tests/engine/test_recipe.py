"""Optimizers of short words: Muon beside torch's own, and the bytes of states in 8 bits as bitsandbytes keeps them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import ConfigError
from varuna_capslog.engine.recipe import LearningRate, Recipe

SHAPES = {"matrix": (8, 4), "bias": (4,), "kernel": (2, 3, 3, 3), "wide": (4, 16)}


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(3)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def test_muon_steps_matrices_as_torchs_muon_and_the_others_as_adamw() -> None:
    recipe = Recipe(LearningRate(0.01), "muon", {"momentum": 0.9, "betas": [0.8, 0.9]}, weight_decay=0.1)
    recipe.check({name: len(shape) for name, shape in SHAPES.items()})
    ours, theirs = parameters(), parameters()
    matrices = [theirs[name] for name in ("matrix", "wide")]
    plain = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs["bias"], theirs["kernel"]], lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    ]
    built = recipe.build(ours, on_cpu=True)
    for step in (1, 2, 3):
        for group in built.param_groups:
            group["lr"] = 0.01 / step
        for optimizer in plain:
            optimizer.param_groups[0]["lr"] = 0.01 / step
        for name in SHAPES:
            ours[name].grad = theirs[name].grad = theirs[name].detach().cos() * step
        built.step()
        for optimizer in plain:
            optimizer.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)
    assert recipe.kept(torch.empty(8, 4)) == {"momentum_buffer": 4 * 32}
    assert recipe.kept(torch.empty(32)) == {"step": 4, "exp_avg": 4 * 32, "exp_avg_sq": 4 * 32}
    with pytest.raises(ConfigError, match="muon takes no argument rate"):
        Recipe(optimizer="muon", arguments={"rate": 1}).build({}, on_cpu=True)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_states_of_8_bits_are_counted_and_refused_for_training_without_torchao() -> None:
    recipe = Recipe(optimizer="adamw8bit")
    assert recipe.kept(torch.empty(4095)) == {"state1": 4 * 4095, "state2": 4 * 4095}
    assert recipe.kept(torch.empty(64, 65, dtype=torch.bfloat16)) == {
        **dict.fromkeys(("state1", "state2"), 64 * 65),
        **dict.fromkeys(("absmax1", "absmax2"), 4 * 17),
    }
    with pytest.raises(ConfigError, match="trains with torchao, which is not installed; run pip install torchao"):
        recipe.check({"weight": 2})


@pytest.mark.parametrize("shape", [(4095,), (64, 64), (64, 65)])
def test_they_are_the_bytes_that_bitsandbytes_keeps(shape: tuple[int, ...]) -> None:
    library = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = library.AdamW8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    kept = {name: value.nbytes for name, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
    with FakeTensorMode():
        ours = Recipe(optimizer="adamw8bit").kept(torch.empty(shape))
    assert ours == {name: size for name, size in kept.items() if not name.startswith("qmap")}
