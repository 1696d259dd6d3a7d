"""Optimizers that a run names by a short word and `torch.optim` does not have as they are: `muon` and `adamw8bit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from varuna_capslog.base.errors import ConfigError

__all__ = ["NAMED", "AdamW8bit", "Muon"]

_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Arguments that torch's Muon alone takes."""


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices and AdamW for all other parameters, with one learning rate.

    Updates of matrices are scaled to the size of AdamW's (`adjust_lr_fn`), so that the rate suits both.

    Args:
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: of `torch.optim.Muon`. betas, eps: of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **muon: Any,
    ) -> None:
        if unknown := sorted(set(muon) - set(_MUON)):
            raise ConfigError(f"muon takes no argument {unknown[0]}; it takes {', '.join(('betas', 'eps', *_MUON))}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        muon = {"adjust_lr_fn": "match_rms_adamw", **muon}
        self._parts: list[tuple[dict[str, Any], torch.optim.Optimizer]] = []
        for group in self.param_groups:
            matrices = [row for row in group["params"] if row.dim() == 2 and not row.is_complex()]
            others = [row for row in group["params"] if not any(row is matrix for matrix in matrices)]
            if matrices:
                self._parts.append((group, torch.optim.Muon(matrices, **muon)))
            if others:
                self._parts.append((group, torch.optim.AdamW(others, betas=betas, eps=eps)))
        for _, part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        for group, part in self._parts:
            part.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
            part.step()


_BLOCK, _LEAST = 256, 4096
"""Numbers with one scale, and the fewest that are kept in 8 bits (bitsandbytes 0.50.2, `optim/optimizer.py`)."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two states have 8 bits a number and a float32 scale for each 256, as bitsandbytes keeps them; those
    of fewer than 4,096 numbers have 32 bits. It has sizes alone, for estimates.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the states of fake parameters. Raises ConfigError for parameters with values."""
        rows: list[nn.Parameter] = [row for group in self.param_groups for row in group["params"]]
        for row in rows:
            if not is_fake(row):
                raise ConfigError(
                    "train.optimizer=adamw8bit trains with torchao, which is not installed; run pip install torchao"
                )
            if row.grad is not None and row not in self.state:
                self.state[row].update({f"{part}{number}": state for number in (1, 2) for part, state in _kept(row)})


def _kept(parameter: Tensor) -> list[tuple[str, Tensor]]:
    if parameter.numel() < _LEAST:
        return [("state", torch.empty_like(parameter, dtype=torch.float32))]
    scales = parameter.new_empty(-(-parameter.numel() // _BLOCK), dtype=torch.float32)
    return [("state", torch.empty_like(parameter, dtype=torch.uint8)), ("absmax", scales)]


def _adamw_in_8_bits() -> type[torch.optim.Optimizer]:
    """Return torchao's, which trains, where it is installed."""
    if importlib.util.find_spec("torchao") is None:
        return AdamW8bit
    from torchao.optim import AdamW8bit as Trained

    return cast("type[torch.optim.Optimizer]", Trained)


NAMED: dict[str, Callable[[], type[torch.optim.Optimizer]]] = {"adamw8bit": _adamw_in_8_bits, "muon": lambda: Muon}
"""Class of each short word."""
