"""Captures a model for many sizes: once with a size left open where its code allows that, else once for each size."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from torch import nn

from varuna_capslog.config.reading import Config
from varuna_capslog.model.capture import FixedSize
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.model_workload import InputSpec, ModelWorkload
from varuna_capslog.model.workload import load_workload

__all__ = ["SizedWorkload"]

_EXAMPLE_BATCH = 4
"""Samples of the example with which a model is captured for any batch."""


class SizedWorkload(ModelWorkload):
    """Ordinary model that keeps its captured training chains, for estimates at many sizes. Copies made by `at` share
    the chains.
    """

    _chains: dict[object, tuple[Chain, int | None] | None]
    _opens: Literal["batch", "length"] | None
    _varies: bool

    @classmethod
    def of_config(cls, config: Config, opens: Literal["batch", "length"] | None = None) -> Self:
        """Return the ordinary model of a config, without chains yet. opens: the size that will change, where known."""
        workload, sized = load_workload(config), cls.__new__(cls)
        assert isinstance(workload, ModelWorkload), "only ordinary models have sizes"
        vars(sized).update(vars(workload), _chains={}, _opens=opens, _varies=False)
        sized._size = config.train.microbatch_size
        return sized

    @property
    def batch(self) -> int:
        """Samples of a microbatch."""
        return self._size

    def at(self, batch: int | None = None, length: int | None = None) -> Self:
        """Return the model at another batch (samples of a microbatch) or another length (tokens of `input_ids`)."""
        sized = copy.copy(self)
        if batch is not None:
            sized._size, sized._opens, sized._captured_size = batch, "batch", None
        if length is not None:
            before = self.length
            sized._specs = tuple(
                replace(
                    spec, shape=tuple(length if at and size == before else size for at, size in enumerate(spec.shape))
                )
                for spec in self._specs
            )
            sized._opens, sized._captured_size = "length", None
        return sized

    @property
    def length(self) -> int | None:
        """Tokens of `input_ids`; None where the model takes none, or before its first capture."""
        return next((spec.shape[-1] for spec in self._specs if spec.name == "input_ids"), None)

    def build_training_chain(self) -> Chain:
        """Return the chain for these sizes, kept or captured now. Raises as `ModelWorkload.build_training_chain`."""
        sizes = self._size, tuple(spec.shape[1:] for spec in self._specs)
        kept = self._chains.get(sizes) or self._open_chain()
        if kept is None:
            chain = super().build_training_chain()
            sizes = self._size, tuple(spec.shape[1:] for spec in self._specs)
            kept = self._chains[sizes] = chain, self._captured_size
        chain, self._captured_size = kept
        return chain

    def _open_chain(self) -> tuple[Chain, int | None] | None:
        """Return the chain with the changing size left open; None where no size changes, or the model fixes it."""
        if self._opens is None or (self._settings.inputs and self._opens == "length"):
            return None
        if self._opens == "batch" and self._size < 2:  # torch takes a size of 1 for a constant
            return None
        others = tuple(spec.shape[1:] for spec in self._specs) if self._opens == "batch" else self._size
        if (key := (self._opens, others)) not in self._chains:
            self._chains[key] = self._captured_open()
        return self._chains[key]

    def _captured_open(self) -> tuple[Chain, int | None] | None:
        example = copy.copy(self)
        example._varies = True
        if self._opens == "batch":
            example._size = _EXAMPLE_BATCH
        example._specs = tuple(replace(spec, least=self._open_sizes(spec)) for spec in self._specs)
        if not any(spec.least for spec in example._specs) or any(spec.choices for spec in example._specs):
            return None
        try:
            return ModelWorkload.build_training_chain(example), None
        except FixedSize:
            return None

    def _from_module(self, model: nn.Module, evaluates: bool | None) -> Chain:
        if not self._varies:
            return super()._from_module(model, evaluates)
        example, cuts = self._examples(1.0, varying=True), self._settings.cut_points
        return Chain.from_module(model, cuts, example, name=self.name, evaluates=evaluates, compares=False)

    def _open_sizes(self, spec: InputSpec) -> Mapping[int, int]:
        if self._opens == "batch":
            return {**spec.least, **({0: 2} if self._has_batch(spec) else {})}
        return {at: 2 for at, size in enumerate(spec.shape) if at and size == self.length}
