"""A chain from an ordinary module, without edits to it: the way in for models that were never written as a chain.

`Chain.from_module` calls `capture_layers`. This room never copies a parameter (every layer holds the model's own
`Parameter` objects, so tied weights stay tied) and never gives a layer that could run on something other than what was
captured without saying so.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.by_shape import OneOf, by_shape
from varuna_capslog.model.capture.collapse import collapse_modules
from varuna_capslog.model.capture.export import Captured, OutputName, export_model
from varuna_capslog.model.capture.forks import forked_modules
from varuna_capslog.model.capture.kept import CaptureRequest, Kept
from varuna_capslog.model.capture.modes import merge_modes
from varuna_capslog.model.capture.runtime import FixedSize, SequentialSlice, Varying
from varuna_capslog.model.capture.sizes import localise_sizes
from varuna_capslog.model.capture.split import split_graph
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.training_modes import freeze_layers, in_training

__all__ = [
    "FixedSize",
    "Kept",
    "OneOf",
    "Varying",
    "automatic_cut_points",
    "capture_layers",
    "captured_result",
    "source_lists",
    "source_modules",
]


def capture_layers(
    model: nn.Module,
    cut_points: Sequence[str] | None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | OneOf | None = None,
    outputs: Sequence[str] | None = None,
    evaluates: bool = True,
    kept: Kept | None = None,
) -> CapturedLayers:
    """Splits `model` before each named submodule, in the order in which its forward runs them.

    Returns the layers, and the names of the tensors that enter and leave the chain of them.

    An `nn.Sequential` is split between its children: no example is needed, and any input shape runs. Every other model
    is captured twice by `torch.export` (training and eval mode) with the example's shapes; a layer refuses others than
    the sizes that the example leaves open.

    Args:
        model: stays as it is; the chain's layers hold its own parameters and submodules.
        cut_points: qualified names of submodules (`"layer3.0"`, `"model.layers.2"`); a cut lies *before* each. The
            layer that begins there has that name; the first layer has the name of the first module that runs. One
            layer waits for another only where the model's own modules do (`assign`). None takes `automatic_cut_points`,
            less those that never run, what follows the last block (norm and head), and modules outside the blocks that
            read one tensor side by side, such as the branches of an Inception block (`forks`).
        example_inputs: a dict of keyword arguments or a tuple of positional ones. Entries that are not tensors
            (`use_cache=False`) are fixed in the captured model. A `Varying` tensor leaves some of its sizes open. For
            `OneOf` several examples the model is captured once for the shapes of each.
        evaluates: False captures training mode only; the layers then refuse to run in eval mode.
        kept: where captures of the same model may lie, and are to be kept if it `writes`: then that of training mode
            only too.
        outputs: which of the model's output tensors leave the chain (default: all). They are named by their place in
            the model's result: `logits`, `loss`, `0.1`; a single bare tensor is named `output`.

    Raises:
        FixedSize: the model's code fixes a size that an example leaves open.
        CapslogError: an unknown cut point (the nearest name is suggested), a model whose Python branches on tensor
            values (the module is named), a module that changes a buffer in its forward, a missing example.
    """
    if isinstance(cut_points, str):
        raise CapslogError(
            f"cut_points={cut_points!r} is one string; give a list of submodule names, e.g. [{cut_points!r}]"
        )
    lenient, asked = cut_points is None, cut_points
    if cut_points is None:
        cut_points = list(_list_children(model))
    _check_names(model, cut_points)
    if isinstance(model, nn.Sequential) and not any("." in cut for cut in cut_points):
        return _sequential_layers(model, cut_points), ("x",), ("x",)
    if isinstance(example_inputs, OneOf):
        some = [capture_layers(model, asked, example, outputs, evaluates, kept) for example in example_inputs.examples]
        return by_shape(some, type(model).__name__)
    if example_inputs is None:
        raise CapslogError(
            f"{type(model).__name__} is not an nn.Sequential cut between its children, so capturing it needs "
            "example_inputs: a dict of keyword arguments or a tuple of positional ones"
        )
    arguments, keywords = (
        ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    )
    if "use_cache" in inspect.signature(model.forward).parameters:
        keywords.setdefault("use_cache", False)  # a Hugging Face decoder's key-value cache is no part of training
    request = CaptureRequest(model, asked, (arguments, keywords), outputs, evaluates)
    if kept is not None and (found := kept.read(request)) is not None:
        return found
    alone: Captured | None = None
    try:
        with in_training(model):
            captured = export_model(model, arguments, keywords)
            localise_sizes(captured)
            if lenient:
                cut_points = [*forked_modules(captured, model, cut_points), *cut_points] or automatic_cut_points(model)
            collapse_modules(captured, model, cut_points)
            train_only: str | None = _NOT_ASKED
            if evaluates:
                alone = captured.copy() if kept is not None and kept.writes else None
                model.eval()
                try:
                    in_eval = export_model(model, arguments, keywords)
                    localise_sizes(in_eval)
                    collapse_modules(in_eval, model, cut_points)
                except CapslogError as error:
                    train_only = f"in eval mode it cannot be captured ({error})"
                else:
                    train_only = merge_modes(captured, in_eval, model)
    except FixedSize as error:
        if kept is not None and kept.writes:
            kept.refuse(request, error)
        raise
    layers = split_graph(captured, model, cut_points, outputs, train_only, lenient)
    if kept is not None and kept.writes:
        kept.write(request, layers)
        if alone is not None:
            trained = split_graph(alone, model, cut_points, outputs, _NOT_ASKED, lenient)
            kept.write(replace(request, evaluates=False), trained)
    return layers


_NOT_ASKED = "nobody asked for its eval mode"


def automatic_cut_points(model: nn.Module) -> list[str]:
    """Every repeated block, as far as it is known without an example: the children of the model's outermost ModuleLists
    and Sequentials.

    A child that is itself a list of modules of one class (`layer1` of a ResNet within `features`) gives its own
    children; a model that is an nn.Sequential gives its direct children only, which needs no capture.

    Raises:
        CapslogError: the model has no such list.
    """
    found = _list_children(model)
    if not found:
        raise CapslogError(
            f"{type(model).__name__} has no ModuleList or Sequential of two or more modules to cut at; "
            "name the cut points"
        )
    return found


def _list_children(model: nn.Module) -> list[str]:
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    return list(_blocks(model, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not isinstance(child, _LISTS) or len(child) < 2:
            yield from _blocks(child, f"{path}.")
            continue
        for inner_name, inner in child.named_children():
            inner_path = f"{path}.{inner_name}"
            if isinstance(inner, _LISTS) and len(inner) > 1 and len({type(block) for block in inner}) == 1:
                yield from (f"{inner_path}.{block}" for block, _ in inner.named_children())
            else:
                yield inner_path


_LISTS = (nn.ModuleList, nn.Sequential)


def source_modules(layer: Layer) -> tuple[str, ...] | None:
    """Qualified names, in the captured model, of the modules that this layer runs (innermost ones, by first use).

    None for a layer that `capture_layers` did not make.
    """
    found = getattr(layer.module, "meta", {}).get("source_modules")
    return None if found is None else tuple(found)


def captured_result(layers: Sequence[Layer], outputs: Mapping[str, Any]) -> Any:
    """What a captured model returns, as its own code builds it, from the tensors that leave its chain, by name.

    Whatever else the model returned with its example (None, numbers) is in its place as it was.
    """
    result = getattr(layers[-1].module, "meta", {}).get("result", OutputName("x"))
    return pytree.tree_map(lambda leaf: outputs[leaf] if isinstance(leaf, OutputName) else leaf, result)


def source_lists(layer: Layer) -> tuple[str, ...]:
    """Qualified names of the model's ModuleLists and ModuleDicts that hold modules of a captured layer."""
    return tuple(layer.module.meta["source_lists"])  # type: ignore[index]


def _check_names(model: nn.Module, cut_points: Sequence[str]) -> None:
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    seen: set[str] = set()
    for cut in cut_points:
        if cut not in known:
            near = difflib.get_close_matches(cut, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CapslogError(f"cut point {cut!r} is not a submodule of {type(model).__name__}{hint}")
        if cut in seen:
            raise CapslogError(f"cut point {cut!r} is listed twice; a model is cut once before a module")
        seen.add(cut)


def _sequential_layers(model: nn.Sequential, cut_points: Sequence[str]) -> list[Layer]:
    slices: list[list[tuple[str, nn.Module]]] = [[]]
    for child in model.named_children():
        if child[0] in cut_points and slices[-1]:
            slices.append([])
        slices[-1].append(child)
    if not slices[0]:
        raise CapslogError("the nn.Sequential has no children, so there is nothing to split")
    if len(list(model.named_children())) != len(model):
        raise CapslogError(
            "the nn.Sequential holds one module twice, so its children's names do not give its order; "
            "make the second one a module of its own"
        )
    layers = [Layer(part[0][0], SequentialSlice(part)) for part in slices]
    freeze_layers(layers, model)
    return layers
