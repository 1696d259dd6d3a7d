"""A chain as one `nn.Module` with a Varuna CutPoint before every layer but the first.

What Varuna runs for `engine: varuna`, and a way to give any `Chain` to a script of one's own. Cut i of the chain is
CutPoint i: what crosses it is what the chain says, so a plan for the chain is a cut list for Varuna.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.engine.stage import LossFunction
from varuna_capslog.model.chain import Chain

__all__ = ["ChainModule"]


class ChainModule(nn.Module):
    """The chain's layers as children `layers.0`, `layers.1`, ...; the modules are the chain's own.

    Args:
        cut: Varuna's CutPoint.
        loss: of the workload; computed by the last stage.
        seed: of the run. Every layer draws from (seed, step, microbatch, layer), as on our own engine.

    Attributes:
        parts: by microbatch, the loss parts of forwards in training mode on the last stage, until they are cleared.
    """

    def __init__(self, chain: Chain, cut: type[nn.Module], loss: LossFunction, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in chain.layers)
        self.points = nn.ModuleList(cut() for _ in chain.layers[1:])
        self._wiring = [(layer.reads, layer.writes) for layer in chain.layers]
        self._crossing = [chain.crossing(cut) for cut in range(len(chain))]
        self._outputs, self._loss, self._seed = chain.outputs, loss, seed
        self.parts: dict[int, dict[str, float]] = {}

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        targets: Any = None,
        normalisers: Mapping[str, float] | None = None,
        step: int = 0,
        microbatch: int = 0,
    ) -> Any:
        """One microbatch.

        Args:
            inputs: the chain's; only the first stage looks at them.
            targets, normalisers: for the loss; only the last stage looks at them.

        Returns:
            The loss in training mode, else the chain's outputs by name.
        """
        values: dict[str, Any] = dict(inputs)
        device = next(self.parameters()).device
        for index, (layer, (reads, writes)) in enumerate(zip(self.layers, self._wiring, strict=True)):
            if index > 0:
                names = self._crossing[index]
                crossed = self.points[index - 1](*[values.get(name) for name in names])
                values = dict(zip(names, (crossed,) if len(names) == 1 else crossed, strict=True))
            self._seed_for(device, step, microbatch, index)
            result = layer(*[values.get(name) for name in reads])
            values.update(zip(writes, result if isinstance(result, tuple) else (result,), strict=True))
        outputs = {name: values[name] for name in self._outputs}
        if not self.training:
            return outputs
        self._seed_for(device, step, microbatch, len(self.layers))
        parts = self._loss(outputs, targets, normalisers or {})
        self.parts[microbatch] = {name: float(part.detach()) for name, part in parts.items()}
        return parts["loss"]

    def _seed_for(self, device: torch.device, step: int, microbatch: int, layer: int) -> None:
        if self.training:
            seed_layer(device, self._seed, step, microbatch, layer)
