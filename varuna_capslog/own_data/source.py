"""A user's data set as a `DataSource`: microbatches of fixed shapes, read with their targets where needed.

A rank that neither loads nor judges knows only the numbers of a minibatch's samples and the shapes of the first batch,
which all others must have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import LateTargets, Minibatch
from varuna_capslog.own_data.loader import Batch, Loader

__all__ = ["DatasetSource"]

_REMEMBERED = 4
"""Microbatches of an evaluation that are kept for its judge, on a rank that both loads and judges."""


class DatasetSource:
    """Samples of one split.

    Args:
        count: of samples.
        specs: of the model's inputs, for a microbatch.
        take: returns the model's inputs of a batch.
        ahead: microbatches that are read before they are needed.
    """

    def __init__(
        self,
        split: str,
        count: int,
        specs: Callable[[int], dict[str, TensorSpec]],
        loader: Loader,
        take: Callable[[Any], dict[str, Tensor]],
        ahead: int,
    ) -> None:
        self._split, self._count, self._specs = split, count, specs
        self._loader, self._take, self.ahead = loader, take, ahead
        self._begun: dict[tuple[int, ...], _Read] = {}

    def __len__(self) -> int:
        return self._count

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Return the description of a minibatch; reads nothing."""
        samples = [list(group) for group in groups]
        minibatch = Minibatch(
            inputs=[self._specs(len(group)) for group in samples],
            targets=[],
            normalisers={"microbatches": float(len(samples))},
            sample_ids=samples,
            recipes=[(epoch, group) for group in samples],
        )
        for index in range(len(samples)):
            minibatch.targets.append(LateTargets(functools.partial(self.batch, minibatch, index)))
        return minibatch

    def begin(self, minibatch: Minibatch, microbatch: int) -> _Read:
        """Begin to read a microbatch: its inputs and its batch, for the loss."""
        epoch, samples = minibatch.recipes[microbatch]
        batch = self._loader.begin(self._split, epoch, samples)
        return _Read(batch, self._take, minibatch.inputs[microbatch], samples)

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Return the inputs of a microbatch. Its batch, and those of the next microbatches, are kept for `batch`."""
        for index in range(microbatch, min(len(minibatch.inputs), microbatch + 1 + self.ahead)):
            self._reading(minibatch, index)
        return self._reading(minibatch, microbatch).result()[0]

    def batch(self, minibatch: Minibatch, microbatch: int) -> Any:
        """Return the batch of a microbatch, for its judge."""
        batch = self._reading(minibatch, microbatch).result()[1]
        self._begun.pop(_key(minibatch, microbatch), None)
        return batch

    def _reading(self, minibatch: Minibatch, microbatch: int) -> _Read:
        key = _key(minibatch, microbatch)
        if key not in self._begun:
            while len(self._begun) >= _REMEMBERED + self.ahead:
                self._begun.pop(next(iter(self._begun)))
            self._begun[key] = self.begin(minibatch, microbatch)
        return self._begun[key]


def _key(minibatch: Minibatch, microbatch: int) -> tuple[int, ...]:
    epoch, samples = minibatch.recipes[microbatch]
    return (epoch, *samples)


class _Read:
    """Inputs and batch of a microbatch that is being read."""

    def __init__(
        self,
        batch: Batch,
        take: Callable[[Any], dict[str, Tensor]],
        specs: Mapping[str, TensorSpec],
        samples: Sequence[int],
    ) -> None:
        self._batch, self._take, self._specs, self._samples = batch, take, specs, samples

    def result(self) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and batch, when they are there. Raises CapslogError where the microbatch cannot be read, or
        differs in shape from the first one.
        """
        batch = self._batch.result()
        inputs = {name: tensor.contiguous() for name, tensor in self._take(batch).items()}
        for name, spec in self._specs.items():
            tensor = inputs[name]
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise CapslogError(
                    f"the samples {list(self._samples)} give the input {name!r} as {list(tensor.shape)} of "
                    f"{tensor.dtype}, but the first ones gave {list(spec.shape)} of {spec.dtype}; let the data set, or "
                    "a collate function (data.collate), pad or crop all samples to one size"
                )
        return inputs, batch
