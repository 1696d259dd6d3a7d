"""A step of a captured model beside the model's own, where the model's code refuses the usual way to differentiate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.model import hostile
from varuna_capslog.model.capture import opaque, step_memory
from varuna_capslog.model.chain import Chain

X = torch.randn(4, hostile.WIDTH, generator=torch.Generator().manual_seed(0))


class OldCheckpoint(hostile.Base):
    """A block under torch's old checkpointing, which runs it without gradients and makes them in its own backward."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if number == 2 else block(x).relu()
        return x


def gradients(model: Any, run: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    run().square().mean().backward()
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(("followed", "fits"), [(True, True), (False, True), (False, False)])
def test_old_checkpointing_loses_no_gradient(followed: bool, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export believed that there are no gradients, so nothing before the block was trained; and since such code
    refuses `torch.autograd.grad`, nobody compared. Now the block is followed; were it not, the comparison shows it.
    """
    if not followed:
        monkeypatch.setattr(opaque.OpaqueCalls, "_checkpointed", lambda self, apply: apply)
    if not fits:
        monkeypatch.setattr(step_memory.StepMemory, "holds_weights", lambda self: False)
        monkeypatch.setattr(step_memory, "_SMALL", 1)
    torch.manual_seed(0)
    model = OldCheckpoint()
    plain = copy.deepcopy(model)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    chain = Chain.from_module(model, None, (X,))
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in model.parameters() if one.grad is not None)
    assert all(one.grad is not None for one in model.parameters())
    assert (len(chain) > 1) == followed
    ours, theirs = gradients(model, lambda: chain.run({"x": X})["output"]), gradients(plain, lambda: plain(X))
    assert all(one is not None and torch.equal(one, theirs[name]) for name, one in ours.items())  # type: ignore[arg-type]
