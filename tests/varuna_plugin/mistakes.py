"""Jobs of the workers in the tests of mistakes: build or run something wrong, and return the error's sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.varuna_plugin import cases, models
from varuna_capslog.engine.communicator import Communicator


class Leaking(nn.Module):
    """Model in which `early` is used after the cut without passing through it; `skip` leaves the cut out."""

    def __init__(self, cut: type[nn.Module], leak: bool = True) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 4), cut(), nn.Linear(4, 4)
        self.leak, self.skip, self.pair = leak, False, False

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        crossed = early if self.skip else self.cut(early, early) if self.pair else self.cut(early)
        late = self.last(crossed[0] if self.pair else crossed)
        return (late + early if self.leak else late).square().mean()


def leaking_batch(size: int, device: Any = None) -> dict[str, Tensor]:
    return {"x": torch.ones(size, 4)}


def build(varuna: Any, model: nn.Module, **change: Any) -> Any:
    arguments = {"stage_to_rank_map": "0;1;", "batch_size": 4, "chunk_size": 2, "device": "cpu"} | change
    trainer = varuna.Varuna(model, get_batch_fn=leaking_batch, **arguments)
    trainer.set_optimizer(torch.optim.SGD(trainer.parameters(), lr=0.1))
    return trainer


def sentence(communicator: Communicator, kind: str, change: dict[str, Any]) -> str:
    """Make the mistake `kind`; return this rank's error, or its loss."""
    cuts = [0, 1] if kind != "ranks differ" else [0, 1 + communicator.rank]
    with cases.patched(cuts, timeout_seconds=12.0) as varuna:
        torch.manual_seed(0)
        model: Any = Leaking(varuna.CutPoint, leak=kind == "leak")
        try:
            if kind == "unfrozen":
                model.first.requires_grad_(False)
            if kind == "moving":
                model.register_buffer("count", torch.zeros(()))
                model.register_forward_pre_hook(lambda module, inputs: (module.count.add_(1), None)[1])
            if kind == "untraceable":
                model.last = nn.Linear(5, 5)
            trainer = build(varuna, model, **change)
            if kind == "unfrozen" and trainer.stage == 0:
                model.first.requires_grad_(True)
            model.skip, model.pair = kind == "skip", kind == "pair"
            return f"loss {trainer.step(leaking_batch(4))[0]}"
        except ValueError as error:
            return str(error)


def with_stale_files(communicator: Communicator, folder: Path) -> dict[str, Any]:
    """Train in a folder that holds another model's pickles, as Varuna leaves them."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        case = cases.Case([0, 3], steps=1)
        outcome = cases.train(communicator, case)
        return {"outcome": outcome, "files": {path.name: path.read_bytes() for path in folder.iterdir()}}
    finally:
        os.chdir(before)


def autocast(communicator: Communicator, cuts: list[int]) -> dict[str, Any]:
    """Train one step of a model with bfloat16 autocast of its own; return loss and gradients."""
    with cases.patched(cuts) as varuna:
        torch.manual_seed(0)
        model = WithAutocast(varuna.CutPoint)
        trainer = varuna.Varuna(model, cases.stage_map(len(cuts), 1), models.get_batch, 4, 2, device="cpu")
        trainer.set_optimizer(torch.optim.SGD(trainer.parameters(), lr=0.1))
        loss, _, _ = trainer.step(models.batch(4, 8, 8))
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss, "gradients": grads}


class WithAutocast(models.Model):
    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(images, targets)
