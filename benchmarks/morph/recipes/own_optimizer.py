"""An optimizer of a user's own for `recipes`: signs of a running sum, which keeps a number and a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Mine"]


class Mine(torch.optim.Optimizer):
    """Steps by the sign of a decaying sum of the gradients, and less with every step.

    Args:
        keep: what a step leaves of the sum.
    """

    def __init__(self, params: object, lr: float = 1e-3, keep: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state: dict[str, int | Tensor] = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) * group["keep"] + parameter.grad
                parameter.sub_(state["sum"].sign(), alpha=group["lr"] / state["count"] ** 0.5)
