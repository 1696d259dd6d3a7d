"""A step of a captured model beside the model's own, if the model's code refuses the usual way to differentiate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.model import hostile
from varuna_capslog.model.capture import opaque, trial
from varuna_capslog.model.chain import Chain

X = torch.randn(4, hostile.WIDTH, generator=torch.Generator().manual_seed(0))


class OldCheckpoint(hostile.Base):
    """Block under torch's old checkpointing, which runs it without gradients and computes them in its own backward."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if number == 2 else block(x).relu()
        return x


def gradients(model: Any, run: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    run().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("followed", "fits"), [(True, True), (False, True), (False, False)])
def test_old_checkpointing_loses_no_gradient(followed: bool, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export assumed that there are no gradients, so layers before the block were not trained; and since such code
    refuses `torch.autograd.grad`, no comparison was made. Now the block is followed; if it were not, the comparison
    would show it.
    """
    if not followed:
        monkeypatch.setattr(opaque.OpaqueCalls, "_checkpointed", lambda self, apply: apply)
    if not fits:
        monkeypatch.setattr(trial.StepMemory, "holds_weights", lambda self: False)
        monkeypatch.setattr(trial, "_SMALL", 1)
    torch.manual_seed(0)
    model = OldCheckpoint()
    plain = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    chain = Chain.from_module(model, None, (X,))
    assert all(
        torch.equal(parameter.grad, torch.ones_like(parameter))
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (len(chain) > 1) == followed
    ours, theirs = gradients(model, lambda: chain.run({"x": X})["output"]), gradients(plain, lambda: plain(X))
    assert all(gradient is not None and torch.equal(gradient, theirs[name]) for name, gradient in ours.items())  # type: ignore[arg-type]
