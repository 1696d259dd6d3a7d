"""Captures models that ask whether a tensor is finite, as Hugging Face's DETR family does in training.

`if not torch.isfinite(x).all(): x = torch.clamp(x, ...)` is a branch on values, which a graph cannot hold. `export`
captures such a model on the path of finite values. Only such questions are answered here; any other branch on values
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FiniteValues"]

_ANSWERS = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
"""Answer to each question, for every value."""
_KEPT = ("all", "any", "logical_or", "logical_and", "__or__", "__and__")
"""Operations on tensors of one answer that give a tensor of this answer."""
_ASKED = ("__bool__", "item")


class FiniteValues(TorchFunctionMode):
    """Mode in which Python code that asks whether values are finite is told that they are.

    An engine refuses a step whose loss or gradients are not finite anyway. A model that would have clamped an infinite
    value ends with that refusal instead.
    """

    def __init__(self) -> None:
        super().__init__()
        # holds the tensors as well, so that an id is not used again
        self._known: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ASKED and (answered := self._known.get(id(args[0]))) is not None:
            return answered[1]
        result = func(*args, **(kwargs or {}))
        answer = _ANSWERS.get(name)
        if answer is None and name in _KEPT:
            answers = {
                self._known.get(id(argument), (None, None))[1] for argument in args if isinstance(argument, Tensor)
            }
            answer = answers.pop() if len(answers) == 1 else None
        if answer is not None and isinstance(result, Tensor):
            self._known[id(result)] = result, answer
        return result
