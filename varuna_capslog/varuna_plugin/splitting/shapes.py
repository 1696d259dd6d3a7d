"""What crosses every cut of a model for some inputs, without computing it: a fake forward, once per size of the inputs.

A trimmed stage asks it for the shapes of the dummy tensors that stand for what it would have computed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.varuna_plugin.splitting.tracing import flatten_cut

__all__ = ["CutShapes"]


class _LastCut(Exception):
    """Ends a fake forward: what follows crosses no cut."""


class CutShapes:
    """The shapes at every cut of a model, by the inputs' sizes.

    Args:
        model: whole; it is copied without its parameters' memory, and may be reduced afterwards.
        cut_type: Varuna's CutPoint.
        names: of the CutPoints, in the order of the forward.
    """

    def __init__(self, model: nn.Module, cut_type: type[nn.Module], names: tuple[str, ...]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        with self._mode:
            for parameter in model.parameters():
                hollow = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                memo[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach().clone()
        self._model = copy.deepcopy(model, memo)
        self._found: list[tuple[TensorSpec, ...]] = []
        self._known: dict[Any, list[tuple[TensorSpec, ...]]] = {}
        self._count = len(names)
        points = dict(self._model.named_modules())
        for name in names:
            points[name].cp_func = self._watch(name)

    def __call__(self, inputs: Mapping[str, Any]) -> list[tuple[TensorSpec, ...]]:
        """The specs of each cut's tensors; the microbatch's values are never looked at.

        Raises CapslogError where a shape depends on values.
        """
        leaves, structure = pytree.tree_flatten(dict(inputs))
        described = (
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves
        )
        key = (str(structure), *described)
        if key not in self._known:
            self._known[key] = self._run(leaves, structure)
        return self._known[key]

    def _run(self, leaves: list[Any], structure: Any) -> list[tuple[TensorSpec, ...]]:
        self._found = []
        fakes = [self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # running statistics are copies' business: a fake forward may change them as it likes
        try:
            with self._mode, torch.enable_grad():
                self._model(**pytree.tree_unflatten(fakes, structure))
        except _LastCut:
            pass
        except Exception as error:
            raise CapslogError(
                f"the shapes at the cuts cannot be found without computing ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}): code before a cut asks tensors for their values; move it behind "
                "the last cut, or run all stages"
            ) from error
        return self._found

    def _watch(self, name: str) -> Any:
        def report(*arguments: Any) -> Any:
            tensors, _, _ = flatten_cut(arguments, name)
            self._found.append(tuple(TensorSpec.of(tensor) for tensor in tensors))
            if len(self._found) == self._count:
                raise _LastCut
            return arguments[0] if len(arguments) == 1 else arguments

        return report
