"""A copy of a layer that makes every step together with its owner, so that no rank need send it the state again.

It gets the step's final gradients and applies them with the same optimizer; its state is then its owner's to the last
bit. It never runs the layer. `Follower` is the one of our engine's layers; the Varuna plugin has one for its pieces.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import take_layers
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.pipeline import EngineOptions
from varuna_capslog.model.chain import Chain
from varuna_capslog.training.layer_state import LayerState, capture, cloned, install

__all__ = ["Follower", "StateFollower"]


class StateFollower(abc.ABC):
    """What followers have in common, whatever their optimizer.

    Args:
        name: of the layer, for errors.
        parameters: the copy's own, by name.
    """

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self._name = name
        self._parameters = parameters

    def state(self, copy: bool) -> LayerState:
        """The layer's state; with `copy=False` the live tensors, which the next `apply` changes."""
        state = self._live()
        return cloned(state) if copy else state

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """Makes a step that was voted for.

        Args:
            update: the owner's; its gradients are used up.
            scale: the verdict's.

        Raises:
            CapslogError: an update of another layer.
        """
        for key, tensor in update.items():
            kind, name = key.split("/", 1)
            if kind == "gradients" and name in self._parameters:
                self._parameters[name].grad = tensor.to(self._parameters[name].device)
            elif not self._take(kind, name, tensor):
                raise CapslogError(f"layer {self._name!r} has nothing to do with {key!r}: an update of another")
        self._step(step, scale)

    @abc.abstractmethod
    def _live(self) -> LayerState:
        """The live state."""

    @abc.abstractmethod
    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        """Takes what else belongs to the step (buffers, running statistics); False if it is not of this layer."""

    @abc.abstractmethod
    def _step(self, step: int, scale: float) -> None:
        """Applies the gradients, which are there, and all that `_take` took; drops both."""


class Follower(StateFollower):
    """One followed layer of our engine.

    Args:
        chain: as the owner's; it is not changed.
        options: the owner's.
        device: where the copy lies; its kernels must be those of the owner's device for equal bits.
        state: to begin with; copied.
    """

    def __init__(
        self, chain: Chain, index: int, options: EngineOptions, device: torch.device, state: Mapping[str, Tensor]
    ) -> None:
        (self._layer,) = take_layers(chain, [index], device, options.precision, ready={})
        super().__init__(self._layer.name, self._layer.parameters)
        self._optimizer = StageOptimizer([self._layer], options.rate, options.weight_decay, options.multipliers)
        self._statistics: dict[int, dict[int, Tensor]] = {}
        install(self._layer, self._optimizer, state)

    def _live(self) -> LayerState:
        return capture(self._layer, self._optimizer, copy=False)

    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        if kind != "statistics" or not self._layer.statistics:
            return False
        microbatch, number = name.split("/")
        self._statistics.setdefault(int(microbatch), {})[int(number)] = tensor.to(self._layer.device)
        return True

    def _step(self, step: int, scale: float) -> None:
        self._optimizer.step(step, scale)
        statistics, self._statistics = self._statistics, {}
        if self._layer.statistics and statistics:
            calls = {microbatch: [found[k] for k in sorted(found)] for microbatch, found in statistics.items()}
            self._layer.statistics.commit(calls)
