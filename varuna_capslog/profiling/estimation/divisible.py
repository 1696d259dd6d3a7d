"""Finds the parts of a layer that another system could divide among the cards of a stage, from its forward's operators.

The rules are Megatron's for tensor parallelism with sequence parallelism, and for experts: a tensor is divided by
features between two divided matrices, elsewhere by tokens. Only operators and shapes count, not names of modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from varuna_capslog.profiles.record import Divisible
from varuna_capslog.profiling.estimation.operators import tensors_in

__all__ = ["DivisibleMeter"]

_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "linear": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2)}
_PRODUCTS |= {"_grouped_mm": (0, 1), "grouped_mm_fallback": (0, 1)}
"""Operator -> numbers of the arguments with the rows and with the matrix."""
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "t", "transpose"})
"""Operators whose result still counts as the parameter: copies in another dtype or order."""
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "rms_norm"})
_STEPS_OF_A_NORM = 3
"""Operators before the root of a norm that is written as single operators: the mean, the sum with a small number."""


@dataclass(frozen=True)
class _Call:
    """Operator of a forward, with the storages of its inputs and outputs.

    rows, matrix: of a product, an embedding (rows: None) or attention (rows: the keys, matrix: the values).
    row_bytes, matrix_bytes: elements that strides of 0 repeat count once; of a clone, the bytes of its input. width: of
    the last dimension. norm: True where it normalises over the last dimension.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    rows: int | None = None
    matrix: int | None = None
    row_bytes: int = 0
    matrix_bytes: int = 0
    width: int = 0
    norm: bool = False
    seconds: float = 0.0


@dataclass
class _Sums:
    """Sums of one pass over the calls."""

    gathered: int = 0
    scattered: int = 0
    attended: int = 0
    exchanged: int = 0
    expert_rows: int = 0
    expert_seconds: float = 0.0
    matrices: set[int] = field(default_factory=set)
    experts: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)


class DivisibleMeter:
    """Observer of the operators of one forward of a layer.

    parameters: of the layer, each once. seconds: of an operator, from its arguments and result.
    """

    def __init__(self, parameters: Sequence[Tensor], seconds: Callable[..., float]) -> None:
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._parameters = {_storage(parameter): number for number, parameter in enumerate(parameters)}
        self._seconds, self._has_experts = seconds, any(len(shape) == 3 for shape in self._shapes)
        self._calls: list[_Call] = []

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = func.overloadpacket.__name__
        inputs, outputs = list(tensors_in((*args, *kwargs.values()))), list(tensors_in((result,)))
        if not outputs:
            return
        more: dict[str, Any] = {}
        if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
            left, right = (args[place] for place in _PRODUCTS.get(name, (1, 2)))
            more = {"rows": _storage(left), "matrix": _storage(right)}
            more |= {"row_bytes": _unique_bytes(left), "matrix_bytes": _unique_bytes(right)}
            if self._has_experts:
                more["seconds"] = self._seconds(func, args, kwargs, result)
        elif name == "embedding":
            more = {"matrix": _storage(args[0])}
        elif name == "clone":
            more = {"row_bytes": _unique_bytes(args[0])}
        elif name in _NORMS or name == "mean":
            more = {"width": args[0].shape[-1] if args[0].dim() else 0, "norm": name in _NORMS}
        elif name == "rsqrt":  # a mean just before a root belongs to a norm, not to a loss
            recent = self._calls[-_STEPS_OF_A_NORM:]
            self._calls[-_STEPS_OF_A_NORM:] = [replace(call, norm=call.norm or call.name == "mean") for call in recent]
        places = tuple(map(_storage, inputs)), tuple(map(_storage, outputs))
        self._calls.append(_Call(name, *places, _unique_bytes(outputs[0]), **more))

    @property
    def count(self) -> int:
        """Number of operators so far."""
        return len(self._calls)

    def divisible(self) -> Divisible:
        """Return the parts that the forward has shown."""
        whole = self._routers()
        while (sums := self._passed(whole)).whole - whole:
            whole |= sums.whole
        sizes = [math.prod(shape) for shape in self._shapes]
        total = sum(sizes) or 1

        def shares(numbers: set[int]) -> tuple[float, float]:
            chosen = [sizes[number] / total for number in numbers]
            return sum(chosen), max(chosen, default=0.0)

        matrices, experts = shares(sums.matrices), shares(sums.experts)
        return Divisible(
            matrices[0],
            experts[0],
            matrices[1],
            experts[1],
            sums.gathered,
            sums.scattered,
            sums.attended,
            sums.exchanged,
            sums.expert_rows,
            sums.expert_seconds,
        )

    def _routers(self) -> set[int]:
        """Return the numbers of the matrices with a row for each expert, which every card has whole."""
        counts = {shape[0] for shape in self._shapes if len(shape) == 3}
        return {number for number, shape in enumerate(self._shapes) if len(shape) == 2 and shape[0] in counts}

    def _passed(self, whole: set[int]) -> _Sums:
        """Follow the calls once. whole: matrices that no card divides; the result's `whole` has more such matrices."""
        sums, parameter_of = _Sums(), dict(self._parameters)
        divided: set[int] = set()  # storages with divided features
        gathered: set[int] = set()  # storages that were gathered as inputs of matrices
        routed: set[int] = set()  # storages of rows at their experts
        behind: dict[int, int] = {}  # storage -> the matrix whose whole output it holds
        thin: dict[int, int] = {}  # storage of repeated keys or values -> their bytes before the repetition
        for call in self._calls:
            number = None if call.matrix is None else parameter_of.get(call.matrix)
            state = any(place in divided for place in call.inputs)
            at_experts = any(place in routed for place in call.inputs)
            origin = next((behind[place] for place in call.inputs if place in behind), None)
            if call.norm:
                if origin is not None and 2 * call.width > self._shapes[origin][0]:
                    sums.whole.add(origin)
            elif call.name == "embedding" and number is not None:
                sums.matrices.add(number)
                sums.scattered += call.output_bytes
                state, origin = False, None
            elif number is not None and call.rows is not None and len(self._shapes[number]) == 3:
                sums.experts.add(number)
                sums.exchanged += 0 if at_experts else call.row_bytes
                sums.expert_rows += call.row_bytes + call.output_bytes
                sums.expert_seconds += call.seconds
                at_experts, origin = True, None
            elif number is not None and call.rows is not None and len(self._shapes[number]) == 2:
                at_experts, origin = False, None
                if number in whole:
                    state = False
                elif call.rows in divided:
                    sums.matrices.add(number)
                    sums.scattered += call.output_bytes
                    state = False
                else:
                    sums.matrices.add(number)
                    sums.gathered += 0 if call.rows in gathered else call.row_bytes
                    gathered.add(call.rows)
                    state, origin = True, number
            elif call.rows is not None and number is None:  # attention, fused or as two products
                fused = call.name.startswith("_scaled_dot_product")
                sums.attended += thin.get(call.matrix or 0, call.matrix_bytes)
                sums.attended += thin.get(call.rows, call.row_bytes) if fused else 0
            copied = parameter_of.get(call.inputs[0]) if call.inputs and call.name in _COPIES else None
            for place in call.outputs:
                if place not in call.inputs:
                    for states in (divided, gathered, routed):
                        states.discard(place)
                    behind.pop(place, None)
                    thin.pop(place, None)
                    parameter_of.pop(place, None)
                if state:
                    divided.add(place)
                if at_experts:
                    routed.add(place)
                if origin is not None:
                    behind[place] = origin
                if copied is not None:
                    parameter_of[place] = copied
                if call.name == "clone" and call.row_bytes < call.output_bytes:
                    thin[place] = call.row_bytes
        return sums


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unique_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; elements that strides of 0 repeat count once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride) * tensor.itemsize if tensor.numel() else 0
