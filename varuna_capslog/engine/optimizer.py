"""The optimizer over one rank's layers, its state addressed by layer and parameter name.

Every rank steps its own parameters as the run's `Recipe` says; the learning rate is a function of the step, so nothing
else needs to be remembered. A shared parameter is stepped once per rank, with the same gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.recipe import AVERAGE, Recipe

__all__ = ["StageOptimizer"]


class StageOptimizer:
    """Steps the trained parameters of some layers.

    Attributes:
        parameters: by address; of a shared parameter the first leaf here.
    """

    def __init__(self, layers: Sequence[EngineLayer], recipe: Recipe) -> None:
        self._recipe = recipe
        self.parameters: dict[str, nn.Parameter] = {}
        for layer in layers:
            for name, parameter in layer.parameters.items():
                address = layer.address(name)
                if parameter.requires_grad:
                    self.parameters.setdefault(address, parameter)
        self._on_cpu = all(layer.device.type == "cpu" for layer in layers)
        self._torch = recipe.build(self.parameters, self._on_cpu)
        self._averages: dict[nn.Parameter, Tensor] = {}

    def step(self, step: int, scale: float) -> float:
        """Applies the gradients times `scale` (the clipping coefficient) and drops them; returns the learning rate."""
        rate = self._recipe.rate.at(step)
        for group in self._torch.param_groups:
            group["lr"] = rate * group["lr_factor"]
        trained = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if scale != 1.0:
            for parameter in trained:
                parameter.grad.mul_(scale)  # type: ignore[union-attr]
        if self._recipe.ema is not None:
            for parameter in trained:
                if parameter not in self._averages:
                    self._averages[parameter] = parameter.detach().clone()
        ready = all(parameter in self._torch.state for parameter in trained)
        if self._on_cpu and ready and self._recipe.is_plain_adamw:
            for group in self._torch.param_groups:
                self._step_group(group)
        else:
            self._torch.step()
        if self._recipe.ema is not None and trained:
            values = [parameter.detach() for parameter in trained]
            weight = 1 - self._recipe.average_decay(step)
            torch._foreach_lerp_([self._averages[parameter] for parameter in trained], values, weight)
        for parameter in trained:
            parameter.grad = None
        return rate

    def _step_group(self, group: Mapping[str, Any]) -> None:
        """What `AdamW.step` does for one group, without its search for hooks, profilers and gradients: for layers of
        some thousand parameters that takes longer than the step.
        """
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self._torch.state[parameter] for parameter in trained]
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the parameters have the values of their averages; without averages nothing changes.

        The values are exchanged in place, since each use of a shared parameter is a leaf of its own on one storage.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for parameter, average in self._averages.items():
                value = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(value)

    def step_together(self) -> None:
        """Steps all parameters together, as CUDA's default does, also where they seem to be on the CPU."""
        for group in self._torch.param_groups:
            if "foreach" in group:
                group["foreach"], group["fused"] = True, None
        self._on_cpu = False

    def moments(self, address: str) -> dict[str, Any]:
        """What is kept of one address, by key, such as {"exp_avg", "exp_avg_sq", "step"} and, with an average, "ema".

        Tensors are live, not copies; an optimizer may also keep plain numbers. {} before its first step, and for what
        is not trained here.
        """
        parameter = self.parameters.get(address)
        if parameter is None:
            return {}
        average = self._averages.get(parameter)
        return {**self._torch.state.get(parameter, {}), **({} if average is None else {AVERAGE: average})}

    def take_moments(self, address: str, moments: Mapping[str, Any], copy: bool) -> None:
        """Takes over what is kept of one address ({}: it starts afresh); one that is not trained here is ignored.

        Args:
            copy: False takes the tensors themselves.

        Raises:
            CapslogError: another optimizer kept it.
        """
        parameter = self.parameters.get(address)
        if parameter is None:
            return
        self._averages.pop(parameter, None)
        if not moments:
            self._torch.state.pop(parameter, None)
            return
        taken = dict(moments)
        if copy:
            self._recipe.check_kept(address, parameter, moments)
            for name, value in moments.items():
                if isinstance(value, Tensor):
                    # torch's optimizers keep their step counts on the CPU
                    taken[name] = value.clone() if name == "step" else value.to(parameter.device, copy=True)
        average = taken.pop(AVERAGE, None)
        if average is not None and self._recipe.ema is not None:
            self._averages[parameter] = average
        self._torch.state[parameter] = taken
