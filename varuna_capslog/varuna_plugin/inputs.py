"""A minibatch's inputs cut into microbatches: tensors, lists of targets, nested structures.

Replaces Varuna's `scatter`, which takes dictionaries of tensors only. Sizes are checked: a batch of another size than
Varuna was built for would run with missing microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["Microbatches", "scatter"]


class Microbatches(dict[int, dict[str, Any]]):
    """Inputs that are cut already, by number, for `Varuna.step`: microbatches may have tensors of different shapes.

    Args:
        batches: one dictionary of model inputs per microbatch, as many as Varuna was built for.
        sizes: samples in each, the weights of a mean loss; default: all alike.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]], sizes: Sequence[int] | None = None) -> None:
        super().__init__(enumerate(map(dict, batches)))
        self.sizes = [1] * len(self) if sizes is None else list(sizes)
        if not self or len(self.sizes) != len(self) or min(self.sizes) < 1:
            raise CapslogError(
                f"{len(self)} microbatches with sizes {self.sizes}: at least one microbatch, and one positive "
                "size for each, are needed"
            )


def scatter(inputs: Mapping[str, Any] | Microbatches, batch_size: int, microbatch_size: int) -> Microbatches:
    """Return the inputs of each microbatch.

    A tensor of `batch_size` rows and a list of `batch_size` entries are cut (a list is one entry per sample, whatever
    the entries are); dictionaries, tuples and other lists are cut by entry; a tensor with one row, one without
    dimensions and anything else go to every microbatch as they are.

    Args:
        batch_size: samples in `inputs`.
        microbatch_size: samples per microbatch; the last one may be shorter.

    Raises:
        CapslogError: a tensor with another number of rows, or `Microbatches` of another number.
    """
    count = math.ceil(batch_size / microbatch_size)
    if isinstance(inputs, Microbatches):
        if len(inputs) != count:
            raise CapslogError(
                f"{len(inputs)} microbatches were given, but Varuna was built for {count} "
                f"(batch size {batch_size} per replica, chunk size {microbatch_size})"
            )
        return inputs
    bounds = [(start, min(start + microbatch_size, batch_size)) for start in range(0, batch_size, microbatch_size)]
    batches = [
        {name: _part(value, start, end, batch_size, name) for name, value in inputs.items()} for start, end in bounds
    ]
    return Microbatches(batches, [end - start for start, end in bounds])


def _part(value: Any, start: int, end: int, batch_size: int, name: str) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0 or (value.shape[0] == 1 and batch_size != 1):
            return value
        if value.shape[0] != batch_size:
            raise CapslogError(
                f"input {name!r} has {value.shape[0]} rows, but Varuna was built for {batch_size} samples per replica; "
                "give whole batches (drop_last), a tensor of one row for all samples, or plugin.Microbatches"
            )
        return value[start:end]
    if isinstance(value, list) and len(value) == batch_size:
        return value[start:end]
    if isinstance(value, Mapping):
        return {key: _part(item, start, end, batch_size, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_part(item, start, end, batch_size, f"{name}[{index}]") for index, item in enumerate(value)]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return parts if isinstance(value, list) else tuple(parts)
    return value
