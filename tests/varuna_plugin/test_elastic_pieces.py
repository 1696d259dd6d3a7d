"""A piece's state moves whole, and a copy that follows makes bitwise its owner's steps; without Varuna."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.varuna_plugin import models
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import elastic_pieces
from varuna_capslog.varuna_plugin.tracing import trace_model

Part = tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]


def whole(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.Model(models.PlainCut)


def part_of(model: nn.Module, piece: int) -> Part:
    trace = trace_model(model, models.get_batch(2), models.PlainCut)
    names = elastic_pieces.names_of(trace, piece)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return {name: parameters[name] for name in names[0]}, {name: buffers[name] for name in names[1]}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": [model.head.bias], "lr": 0.5}])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def half(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2


@pytest.mark.parametrize("build", [adamw, sgd])
@pytest.mark.parametrize("piece", [1, 2, 5])
def test_a_follower_makes_its_owners_steps(build: Callable[[nn.Module], torch.optim.Optimizer], piece: int) -> None:
    model = whole(0)
    recipe = elastic_pieces.OptimizerRecipe(build(model), model)
    part = part_of(model, piece)
    optimizer = recipe.build(part[0])
    follower = elastic_pieces.PieceFollower(elastic_pieces.capture(*part, optimizer), recipe, (), half)
    for step in range(1, 4):
        torch.manual_seed(step)
        for name, parameter in part[0].items():
            parameter.grad = torch.randn_like(parameter) if not (step == 2 and "weight" in name) else None
        for buffer in part[1].values():
            buffer.add_(1)
        update = {f"gradients/{name}": p.grad for name, p in part[0].items() if p.grad is not None}
        follower.apply(update | {f"buffers/{name}": b.clone() for name, b in part[1].items()}, step, 1.0)
        half(optimizer, step)
        optimizer.step()
        expected, followed = elastic_pieces.capture(*part, optimizer), follower.state(copy=False)
        assert expected.keys() == followed.keys()
        assert all(torch.equal(tensor, followed[key]) for key, tensor in expected.items())


def test_a_follower_refuses_the_update_of_another_piece() -> None:
    model = whole(0)
    recipe, part = elastic_pieces.OptimizerRecipe(adamw(model), model), part_of(model, 0)
    follower = elastic_pieces.PieceFollower(elastic_pieces.capture(*part, None), recipe, (), half)
    for key in ("gradients/head.weight", "buffers/head.mean"):
        with pytest.raises(CapslogError, match=f"nothing to do with '{key}'"):
            follower.apply({key: torch.zeros(1)}, 1, 1.0)


def test_a_state_moves_into_another_model() -> None:
    source_model, target_model = whole(0), whole(1)
    recipe = elastic_pieces.OptimizerRecipe(adamw(source_model), source_model)
    source, target = part_of(source_model, 5), part_of(target_model, 5)
    first, second = recipe.build(source[0]), recipe.build(target[0])
    for parameter in source[0].values():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    state = elastic_pieces.capture(*source, first)
    assert not torch.equal(source[0]["head.weight"], target[0]["head.weight"])
    elastic_pieces.install(state, *target, second)
    moved = elastic_pieces.capture(*target, second)
    assert moved.keys() == state.keys()
    assert all(torch.equal(tensor, moved[key]) for key, tensor in state.items())
    first.step()
    assert not torch.equal(source[0]["head.weight"], target[0]["head.weight"]), "it must be a copy"
    kept = {id(p): group["weight_decay"] for group in second.param_groups for p in group["params"]}
    assert kept[id(target[0]["head.weight"])] == 0.1
    assert id(target[0]["head.bias"]) in kept
    assert id(target[0]["blocks.2.norm.weight"]) not in kept, "the user's optimizer leaves it out"


def test_another_model_is_refused() -> None:
    model = whole(0)
    part = part_of(model, 0)
    state = elastic_pieces.capture(*part, None)
    state["parameters/stem.bias"] = torch.zeros(3)
    recipe = elastic_pieces.OptimizerRecipe(sgd(model), model)
    with pytest.raises(CapslogError, match=r"'stem.bias' is \[3\], the model wants \[8\]"):
        elastic_pieces.install(state, *part, recipe.build(part[0]))
    with pytest.raises(CapslogError, match="no parameter of the model"):
        elastic_pieces.OptimizerRecipe(sgd(whole(1)), model)


def test_an_optimizer_with_strange_state_is_refused() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = {"history": [1, 2]}

    model = whole(0)
    optimizer = elastic_pieces.OptimizerRecipe(Strange(model.parameters(), lr=0.1), model).build(part_of(model, 0)[0])
    optimizer.step()
    with pytest.raises(CapslogError, match=r"Strange keeps a list \('history'\) for 'stem.weight'"):
        elastic_pieces.capture(*part_of(model, 0), optimizer)
