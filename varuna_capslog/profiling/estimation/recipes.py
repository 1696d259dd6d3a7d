"""Results of operators on fake tensors, made again from shapes that were seen before.

Asking torch what an operator returns takes a tenth of a millisecond, and an estimate asks a hundred thousand times,
mostly the same. `Lifetimes` asks here instead: several times faster, the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

__all__ = ["Recipes"]

_MOST = 200_000
_UNCERTAIN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

_New = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_View = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
_Recipe = tuple[type | None, tuple[_New | _View | None, ...]]


class _Unknown(Exception):
    """An argument or a result that no recipe can describe."""


class Recipes:
    """For each operator and the shapes of its arguments: what it returns, anew or as views of which argument."""

    def __init__(self) -> None:
        self._known: dict[object, _Recipe | None] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns in the `FakeTensorMode` that is active."""
        tensors: list[FakeTensor] = []
        try:
            key = (func, _described(args, tensors), _described(tuple(kwargs.items()), tensors))
            hash(key)
        except (_Unknown, TypeError):
            return func(*args, **kwargs)
        if not tensors:
            # nothing to make a result's mode from, and factories cost little
            return func(*args, **kwargs)
        recipe = self._known.get(key)
        if recipe is not None:
            return _made(recipe, tensors)
        result = func(*args, **kwargs)
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _recipe(func, result, tensors)
        return result


def _described(values: Sequence[Any], tensors: list[FakeTensor]) -> tuple[object, ...]:
    """Hashable and equal for what an operator cannot tell apart; collects the tensors. Raises _Unknown."""
    parts: list[object] = []
    for value in values:
        if type(value) is FakeTensor:
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype))
        elif isinstance(value, Tensor):
            raise _Unknown
        elif isinstance(value, (tuple, list)):
            parts.append(_described(value, tensors))
        else:
            # 1, 1.0 and True are equal, but not to an operator
            parts.append((type(value), value))
    return tuple(parts)


def _recipe(func: Any, result: Any, tensors: Sequence[FakeTensor]) -> _Recipe | None:
    if any(tag in func.tags for tag in _UNCERTAIN):
        return None
    several = isinstance(result, (tuple, list))
    storages = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(tensors)}
    outputs: list[_New | _View | None] = []
    for part in result if several else (result,):
        if part is None:
            outputs.append(None)
            continue
        if type(part) is not FakeTensor or part.layout != torch.strided or part.dtype.is_complex:
            return None
        if any(part is tensor for tensor in tensors):
            return None
        shape, stride, storage = tuple(part.shape), part.stride(), part.untyped_storage()
        if (place := storages.get(storage._cdata)) is not None:
            outputs.append((place, shape, stride, part.dtype, int(part.storage_offset())))
            continue
        with no_dispatch():
            plain = torch.empty_strided(shape, stride, dtype=part.dtype, device="meta")
        if part.storage_offset() or plain.untyped_storage().nbytes() != storage.nbytes():
            return None
        outputs.append((shape, stride, part.dtype))
        # two results on one storage are not made by a recipe
        storages[storage._cdata] = -1
    if any(output is not None and output[0] == -1 for output in outputs):
        return None
    return (type(result) if several else None, tuple(outputs))


def _made(recipe: _Recipe, tensors: Sequence[FakeTensor]) -> Any:
    kind, outputs = recipe
    mode, device = tensors[0].fake_mode, tensors[0].fake_device
    made: list[Tensor | None] = []
    for output in outputs:
        if output is None:
            made.append(None)
            continue
        with no_dispatch():
            if len(output) == 3:
                shape, stride, dtype = output
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                place, shape, stride, dtype, offset = output
                meta = torch.empty((0,), dtype=dtype, device="meta")
                meta.set_(tensors[place].untyped_storage(), offset, shape, stride)
        made.append(FakeTensor(mode, meta, device))
    return made[0] if kind is None else kind(made)
