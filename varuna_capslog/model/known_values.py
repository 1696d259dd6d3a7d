"""Values of tensors that derive from a model's inputs and from constants alone, kept beside tensors without values.

Plans are made on fake tensors. Code that counts a mask's places, or takes sizes from a table among the inputs, runs
there if these values are known: operators on known tensors are carried out on small real tensors, too. Weights, and
what is computed from them, have no values, so that code that decides by these is still refused.

torch's own `fake_tensor_propagate_real_tensors` does not do: it gives every real tensor a value, weights included, and
sizes that depend on values become symbols, in which bytes and FLOPs cannot be counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Known", "KnownValues"]

_MOST_FLOATS = 1 << 20
"""Elements of the largest floating-point tensor whose values are known; views of it may have more."""
_MOST_NUMBERS = 1 << 24
"""The same for whole numbers and truth values, such as a mask of 4096 x 4096 positions."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_ITEM = _aten._local_scalar_dense.default
_FRESH = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""Operators on a constant that code has written down, such as `torch.tensor([1, 2])`."""
_COPIES = (_aten.detach.default, _aten.alias.default)
_OF_SHAPES = frozenset(
    getattr(_aten, name)
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
)
"""Operators that read no values, only the shape and type of a tensor."""
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Known:
    """Known values of a tensor; equal values are equal objects, and copies share them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu()

    @classmethod
    def of(cls, tensor: Tensor) -> Known | None:
        """Return the values of a real tensor; None for a tensor that is too large to keep."""
        return cls(tensor) if _is_small(tensor) else None

    @cached_property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """Type, shape and digest of the values."""
        values = self.tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return str(self.tensor.dtype), tuple(self.tensor.shape), hashlib.sha256(values).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.key)

    def __deepcopy__(self, memo: object) -> Known:
        return self


class KnownValues(TorchDispatchMode):
    """Mode in which known tensors keep their values. Enter it inside a `FakeTensorMode`, or with real tensors, of which
    it finds those that derive from known ones.

    Attributes:
        used: True after code has read a value, or made a tensor whose size depends on values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()
        """Known tensor -> its values, or None where it is a real tensor itself."""
        self._learns = self._guesses = False
        self.used = False

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Let what code computes in the block from known tensors and constants be known, also by `torch.tensor` from a
        list of tensors, which it would read without any operator. Outside, only what a backward keeps stays known.
        """
        self._learns, self._guesses = True, False
        try:
            with _Lists():
                yield
        finally:
            self._learns = False

    def add(self, tensor: Tensor, value: Tensor | None) -> None:
        """Make a tensor known, unless it is large. value: is copied, since code may write into the tensor; None for a
        real tensor.
        """
        if not _is_small(tensor):
            return
        with no_dispatch():
            self._values[tensor] = None if value is None else value.detach().clone()

    def of(self, arguments: Any) -> tuple[Known | None, ...]:
        """Return the present values of the tensors in a tree of arguments, in order; None for unknown ones."""
        tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
        with no_dispatch():
            return tuple(Known(self._value(tensor).clone()) if tensor in self._values else None for tensor in tensors)

    def _value(self, tensor: Tensor) -> Tensor:
        value = self._values[tensor]
        return tensor.detach() if value is None else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_known = self._is_known(func, tensors)
        by_values = is_known and any(tag in func.tags for tag in _BY_VALUES)
        self.used |= by_values
        # a number that was read from an unknown tensor is a guess, and may be in all that follows
        self._guesses |= func is _ITEM and not is_known
        if by_values and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            values = self._on_values(func, args, kwargs)
            result = pytree.tree_map_only(Tensor, _without_values, values)
            self._learn(result, values)
            return result
        chosen, given = self._selecting(func, args)
        result = chosen(*given, **kwargs)
        if is_known and self._keeps_small(func, result):
            fake = any(isinstance(part, FakeTensor) for part in pytree.tree_leaves(result))
            self._learn(result, self._on_values(func, args, kwargs) if fake else None)
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return result

    def _is_known(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """True where an operator's result derives from inputs and constants alone."""
        if self._guesses or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if not self._learns:
            return func in _COPIES and tensors[0] in self._values
        return func in _FRESH or func.overloadpacket in _OF_SHAPES or all(tensor in self._values for tensor in tensors)

    @staticmethod
    def _keeps_small(func: Any, result: Any) -> bool:
        if all(returned.alias_info is not None for returned in func._schema.returns):
            return True  # views and changes of tensors that are there
        parts = [part for part in pytree.tree_leaves(result) if isinstance(part, Tensor)]
        return all(map(_is_small, parts))

    def _on_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operator on the values of its arguments, on the CPU."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, FakeTensor):
                return leaf
            if leaf in self._values:
                return self._value(leaf)
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)  # only its shape is read

        with no_dispatch():
            args, kwargs = pytree.tree_map(real, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs)

    def _selecting(self, func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return operator and arguments with places instead of known masks, so that the result has a known size."""
        if func is _aten.masked_select.default and self._is_mask(args[1]):
            source, mask = torch.broadcast_tensors(*args)
            with no_dispatch():
                size = int(self._value(args[1]).expand(mask.shape).count_nonzero())
            self.used = True
            return _aten.new_empty.default, (source, [size])
        if func in _INDEXING and any(map(self._is_mask, args[1])):
            self.used = True
            return func, (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        return func, args

    def _is_mask(self, index: Any) -> bool:
        return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8) and index in self._values

    def _places(self, index: Any) -> list[Any]:
        if not self._is_mask(index):
            return [index]
        with no_dispatch():
            places = self._value(index).nonzero().unbind(1)
        return [_without_values(place) for place in places]

    def _learn(self, result: Any, values: Any) -> None:
        parts = pytree.tree_leaves(result)
        values_of_parts = [None] * len(parts) if values is None else pytree.tree_leaves(values)
        for part, value in zip(parts, values_of_parts, strict=True):
            if isinstance(part, Tensor):
                self._values.setdefault(part, value)

    def _forget(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forget the tensors that an operator wrote unknown values into, and those that share their memory."""
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        changed = [
            (named | dict(kwargs)).get(argument.name) for argument in func._schema.arguments if argument.is_write
        ]
        tensors = [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, Tensor)]
        if not any(tensor in self._values for tensor in tensors):
            return
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in [tensor for tensor in self._values if tensor.untyped_storage()._cdata in storages]:
            del self._values[tensor]


class _Lists(TorchFunctionMode):
    """Mode in which a tensor is made of the numbers in a list of tensors, each of which is read."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            args = (pytree.tree_map_only(Tensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MOST_FLOATS if tensor.is_floating_point() else _MOST_NUMBERS)


def _without_values(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
