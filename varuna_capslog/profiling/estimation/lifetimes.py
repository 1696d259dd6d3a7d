"""Follows the lifetime of every storage while a program runs on fake tensors: the requests that an allocator would get.

Stages and devices have no part here: a function from `quirks` returns the temporary memory of kernels. `Recipes` makes
the results of operators.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.model.hollow import a_number
from varuna_capslog.profiling.estimation.allocator import round_up

__all__ = ["Lifetimes", "Recipes", "Temporary"]

Temporary = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], Sequence[int]]
"""(operator, its arguments, its keywords, its result) -> blocks, in bytes, that its kernel holds while it runs."""

# prim.device, which returns a tensor's device, is the most frequent operator
_prim_device = torch.ops.prim.device.default
_item = torch.ops.aten._local_scalar_dense.default
_add = torch.ops.aten.add.Tensor
_index_put = torch.ops.aten.index_put.default
_MORE = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"})
_OWN_USES, _OWN_STORAGE_USES, _OWN_REFERENCES = 4, 2, 4
"""References (torch's to tensor and storage, Python's) to a gradient that only autograd's buffer holds, counted within
a dispatch mode: the reference of the buffer and those of the call."""


class Lifetimes(TorchDispatchMode):
    """Records every allocation and release of storages, beginning with those of `held`.

    Enter it inside a `FakeTensorMode`. A storage counts from the operator that makes it until nothing refers to it (a
    weak reference reports the end). Reading a number from a fake tensor returns `a_number`, so that programs that
    count, scale or log continue.

    Args:
        temporary: temporary memory of kernels; None: no temporary memory.
        held: tensors that exist at the beginning.
        recipes: shared by similar runs; None: new recipes.
        on_host: True where the simulated device is the host, which also holds actual tensors (`with_actual_tensors`).
        block_bytes: granularity to which the device's allocator rounds requests up.

    Attributes:
        events: (key, bytes) of an allocation and (key, 0) of its release, in order; `allocator.replay` reads them.
        live_bytes, peak_bytes: current bytes, and their peak so far, in whole blocks.
        lately_bytes: the peak since the last time that a caller set it to `live_bytes`.
        observer: called with every operator, its arguments, keywords and result; or None.
    """

    def __init__(
        self,
        temporary: Temporary | None = None,
        held: Iterable[Tensor] = (),
        recipes: Recipes | None = None,
        on_host: bool = False,
        block_bytes: int = 1,
    ) -> None:
        super().__init__()
        self._recipes = recipes or Recipes()
        self._temporary = temporary
        self._on_host, self._block_bytes = on_host, block_bytes
        self._followed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made_by: dict[int, int] = {}
        self._keys = 0
        self.events: list[tuple[int, int]] = []
        self.live_bytes = self.peak_bytes = self.lately_bytes = 0
        self.observer: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], object] | None = None
        for tensor in held:
            self._follow(tensor, -1)

    @contextlib.contextmanager
    def with_actual_tensors(self) -> Iterator[None]:
        """Follow, from the end of the block on, actual (not fake) tensors that the block made and that are still alive.

        `torch.utils.checkpoint` makes such tensors of the random number state. No operator shows them, so they are
        searched in the garbage collector's youngest generation, which holds only objects of the block, since the
        collector is off in the block.
        """
        collects = gc.isenabled()
        gc.disable()
        gc.collect(0)
        try:
            yield
        finally:
            if collects:
                gc.enable()
        if self._on_host:
            for tensor in gc.get_objects(0):
                # actual tensors of single numbers belong to fake tensors, which keep such numbers
                if type(tensor) is Tensor and tensor.numel() > 1:
                    self._follow(tensor, -1)

    def _allocated(self, num_bytes: int) -> int | None:
        if num_bytes <= 0:
            return None
        self._keys += 1
        self.events.append((self._keys, num_bytes))
        self.live_bytes += round_up(num_bytes, self._block_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.lately_bytes = max(self.lately_bytes, self.live_bytes)
        return self._keys

    def _released(self, key: int, num_bytes: int) -> None:
        self.events.append((key, 0))
        self.live_bytes -= round_up(num_bytes, self._block_bytes)

    def _follow(self, tensor: Tensor, node: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        reference_before = self._followed.get(address)
        if reference_before is not None and reference_before() is not None:
            return
        size = storage.nbytes()
        key = self._allocated(size)

        def gone(_: object, address: int = address, key: int | None = key, size: int = size) -> None:
            if self._followed.get(address) is reference:
                del self._followed[address]
                self._made_by.pop(address, None)
            if key is not None:
                self._released(key, size)

        reference = weakref.ref(storage, gone)
        self._followed[address] = reference
        self._made_by[address] = node

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not hide the dispatch of every operator from its compiler: nothing is
        compiled, and hiding takes a third of an estimate's time.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _prim_device:
            return args[0].fake_device
        if func is _item:
            return a_number(args[0].dtype)
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if func is _add and node is not None and self._adds_in_place(args, kwargs, number):
            result = args[0]
        elif func is _index_put and node is not None and self._made_here(args[0], number):
            # index_backward writes into its tensor of zeros, but makes another tensor for subclasses of Tensor
            result = args[0]
        elif _changes_first_only(func):
            result = args[0] if func._schema.returns else None
        else:
            result = self._recipes.call(func, args, kwargs)
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor):
                    self._follow(part, number)
        if self._temporary is not None:
            blocks = [(self._allocated(size), size) for size in self._temporary(func, args, kwargs, result)]
            for key, size in blocks:
                if key is not None:
                    self._released(key, size)
        if self.observer is not None:
            self.observer(func, args, kwargs, result)
        return result

    def _made_here(self, tensor: Tensor, node: int) -> bool:
        return self._made_by.get(tensor.untyped_storage()._cdata) == node

    def _adds_in_place(self, args: Sequence[Any], kwargs: Mapping[str, Any], node: int) -> bool:
        """True where autograd, with ordinary tensors, would add the second gradient in place to the first gradient.

        For tensors of a subclass, such as fake tensors, autograd makes a new tensor instead. It adds in place where
        nothing else holds the first gradient (torch/csrc/autograd/input_buffer.cpp). The sum is autograd's, not part of
        a formula, if the node that has just run did not make the first gradient.
        """
        first, second = args[0], args[1]
        if kwargs or not isinstance(second, Tensor) or torch.is_grad_enabled():
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        storage = first.untyped_storage()
        return (
            first._use_count() <= _OWN_USES
            and sys.getrefcount(first) <= _OWN_REFERENCES
            and torch._C._storage_Use_Count(storage._cdata) <= _OWN_STORAGE_USES
            and self._made_by.get(storage._cdata) != node
            and _is_dense(first)
        )


@functools.cache
def _changes_first_only(func: Any) -> bool:
    """True for an operator that only writes into its first argument (a tensor or a list of tensors): without values it
    need not run. Operators that change a shape or a storage must run.
    """
    schema = func._schema
    if not schema.name.endswith("_") or torch.Tag.inplace_view in func.tags or schema.name in _MORE:
        return False
    if "_foreach_" in schema.name or "_fused_" in schema.name:
        return not schema.returns
    return len(schema.returns) == 1 and schema.arguments[0].is_write


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() or tensor.is_contiguous()


# -- results of operators

_MOST = 200_000
_UNCERTAIN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)

_New = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_View = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
_Recipe = tuple[type | None, tuple[_New | _View | None, ...]]


class _Unknown(Exception):
    """Argument or result that no recipe can describe."""


class Recipes:
    """Results of each operator for the shapes of its arguments: new tensors, or views of one argument.

    Computing an operator's results in torch takes a tenth of a millisecond, and an estimate does it a hundred thousand
    times, mostly for the same shapes. Making equal results for known shapes is several times faster.
    """

    def __init__(self) -> None:
        self._known: dict[object, _Recipe | None] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `func(*args, **kwargs)` in the active `FakeTensorMode`."""
        tensors: list[FakeTensor] = []
        try:
            key = (func, _described(args, tensors), _described(tuple(kwargs.items()), tensors))
            recipe = self._known.get(key)
        except (_Unknown, TypeError):
            return func(*args, **kwargs)
        if not tensors:
            # no argument has the mode for a result, and factory functions take little time
            return func(*args, **kwargs)
        if recipe is not None:
            return _made(recipe, tensors)
        result = _as_kernels_do(func, args, func(*args, **kwargs))
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _recipe(func, result, tensors)
        return result


_aten = torch.ops.aten
_NORMS = {
    _aten.native_layer_norm.default: 2,
    _aten.native_group_norm.default: 1,
    _aten.native_batch_norm.default: 1,
}
"""Normalisations -> place of the weight among the arguments."""


def _as_kernels_do(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return the result with the dtypes of the kernels: they give the statistics of a normalisation the dtype of its
    parameters, fake tensors the dtype of the activations (torch 2.14).
    """
    weight = args[_NORMS[func]] if func in _NORMS else None
    if weight is None or weight.dtype == result[1].dtype:
        return result
    return (result[0], *(torch.empty_like(statistic, dtype=weight.dtype) for statistic in result[1:]))


def _described(values: Sequence[Any], tensors: list[FakeTensor]) -> tuple[object, ...]:
    """Return a key that is equal for arguments that an operator cannot distinguish; add the tensors to `tensors`.
    Raises _Unknown for arguments that no recipe can describe.
    """
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
        # recipes do not make two results on one storage
        storages[storage._cdata] = -1
    if any(output is not None and output[0] == -1 for output in outputs):
        return None
    return (type(result) if several else None, tuple(outputs))


def _made(recipe: _Recipe, tensors: Sequence[FakeTensor]) -> Any:
    kind, outputs = recipe
    mode, device = tensors[0].fake_mode, tensors[0].fake_device
    state = _state_of(mode, device)
    made: list[Tensor | None] = []
    for output in outputs:
        if output is None:
            made.append(None)
            continue
        with torch._C._DisableTorchDispatch():
            if len(output) == 3:
                shape, stride, dtype = output
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                place, shape, stride, dtype, offset = output
                meta = torch.empty((0,), dtype=dtype, device="meta")
                meta.set_(tensors[place].untyped_storage(), offset, shape, stride)
        part = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        vars(part).update(state)
        made.append(part)
    return made[0] if kind is None else kind(made)


@functools.lru_cache(maxsize=8)
def _state_of(mode: Any, device: torch.device) -> dict[str, Any]:
    """Return the attributes of a new fake tensor, since torch's constructor would take most of an estimate's time."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty((0,), device="meta")
    return dict(vars(FakeTensor(mode, meta, device)))
