"""The loss of a call of several microbatches, as the engine computes it: separately for each, from its outputs.

An estimate of such calls runs a stage on one microbatch that is as large as all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_capslog.engine.stage import LossFunction
from varuna_capslog.model.chain import TensorSpec

__all__ = ["loss_of_each"]


def loss_of_each(loss: LossFunction, single: Mapping[str, TensorSpec], all_: Mapping[str, TensorSpec]) -> LossFunction:
    """Return a loss function that sums the losses; its targets are a list with those of each microbatch.

    Args:
        single, all_: the outputs of one microbatch, and of all in one call. Tensors that grow in several dimensions are
            split in all of them: no stage that makes them takes several microbatches
            (`engine.grains.sample_dimensions`), but a profile has runs of all layers.
    """
    grown = {
        name: [place for place, size in enumerate(spec.shape) if size != single[name].shape[place]]
        for name, spec in all_.items()
    }

    def part_of(name: str, tensor: Tensor, place: int, count: int) -> Tensor:
        for dimension in grown[name] or [0]:
            tensor = tensor.tensor_split(count, dimension)[place]
        return tensor

    def together(
        outputs: Mapping[str, Tensor], targets: Sequence[Any], normalisers: Mapping[str, float]
    ) -> dict[str, Tensor]:
        total: Tensor | None = None
        for place, target in enumerate(targets):
            part = {name: part_of(name, tensor, place, len(targets)) for name, tensor in outputs.items()}
            part_loss = loss(part, target, normalisers)["loss"]
            total = part_loss if total is None else total + part_loss
        assert total is not None
        return {"loss": total}

    return together
