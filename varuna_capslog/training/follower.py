"""A copy of a layer that makes every step together with its owner, so that nobody need send it the state again.

It is given the step's final gradients and running statistics (`PipelineEngine.update_of`) and applies them with the
same optimizer; its state is then its owner's to the last bit. It never runs the layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import take_layers
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.pipeline import EngineOptions
from varuna_capslog.model.chain import Chain
from varuna_capslog.training.layer_state import LayerState, capture, install

__all__ = ["Follower"]


class Follower:
    """One followed layer.

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
        self._optimizer = StageOptimizer([self._layer], options.rate, options.weight_decay, options.multipliers)
        install(self._layer, self._optimizer, state)

    def state(self, copy: bool) -> LayerState:
        """The layer's state; with `copy=False` the live tensors, which the next `apply` changes."""
        return capture(self._layer, self._optimizer, copy)

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """Makes a step that was voted for.

        Args:
            update: the owner's; its gradients are used up.
            scale: the verdict's.

        Raises:
            CapslogError: an update of another layer.
        """
        gradients: dict[str, Tensor] = {}
        statistics: dict[int, dict[int, Tensor]] = {}
        for key, tensor in update.items():
            kind, name = key.split("/", 1)
            if kind == "gradients" and name in self._layer.parameters:
                gradients[name] = tensor.to(self._layer.device)
            elif kind == "statistics" and self._layer.statistics:
                microbatch, number = name.split("/")
                statistics.setdefault(int(microbatch), {})[int(number)] = tensor.to(self._layer.device)
            else:
                raise CapslogError(f"layer {self._layer.name!r} has nothing to do with {key!r}: an update of another")
        for name, gradient in gradients.items():
            self._layer.parameters[name].grad = gradient
        self._optimizer.step(step, scale)
        if statistics:
            calls = {microbatch: [found[k] for k in sorted(found)] for microbatch, found in statistics.items()}
            self._layer.statistics.commit(calls)
