"""A piece's state moves whole, and a copy that follows makes bitwise its owner's steps; without Varuna."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.varuna_plugin import models
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.varuna_plugin import checkpoint_files, piece_state
from varuna_capslog.varuna_plugin.splitting.tracing import trace_model

Part = tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]


def whole(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.Model(models.PlainCut)


def part_of(model: nn.Module, piece: int) -> Part:
    trace = trace_model(model, models.get_batch(2), models.PlainCut)
    names = piece_state.names_of(trace, piece)
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
    recipe = piece_state.OptimizerRecipe(build(model), model)
    part = part_of(model, piece)
    optimizer = recipe.build(part[0])
    follower = piece_state.PieceFollower(piece_state.capture(*part, optimizer), recipe, (), half)
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
        expected, found = piece_state.capture(*part, optimizer), follower.state(copy=False)
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


def test_a_follower_refuses_the_update_of_another_piece() -> None:
    model = whole(0)
    recipe, part = piece_state.OptimizerRecipe(adamw(model), model), part_of(model, 0)
    follower = piece_state.PieceFollower(piece_state.capture(*part, None), recipe, (), half)
    for key in ("gradients/head.weight", "buffers/head.mean"):
        with pytest.raises(CapslogError, match=f"nothing to do with '{key}'"):
            follower.apply({key: torch.zeros(1)}, 1, 1.0)


def test_a_state_moves_into_another_model() -> None:
    there, here = whole(0), whole(1)
    recipe = piece_state.OptimizerRecipe(adamw(there), there)
    source, target = part_of(there, 5), part_of(here, 5)
    first, second = recipe.build(source[0]), recipe.build(target[0])
    for parameter in source[0].values():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    state = piece_state.capture(*source, first)
    assert not torch.equal(source[0]["head.weight"], target[0]["head.weight"])
    piece_state.install(state, *target, second)
    moved = piece_state.capture(*target, second)
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
    state = piece_state.capture(*part, None)
    state["parameters/stem.bias"] = torch.zeros(3)
    recipe = piece_state.OptimizerRecipe(sgd(model), model)
    with pytest.raises(CapslogError, match=r"'stem.bias' is \[3\], the model wants \[8\]"):
        piece_state.install(state, *part, recipe.build(part[0]))
    with pytest.raises(CapslogError, match="no parameter of the model"):
        piece_state.OptimizerRecipe(sgd(whole(1)), model)


def test_an_optimizer_with_strange_state_is_refused() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = {"history": [1, 2]}

    model = whole(0)
    optimizer = piece_state.OptimizerRecipe(Strange(model.parameters(), lr=0.1), model).build(part_of(model, 0)[0])
    optimizer.step()
    with pytest.raises(CapslogError, match=r"Strange keeps a list \('history'\) for 'stem.weight'"):
        piece_state.capture(*part_of(model, 0), optimizer)


def test_what_members_left_is_found_again_and_the_rest_goes(tmp_path: Path) -> None:
    """The newest boundary of which every piece is there and that lies on the run's past."""
    assert checkpoint_files.begin_with(tmp_path) == (0, "")
    state = {"parameters/w": torch.ones(2)}
    record = Generation(3, ("b",), lineage=((2, Stamp(7, 1)),))
    assert record.continues(Stamp(7, 1))
    assert not record.continues(Stamp(9, 1)), "an abandoned boundary"
    held = {(piece, stamp): state for stamp in (Stamp(6, 1), Stamp(7, 1), Stamp(9, 1)) for piece in range(2)}
    del held[(1, Stamp(7, 1))]
    checkpoint_files.write_held(tmp_path, held, record, num_pieces=2)
    step, path = checkpoint_files.begin_with(tmp_path)
    assert step == 6
    assert not (tmp_path / "held").exists()
    assert torch.equal(checkpoint_files.read_held(Path(path), 1)["parameters/w"], torch.ones(2))
    assert checkpoint_files.begin_with(tmp_path) == (step, path), "a run that ended before its next checkpoint"
    manifest = tmp_path / "checkpoints" / "varuna_ckpt_8"
    manifest.mkdir(parents=True)
    files.write_json(manifest / "capslog-manifest.json", {})
    assert checkpoint_files.begin_with(tmp_path) == (8, str(manifest))
    assert not list(tmp_path.glob("resumed-*"))
