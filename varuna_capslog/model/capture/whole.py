"""Makes a model that no graph can stand for one layer: its own Python runs at every step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.export import OutputName, named_leaves, paths_of
from varuna_capslog.model.capture.exporting import bare
from varuna_capslog.model.capture.opaque import OpaqueCalls
from varuna_capslog.model.capture.python_calls import CallShape, WholeModel
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.capture.trial import try_model
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.training_modes import freeze_layers, in_training

__all__ = ["whole_layer"]


def whole_layer(
    model: nn.Module,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    outputs: Sequence[str] | None,
    cut_points: Sequence[str] | None,
    why: str,
) -> CapturedLayers:
    """Return the model as one layer, and the names of the tensors that enter and leave it, as a capture names them.

    Args:
        example: positional and keyword arguments.
        outputs, cut_points: as for `capture_layers`.
        why: no graph can stand for it.

    Raises:
        CapslogError: cut points, of which it has none; an unknown output; a result of a class that torch does not know.
    """
    if cut_points:
        raise CapslogError(
            f"cut point {cut_points[0]!r} lies in the {type(model).__name__}, which runs as a whole ({why}); leave the "
            "cut points out"
        )
    arguments = bare(example[0]), {name: bare(value) for name, value in example[1].items()}
    with in_training(model):
        _, result = try_model(model, *arguments, OpaqueCalls({}))
    _check_result(model, result)
    names = _input_names(model, arguments)
    leaves = [name for name, leaf in named_leaves(result, names)]
    tensors = [isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)]
    places = {name: at for at, (name, tensor) in enumerate(zip(leaves, tensors, strict=True)) if tensor}
    if not places:
        raise CapslogError("the model returns no tensor, so there is nothing to take a loss of")
    for name in outputs or ():
        if name not in places:
            raise CapslogError(f"outputs={list(outputs or ())} names {name!r}; the model returns {list(places)}")
    writes = tuple(places) if outputs is None else tuple(outputs)
    module = WholeModel(model, CallShape.of(arguments, result), [places[name] for name in writes], why)
    named = [OutputName(name) if name in places else leaf for name, leaf in named_leaves(result, names)]
    module.meta["result"] = pytree.tree_unflatten(named, pytree.tree_structure(result))
    layers = [Layer(_NAME, module, tuple(names), writes)]
    freeze_layers(layers, model)
    return layers, tuple(names), writes


_NAME = "model"


def _check_result(model: nn.Module, result: Any) -> None:
    """Refuse objects in a model's result in which torch finds no tensors."""
    for leaf in pytree.tree_leaves(result):
        kind = type(leaf)
        if isinstance(leaf, (Tensor, *_PLAIN)) or kind.__module__ == "torch":
            continue
        advice = "return a tuple or dict of tensors"
        if kind.__name__.endswith("Cache"):
            advice = "set use_cache=False in its config, or return tensors only"
        raise CapslogError(
            f"the {type(model).__name__} returns a {kind.__module__}.{kind.__qualname__}, in which torch finds no "
            f"tensors; {advice}"
        )


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)


def _input_names(model: nn.Module, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors that the model takes, in order, as torch's export makes them."""
    positional, keywords = arguments
    parameters = inspect.signature(model.forward).parameters
    fixed = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    variadic = next(
        (name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_POSITIONAL), "args"
    )
    named: list[tuple[str, ...]] = [(name,) for name in fixed[: len(positional)]]
    named += [(variadic, str(number)) for number in range(len(positional) - len(named))]
    trees = [*zip(named, positional, strict=True), *(((name,), value) for name, value in keywords.items())]
    names: list[str] = []
    for name, tree in trees:
        for path, leaf in paths_of(tree, name):
            if isinstance(leaf, Tensor):
                text = "_".join(re.sub(r"[^a-zA-Z0-9]", "_", part) for part in path)
                names.append(text if text not in names else f"{text}_{len(names)}")
    return names
