"""AdamW over one rank's layers, its state addressed by layer and parameter name.

Every rank steps its own parameters; the learning rate is a function of the step, so nothing else needs to be
remembered. A shared parameter is stepped once per rank, with the same gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from varuna_capslog.engine.layers import EngineLayer

__all__ = ["LearningRate", "StageOptimizer"]


@dataclass(frozen=True)
class LearningRate:
    """Step size by optimizer step: linear warm-up, then constant, times `drop_factor` every `drop_steps` steps.

    Attributes:
        base: learning rate after the warm-up.
        warmup_steps: steps of the linear rise, 0 = none.
        drop_steps: length of one plateau in steps, None = no drop (DETR: 200 epochs).
        drop_factor: factor of each drop.
    """

    base: float
    warmup_steps: int = 0
    drop_steps: int | None = None
    drop_factor: float = 0.1

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        rate = self.base
        if self.drop_steps:
            rate *= self.drop_factor ** ((step - 1) // self.drop_steps)
        if step < self.warmup_steps:
            rate *= step / self.warmup_steps
        return rate


class StageOptimizer:
    """AdamW (Loshchilov & Hutter 2019) with one group per learning-rate multiplier.

    Args:
        multipliers: substring of a parameter's address -> factor on the learning rate; the first that matches counts.
    """

    def __init__(
        self,
        layers: Sequence[EngineLayer],
        rate: LearningRate,
        weight_decay: float,
        multipliers: Mapping[str, float],
    ) -> None:
        self.rate = rate
        self.parameters: dict[str, nn.Parameter] = {}
        for layer in layers:
            for name, parameter in layer.parameters.items():
                address = layer.address(name)
                if parameter.requires_grad:
                    self.parameters.setdefault(address, parameter)
        groups: dict[float, list[nn.Parameter]] = {}
        for address, parameter in self.parameters.items():
            factor = next((factor for part, factor in multipliers.items() if part in address), 1.0)
            groups.setdefault(factor, []).append(parameter)
        groups = groups or {1.0: []}  # torch takes no empty list of groups
        self._factors = list(groups)
        # one kernel per parameter, not a dozen: a third of the time; on CUDA torch's default is as good
        self._fused = all(layer.device.type == "cpu" for layer in layers)
        self._adamw = torch.optim.AdamW(
            [{"params": parameters} for parameters in groups.values()],
            lr=rate.base,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=weight_decay,
            fused=self._fused or None,
        )

    def step(self, step: int, scale: float) -> float:
        """Applies the gradients times `scale` (the clipping coefficient) and drops them; returns the learning rate."""
        rate = self.rate.at(step)
        for group, factor in zip(self._adamw.param_groups, self._factors, strict=True):
            group["lr"] = rate * factor
        trained = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if scale != 1.0:
            for parameter in trained:
                parameter.grad.mul_(scale)  # type: ignore[union-attr]
        if self._fused and all(parameter in self._adamw.state for parameter in trained):
            for group in self._adamw.param_groups:
                self._step_group(group)
        else:
            self._adamw.step()
        for parameter in trained:
            parameter.grad = None
        return rate

    def _step_group(self, group: Mapping[str, Any]) -> None:
        """What `AdamW.step` does for one group, without its search for hooks, profilers and gradients: for layers of
        some thousand parameters that takes longer than the step.
        """
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self._adamw.state[parameter] for parameter in trained]
        if trained:
            with torch.no_grad():
                adamw(
                    trained,
                    [parameter.grad for parameter in trained],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )

    def moments(self, address: str) -> dict[str, Tensor]:
        """Moments and step count of one address: {"exp_avg", "exp_avg_sq", "step"}; live tensors, not copies.

        {} before its first step, and for what is not trained here.
        """
        parameter = self.parameters.get(address)
        return {} if parameter is None else dict(self._adamw.state.get(parameter, {}))

    def take_moments(self, address: str, moments: Mapping[str, Tensor], copy: bool) -> None:
        """Takes over the moments of one address ({}: it starts afresh); an address that is not trained here is ignored.

        Args:
            copy: False takes the tensors themselves.
        """
        parameter = self.parameters.get(address)
        if parameter is None:
            return
        if not moments:
            self._adamw.state.pop(parameter, None)
        elif copy:
            self._adamw.state[parameter] = {
                # AdamW keeps its step count on the CPU
                name: tensor.clone() if name == "step" else tensor.to(parameter.device, copy=True)
                for name, tensor in moments.items()
            }
        else:
            self._adamw.state[parameter] = dict(moments)
