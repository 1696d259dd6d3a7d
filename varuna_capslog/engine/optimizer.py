"""Optimizer over one rank's layers; its state is addressed by layer and parameter name.

Every rank steps its own parameters by the run's `Recipe`. The learning rate is a function of the step; the only other
state is float16's loss scale. Each rank steps a shared parameter once, with the same gradient on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.offload import HostMoments, HostTier, offloadable
from varuna_capslog.engine.recipe import AVERAGE, LossScale, Recipe, in_parts
from varuna_capslog.engine.replicated import SharedUpdates

__all__ = ["StageOptimizer", "step_alike"]


class StageOptimizer:
    """Optimizer of the trained parameters of some layers, or of their float32 masters.

    Args:
        away: numbers of the layers whose moments and averages are in the host tier `tier` between the updates.
        updates: exchange with other holders of the layers, if one rank updates some layers for all; gradients of layers
            that another rank updates are dropped.
        loss_scale: of the first step (the attribute: of the next step); None: the loss is not scaled.

    Attributes:
        parameters: all trained parameters by address, with gradients; for a shared parameter its first leaf.
        values: the stepped tensors by address: each parameter, or its master.

    Raises CapslogError where the tier is full.
    """

    def __init__(
        self,
        layers: Sequence[EngineLayer],
        recipe: Recipe,
        away: Collection[int] = (),
        tier: HostTier | None = None,
        updates: SharedUpdates | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._recipe, self._updates, self.loss_scale = recipe, updates, loss_scale
        elsewhere = frozenset[int]() if updates is None else updates.taken
        self.parameters: dict[str, nn.Parameter] = {}
        self.values: dict[str, nn.Parameter] = {}
        self._rounded = [layer for layer in layers if layer.masters]
        self._elsewhere: dict[str, nn.Parameter] = {}
        self._in_turn: list[list[nn.Parameter]] = []
        """Layers that are stepped one after another, each as its parameters: first those whose moments are rounded
        between steps, then those whose moments are offloaded."""
        self._places: dict[nn.Parameter, Mapping[str, Any]] = {}
        """Kept state of the current layer's parameters, into whose memory the stepped state is rounded."""
        waiting: list[list[nn.Parameter]] = []
        for layer in layers:
            parameters, values = [], layer.values
            for name, parameter in layer.parameters.items():
                address = layer.address(name)
                if parameter.requires_grad and self.parameters.setdefault(address, parameter) is parameter:
                    value = self.values[address] = values[name]
                    parameters.append(value)
                    if layer.index in elsewhere:
                        self._elsewhere[address] = value
            if parameters and layer.index in away:
                waiting.append(parameters)
            elif parameters and recipe.rounds_moments:
                self._in_turn.append(parameters)
        self._in_turn += waiting
        self._hosted: HostMoments | None = None
        if waiting:
            assert tier is not None, "moments wait in a tier"
            self._hosted = HostMoments(
                tier, {value: recipe.kept(value) for parameters in waiting for value in parameters}
            )
        on_cpu = all(layer.device.type == "cpu" for layer in layers)
        is_complex = any(parameter.is_complex() for parameter in self.parameters.values())
        self._is_plain = on_cpu and recipe.is_plain_adamw and not is_complex
        stepped = {address: value for address, value in self.values.items() if address not in self._elsewhere}
        self._torch = recipe.build(stepped, on_cpu)
        self._averages: dict[nn.Parameter, Tensor] = {}
        for value in stepped.values() if recipe.rounds_moments else ():  # some have moments before their first step
            self._keep(value, recipe.rounded(value, self._kept(value)))

    def step(self, step: int, scale: float) -> float:
        """Apply the gradients, times the verdict's `scale`, and drop them; return the learning rate.

        Scale 0 skips the step: neither parameters nor averages change, and the optimizer counts no step. Raises
        PeerLost where a rank is gone that updates some layers for this rank.
        """
        rate = self._begin(step, scale)
        if not scale:
            for parameter in self.parameters.values():
                parameter.grad = None
            return rate
        self._hand_to_masters()
        for parameter in self._elsewhere.values():
            parameter.grad = None
        waiting = {parameter: parameter.grad for parameters in self._in_turn for parameter in parameters}
        for parameter in waiting:
            parameter.grad = None
        self._step_those_with_gradients(step, scale)
        for number, parameters in enumerate(self._in_turn):
            self._load_back(number)
            for parameter in parameters:
                parameter.grad = waiting.pop(parameter)
            self._step_those_with_gradients(step, scale)
            self._let_leave(parameters)
        if self._hosted is not None:
            self._hosted.settle()
        if self._updates is not None:
            self._updates.hand_on()
        self._round()
        return rate

    def _hand_to_masters(self) -> None:
        """Move gradients from 16-bit parameters to their masters; both are float32."""
        for address, value in self.values.items() if self._rounded else ():
            parameter = self.parameters[address]
            if value is not parameter:
                value.grad, parameter.grad = parameter.grad, None

    def _round(self) -> None:
        for layer in self._rounded:
            layer.round_masters()

    def _begin(self, step: int, scale: float) -> float:
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(applied=scale > 0)
        rate = self._recipe.rate.at(step)
        for group in self._torch.param_groups:
            if isinstance(group["lr"], Tensor):  # compiled code reads this tensor
                group["lr"].fill_(rate * group["lr_factor"])
            else:
                group["lr"] = rate * group["lr_factor"]
        return rate

    def _load_back(self, number: int) -> None:
        """Put one layer's moments on the device in their stepped type; begin to bring back the next layer's."""
        if number == 0:
            self._begin_to_load(0)
        for parameter in self._in_turn[number]:
            waits = self._hosted is not None and parameter in self._hosted
            kept = self._hosted.take(parameter) if waits and self._hosted is not None else {}
            kept = kept or self._kept(parameter)  # before the first step the tier has nothing
            self._places[parameter] = kept
            self._keep(parameter, self._recipe.widened(parameter, kept))
        # the moments of the layer before must be freed before those of the next layer come
        if self._hosted is not None:
            self._hosted.settle()
        self._begin_to_load(number + 1)

    def _begin_to_load(self, number: int) -> None:
        if self._hosted is not None:
            for parameters in self._in_turn[number : number + 1]:
                self._hosted.load_back([parameter for parameter in parameters if parameter in self._hosted])

    def _let_leave(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            kept = self._recipe.rounded(parameter, self._kept(parameter), self._places.pop(parameter))
            if self._hosted is not None and parameter in self._hosted:
                self._hosted.offload(parameter, kept)
                kept = {}
            self._keep(parameter, kept)

    def _step_those_with_gradients(self, step: int, scale: float) -> None:
        trained = [value for value in self.values.values() if value.grad is not None]
        if self._recipe.ema is not None:
            for parameter in trained:
                if parameter not in self._averages:
                    self._averages[parameter] = parameter.detach().clone()
        if self._is_plain and self._have_moments(trained):
            _step_plainly([self], scale)
        else:
            if scale != 1.0 and trained:
                torch._foreach_mul_([parameter.grad for parameter in trained if parameter.grad is not None], scale)
            self._torch.step()
        if self._recipe.ema is not None and trained:
            values = [parameter.detach() for parameter in trained]
            weight = 1 - self._recipe.average_decay(step)
            torch._foreach_lerp_([self._averages[parameter] for parameter in trained], values, weight)
        for parameter in trained:
            parameter.grad = None

    def _have_moments(self, trained: Sequence[nn.Parameter]) -> bool:
        return all(parameter in self._torch.state for parameter in trained)

    @property
    def _steps_in_one_call(self) -> bool:
        """True where the step is one call of torch's fused AdamW."""
        extra_steps = self._recipe.ema is not None or self._updates is not None or self._in_turn
        trained = [self.values[address] for address, parameter in self.parameters.items() if parameter.grad is not None]
        return self._is_plain and not extra_steps and self._have_moments(trained)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which parameters have the values of their averages; without averages nothing changes.

        Values are exchanged in place, since all uses of a shared parameter are leaves on one storage. Where ranks
        update layers for others, all of them enter and leave the context together. Raises PeerLost as `step`.
        """
        handed = self._updates if self._recipe.ema is not None else None
        self._exchange()
        if handed is not None:
            handed.hand_on()
        self._round()
        try:
            yield
        finally:
            self._exchange()
            self._round()
        if handed is not None:  # not after an error: other ranks may not come here
            handed.hand_on()
            self._round()

    def _exchange(self) -> None:
        with torch.no_grad():
            held = list(self._averages.items())
            if self._hosted is not None and self._recipe.ema is not None:
                waiting = (
                    parameter for parameters in self._in_turn for parameter in parameters if parameter in self._hosted
                )
                moments = ((parameter, self._hosted.live(parameter)) for parameter in waiting)
                held += [(parameter, kept[AVERAGE]) for parameter, kept in moments if AVERAGE in kept]
            for parameter, average in held:
                value = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(value)

    def step_together(self) -> None:
        """Step all parameters together, as by default on CUDA, also on the CPU (for estimates)."""
        for group in self._torch.param_groups:
            if "foreach" in group:
                group["foreach"], group["fused"] = True, None
        self._is_plain = False

    def moments(self, address: str) -> dict[str, Any]:
        """Optimizer state of a parameter, by key, such as "exp_avg", "exp_avg_sq", "step" and, with an average, "ema".

        Tensors are live, not copies; an optimizer may also keep plain numbers. {} before the first step, and for
        parameters that this rank does not train.
        """
        parameter = self.values.get(address)
        if parameter is None:
            return {}
        if self._hosted is not None and parameter in self._hosted:
            return self._hosted.live(parameter)
        return self._kept(parameter)

    def resident(self) -> list[Tensor]:
        """Optimizer state on the device between the updates."""
        tensors: list[Tensor] = []
        hosted = self._hosted
        for parameter in self.values.values():
            kept = self._kept(parameter) if hosted is None or parameter not in hosted else hosted.staying(parameter)
            tensors += [value for value in kept.values() if isinstance(value, Tensor)]
        return tensors

    def _kept(self, parameter: nn.Parameter) -> dict[str, Any]:
        average = self._averages.get(parameter)
        return {**in_parts(self._torch.state.get(parameter, {})), **({} if average is None else {AVERAGE: average})}

    def _keep(self, parameter: nn.Parameter, moments: Mapping[str, Any]) -> None:
        """Replace a parameter's state on the device ({}: remove it)."""
        self._averages.pop(parameter, None)
        self._torch.state.pop(parameter, None)
        taken = dict(moments)
        average = taken.pop(AVERAGE, None)
        if average is not None and self._recipe.ema is not None:
            self._averages[parameter] = average
        if taken:
            self._torch.state[parameter] = self._recipe.joined(parameter, taken)

    def take_moments(self, address: str, moments: Mapping[str, Any], copy: bool) -> None:
        """Set a parameter's optimizer state ({}: start afresh); does nothing for a parameter that this rank does not
        update. copy=False: use the tensors themselves. Raises CapslogError for the state of another optimizer.
        """
        parameter = self.values.get(address)
        if parameter is None or address in self._elsewhere:
            return
        waits = self._hosted is not None and parameter in self._hosted
        taken = dict(moments)
        if copy and moments:
            self._recipe.check_kept(address, parameter, moments)
        for name, value in moments.items():
            if not isinstance(value, Tensor) or (waits and offloadable(value)):  # offloaded tensors are copied anyway
                continue
            # torch's optimizers keep their step counts on the CPU
            place = value.device if name == "step" else parameter.device
            taken[name] = value.to(place, copy=copy)
        if not waits:
            self._keep(parameter, taken)
            return
        assert self._hosted is not None
        self._hosted.offload(parameter, taken)
        self._hosted.settle()


def step_alike(optimizers: Sequence[StageOptimizer], step: int, scale: float) -> None:
    """Step optimizers of one recipe in one call where possible; the bits are the same, as parameters do not mix."""
    together = [optimizer for optimizer in optimizers if optimizer._steps_in_one_call] if scale else []
    for optimizer in optimizers:
        if optimizer not in together:
            optimizer.step(step, scale)
    for optimizer in together:
        optimizer._begin(step, scale)
        optimizer._hand_to_masters()
    if together:
        _step_plainly(together, scale)
    for optimizer in together:
        for value in optimizer.values.values():
            value.grad = None
        optimizer._round()


def _step_plainly(optimizers: Sequence[StageOptimizer], scale: float) -> None:
    """Make the step of `AdamW.step`, for all groups with equal settings at once. It skips the search of `AdamW.step`
    for hooks, profilers and gradients, which takes longer than the step for layers of some thousand parameters.
    """
    alike: dict[tuple[float, float], list[tuple[nn.Parameter, Tensor, Mapping[str, Tensor]]]] = {}
    for optimizer in optimizers:
        for group in optimizer._torch.param_groups:
            row = alike.setdefault((group["lr"], group["weight_decay"]), [])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    row.append((parameter, parameter.grad, optimizer._torch.state[parameter]))
    common = optimizers[0]._torch.param_groups[0]
    for (rate, decay), row in alike.items():
        if not row:
            continue
        parameters, gradients, states = map(list, zip(*row, strict=True))
        with torch.no_grad():
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            adamw(
                parameters,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=common["betas"][0],
                beta2=common["betas"][1],
                lr=rate,
                weight_decay=decay,
                eps=common["eps"],
                maximize=False,
            )
