"""Builds a chain from an ordinary module without edits to it.

This package never copies a parameter (every layer holds the model's own `Parameter` objects, so tied weights stay tied)
and never returns a layer that silently runs on something other than what was captured.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.collapse import collapse_modules, forked_modules
from varuna_capslog.model.capture.comparison import compare_steps
from varuna_capslog.model.capture.export import LEFT, Captured, OutputName
from varuna_capslog.model.capture.exporting import Exporter, KeptWhole, merge_modes, whole_layer
from varuna_capslog.model.capture.python_calls import Whole, WholeModel
from varuna_capslog.model.capture.runtime import (
    FixedSize,
    OfTheModel,
    SequentialSlice,
    Varying,
    hold,
    runs_its_children,
)
from varuna_capslog.model.capture.split import localise_sizes, open_regions, split_graph
from varuna_capslog.model.capture.text import CapturedLayers, CaptureRequest, Kept, OneOf, by_shape
from varuna_capslog.model.capture.trial import has_weights
from varuna_capslog.model.layer import Layer, freeze_layers, gradient_hooks, in_training
from varuna_capslog.model.python_state import PythonState

__all__ = [
    "LEFT",
    "FixedSize",
    "Kept",
    "OneOf",
    "Varying",
    "automatic_cut_points",
    "capture_layers",
    "captured_result",
    "leave_behind",
    "open_state",
    "runs_python",
    "source_lists",
    "source_modules",
]


def capture_layers(
    model: nn.Module,
    cut_points: Sequence[str] | None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | Tensor | Varying | OneOf | None = None,
    outputs: Sequence[str] | None = None,
    evaluates: bool | None = True,
    kept: Kept | None = None,
    compares: bool = False,
    keeps: bool = False,
) -> CapturedLayers:
    """Split `model` before each named submodule, in the order in which its forward runs them.

    Returns the layers, and the names of the tensors that enter and leave the chain of them.

    An `nn.Sequential` is split between its children: no example is needed, and any input shape runs. Every other model
    is captured twice by `torch.export` (training and eval mode) with the example's shapes; a layer refuses other
    shapes, except in sizes that the example leaves open.

    Args:
        model: stays as it is; the chain's layers hold its own parameters and submodules.
        cut_points: qualified names of submodules (`"layer3.0"`, `"model.layers.2"`); a cut lies *before* each. The
            layer that begins there has that name; the first layer has the name of the first module that runs. One layer
            depends on another only where the model's own modules do (`assign`). None: cut before `automatic_cut_points`
            that run, before the modules after the last block (norm and head), and before modules outside the blocks
            that read the same tensor in parallel, such as the branches of an Inception block (`collapse`).
        example_inputs: a tensor, a dict of keyword arguments or a tuple of positional ones. Entries that are no tensors
            (`use_cache=False`) are fixed in the captured model. A `Varying` tensor leaves some of its sizes open. With
            `OneOf`, the model is captured once for the shapes of each example.
        evaluates: False captures training mode only; the layers then refuse to run in eval mode. None captures eval
            mode only, for a model that is served.
        kept: store of captures: a capture of this model is read from it or, if it `writes`, added to it, together with
            one for training mode only.
        compares: True: compare a training step with the model's own, if the model has weights and no capture was read.
        keeps: True: the caller calls `leave_behind` after each run; such captures are not stored.
        outputs: names of the model's output tensors that leave the chain (default: all). A name is the tensor's place
            in the model's result: `logits`, `loss`, `0.1`; a single bare tensor is named `output`.

    Raises:
        FixedSize: the model's code fixes a size that an example leaves open.
        CapslogError: an unknown cut point (the nearest name is suggested), a model whose Python branches on tensor
            values (the module is named), a module that changes a buffer in its forward, a missing example.
    """
    if isinstance(cut_points, str):
        raise CapslogError(
            f"cut_points={cut_points!r} is one string; give a list of submodule names, e.g. [{cut_points!r}]"
        )
    requested = cut_points
    if cut_points is None:
        cut_points = list(_list_children(model))
    _check_names(model, cut_points)
    if not keeps:
        _check_parameters(model)
    if runs_its_children(model) and not any("." in cut for cut in cut_points):
        assert isinstance(model, nn.Sequential)
        captured = _sequential_layers(model, cut_points), ("x",), ("x",)
        if compares and example_inputs is not None and not isinstance(example_inputs, OneOf):
            compare_steps(model, captured, _arguments_of(example_inputs))
        return captured
    if scripted := next((path for path, part in model.named_modules() if isinstance(part, ScriptModule)), None):
        raise CapslogError(
            f"module {scripted or type(model).__name__!r} was compiled by torch.jit, whose code cannot be captured; "
            "give the model with the module itself"
        )
    if isinstance(example_inputs, OneOf):
        captures = [
            capture_layers(model, requested, example, outputs, evaluates, kept, compares and not number)
            for number, example in enumerate(example_inputs.examples)
        ]
        return _holding_all(model, by_shape(captures, type(model).__name__))
    if example_inputs is None:
        raise CapslogError(
            f"{type(model).__name__} is more than an nn.Sequential that is cut between its children, so capturing it "
            "needs example_inputs: a tensor, a dict of keyword arguments or a tuple of positional ones"
        )
    arguments, keywords = _arguments_of(example_inputs)
    if _takes_use_cache(model):
        keywords.setdefault("use_cache", False)  # a Hugging Face decoder's key-value cache is no part of training
    request = CaptureRequest(model, requested, (arguments, keywords), outputs, evaluates)
    if kept is not None and (stored := kept.read(request)) is not None:
        return _holding_all(model, stored)
    writes = kept is not None and kept.writes
    try:
        made = _exported(request, cut_points, writes, keeps)
    except FixedSize as error:
        if kept is not None and kept.writes:
            kept.refuse(request, error)
        raise
    except KeptWhole as error:
        made = {evaluates: whole_layer(model, request.example, outputs, requested, str(error))}
    if compares and has_weights(model):
        difference = compare_steps(model, made[evaluates], request.example)
        if difference is not None:
            why = f"captured, it makes another step than the module itself: {difference}"
            made = {evaluates: whole_layer(model, request.example, outputs, requested, why)}
            if compare_steps(model, made[evaluates], request.example) is not None:
                raise CapslogError(f"the {type(model).__name__} cannot be captured: {why}")
    if kept is not None and kept.writes:
        for mode, layers in made.items():
            kept.write(replace(request, evaluates=mode), layers)
    return _holding_all(model, made[evaluates])


def _holding_all(model: nn.Module, captured: CapturedLayers) -> CapturedLayers:
    """Give the last layer the parameters that no layer uses, so that they count in states, weights and memory."""
    last = captured[0][-1].module
    held = {id(parameter) for layer in captured[0] for parameter in layer.module.parameters()}
    idle = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in held}
    for name, parameter in idle.items():
        if isinstance(last, fx.GraphModule):
            hold(last, name, parameter)
    of_all = sum(parameter.numel() for parameter in model.parameters())
    part = sum(parameter.numel() for parameter in idle.values()) / max(1, of_all)
    if part > _LARGE_IDLE_PART:
        _log.warning(
            "%s: %.0f %% of its parameters, such as %s, are in no operation on these inputs: their bytes are counted, "
            "in the last layer, but no activations and no seconds of theirs; give inputs that reach them (--input)",
            type(model).__name__,
            100 * part,
            next(iter(idle)),
        )
    _tell_of_values(model, [layer.module for layer in captured[0]])
    return captured


def _tell_of_values(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Log which parts of a model without weights are planned for the values of its example inputs."""
    calls = (part for module in modules for part in module.modules() if isinstance(part, Whole | WholeModel))
    paths = [call.path if isinstance(call, Whole) else "all of it" for call in calls if call.shape.values]
    if paths and not has_weights(model):
        _log.warning(
            "%s: planned for the values of the example inputs: %s, whose code decides by values (inputs of another "
            "kind may cost more or less)",
            type(model).__name__,
            ", ".join(dict.fromkeys(paths)),
        )


_log = logging.getLogger(__name__)
_LARGE_IDLE_PART = 0.02
"""Fraction of unused parameters that causes a warning: a tower does, a pooler that training leaves out does not."""


def _arguments_of(
    example: Mapping[str, Any] | Sequence[Any] | Tensor | Varying,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments."""
    if isinstance(example, (Tensor, Varying)):
        return (example,), {}
    return ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})


def _takes_use_cache(model: nn.Module) -> bool:
    """True where `use_cache` is an argument of the model, or of a Hugging Face model in it to which it hands its
    keywords, as peft's models do, and those with a tower for pictures.
    """
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters or not hasattr(model, "config"):
        return "use_cache" in parameters
    hands_on = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return hands_on and any(getattr(getattr(part, "config", None), "use_cache", False) for part in model.modules())


def _exported(
    request: CaptureRequest, cut_points: Sequence[str], both: bool, keeps: bool
) -> dict[bool | None, CapturedLayers]:
    """Map `evaluates` of the request -> the captured model; with `both`, also False -> a capture of training mode."""
    model, requested = request.model, request.cut_points
    exporter = Exporter(model, *request.example, keeps)
    training_capture: Captured | None = None
    with in_training(model):
        if request.evaluates is None:
            model.eval()
        captured = exporter.export()
        localise_sizes(captured)
        if requested is None:
            cut_points = [*forked_modules(captured, model, cut_points), *cut_points] or automatic_cut_points(model)
        _check_whole(captured, requested or ())
        open_regions(captured, cut_points)
        collapse_modules(captured, model, cut_points)
        train_only = None if request.evaluates is None else _NOT_ASKED
        if request.evaluates:
            training_capture = captured.copy() if both else None
            model.eval()
            try:
                in_eval = exporter.export()
                localise_sizes(in_eval)
                open_regions(in_eval, cut_points)
                collapse_modules(in_eval, model, cut_points)
            except (CapslogError, KeptWhole) as error:
                train_only = f"in eval mode it cannot be captured ({error})"
            else:
                train_only = merge_modes(captured, in_eval, model)
    split = functools.partial(split_graph, model=model, cut_points=cut_points, outputs=request.outputs)
    lenient = requested is None
    made: dict[bool | None, CapturedLayers] = {
        request.evaluates: split(captured, train_only=train_only, lenient=lenient)
    }
    if training_capture is not None:
        made[False] = split(training_capture, train_only=_NOT_ASKED, lenient=lenient)
    return made


_NOT_ASKED = "nobody asked for its eval mode"


def automatic_cut_points(model: nn.Module) -> list[str]:
    """Return a cut point for every repeated block that is visible without an example: the children of the model's
    outermost ModuleLists and Sequentials.

    A child that is itself a list of modules of one class (`layer1` of a ResNet within `features`) is replaced by its
    children. A model that is an nn.Sequential is cut before its direct children only, which needs no capture.

    Raises CapslogError where the model has no such list.
    """
    cut_points = _list_children(model)
    if not cut_points:
        raise CapslogError(
            f"{type(model).__name__} has no ModuleList or Sequential of two or more modules to cut at; "
            "name the cut points"
        )
    return cut_points


def _list_children(model: nn.Module) -> list[str]:
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    return [*_blocks(model, ""), *getattr(model, "more_cut_points", ())]


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
    """Return the qualified names of the innermost modules that a captured layer runs, by first use; else None."""
    names = getattr(layer.module, "meta", {}).get("source_modules")
    return None if names is None else tuple(names)


def captured_result(layers: Sequence[Layer], outputs: Mapping[str, Any]) -> Any:
    """Return the captured model's result, built by its own code from the tensors that leave its chain, by name.

    Other values that the model returned with its example (None, numbers) stay in their places.
    """
    result = getattr(layers[-1].module, "meta", {}).get("result", OutputName("x"))
    return pytree.tree_map(lambda leaf: outputs[leaf] if isinstance(leaf, OutputName) else leaf, result)


def open_state(model: nn.Module, layers: Sequence[Layer], modes: bool) -> PythonState:
    """Record what a capture depends on: attributes of the model's modules whose code does not run in the layers, and
    other values in these modules' files that the code reads by name.

    modes: whether the modules' training modes count.
    """
    runs = {id(part) for layer in layers for part in _called(layer.module)}
    parts = {path: part for path, part in model.named_modules() if id(part) not in runs}
    return PythonState(parts, modes=modes, reads=True)


def _called(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the model whose code a layer runs."""
    if isinstance(layer, WholeModel):
        yield from (layer.model, *layer.modules())
    elif isinstance(layer, fx.GraphModule):
        targets = {str(node.target) for node in layer.graph.find_nodes(op="call_module")}
        for part in [layer.get_submodule(target) for target in targets]:
            yield from (part.module if isinstance(part, Whole) else part).modules()
    else:
        yield from layer.modules()


def runs_python(layers: Sequence[Layer]) -> bool:
    """True where code of a captured model draws random numbers of Python or changes attributes, as far as is known."""
    return bool(getattr(layers[-1].module, "meta", {}).get("python", True))


def leave_behind(layers: Sequence[Layer], outputs: Mapping[str, Any]) -> None:
    """Set on the modules of a model captured with `keeps` the values that its own code would have set there. outputs:
    the tensors that leave the chain, by name.
    """
    for put, values in getattr(layers[-1].module, "meta", {}).get("left", OfTheModel()).value or ():
        put(pytree.tree_map(lambda leaf: outputs[leaf] if isinstance(leaf, OutputName) else leaf, values))


def source_lists(layer: Layer) -> tuple[str, ...]:
    """Return the qualified names of the model's ModuleLists and ModuleDicts that hold modules of a captured layer."""
    return tuple(layer.module.meta["source_lists"])  # type: ignore[index]


def _check_names(model: nn.Module, cut_points: Sequence[str]) -> None:
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    earlier: set[str] = set()
    for cut in cut_points:
        if cut not in paths:
            near = difflib.get_close_matches(cut, paths, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CapslogError(f"cut point {cut!r} is not a submodule of {type(model).__name__}{hint}")
        if cut in earlier:
            raise CapslogError(f"cut point {cut!r} is listed twice; a model is cut once before a module")
        earlier.add(cut)


def _check_parameters(model: nn.Module) -> None:
    """Refuse hooks on parameters: layers made on another rank or by a joining worker lack them. For a model without
    weights, which is only planned, warn instead.
    """
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            if not has_weights(model):
                _log.warning(
                    "parameter %r has a hook on its gradient: it can be planned, but training refuses it", name
                )
                return
            raise CapslogError(
                f"parameter {name!r} has a hook on its gradient, which copies of it on other ranks do not have; remove "
                "it, and let the forward do its work: of part * weight + (1 - part) * weight.detach() the gradient is "
                "part times as large"
            )


def _check_whole(captured: Captured, cut_points: Sequence[str]) -> None:
    """Refuse cut points within modules that are kept whole."""
    for cut in cut_points:
        for path, why in captured.whole.items():
            if cut.startswith(f"{path}."):
                raise CapslogError(f"cut point {cut!r} lies in {path!r}, which runs as a whole ({why}); cut before it")


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
