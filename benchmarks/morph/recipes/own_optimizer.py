"""A user-defined optimizer for `recipes`: sign of a running sum; its state is a number and a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Mine"]


class Mine(torch.optim.Optimizer):
    """Steps by the sign of a decaying sum of the gradients; the step size shrinks with every step.

    Args:
        keep: factor of the sum at every step.
    """

    def __init__(self, params: object, lr: float = 1e-3, keep: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state: dict[str, int | Tensor] = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) * group["keep"] + parameter.grad
                parameter.sub_(state["sum"].sign(), alpha=group["lr"] / state["count"] ** 0.5)
