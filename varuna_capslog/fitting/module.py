"""`fit`: an ordinary module made to train within a budget, in a loop of its user's own.

The module is captured as a chain (`model/capture`), `search` chooses its memory intervals, and `segments` runs it with
them. Whatever is not training (eval mode, no gradients) runs the module's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import parse_bytes, parse_rate
from varuna_capslog.fitting.search import Fit, Loop, StepSearch
from varuna_capslog.fitting.segments import SegmentedChain
from varuna_capslog.model.capture import LEFT, capture_layers, captured_result, leave_behind, open_state
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import NeedsValues
from varuna_capslog.model.python_state import PythonState
from varuna_capslog.model.training_modes import in_training

__all__ = ["FittedModule", "fit"]


def fit(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any] | Tensor,
    budget: str | int,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    cut_points: Sequence[str] | None = None,
    precision: str = "float32",
    moments: int = 2,
    host_bandwidth: str | None = None,
) -> FittedModule:
    """Gives the module back so that a training step on one device stays within `budget` bytes and is fastest.

    Outputs, losses and gradients are bitwise those of `model`, dropout and batch norm included: what is not kept runs
    again with the same random numbers, and counts no running statistics twice. The budget holds for one step of a loop
    that clears its gradients before each forward: parameters, gradients, moments, buffers, the inputs, and what
    forward, loss and backward need. On CUDA it is what `torch.cuda.max_memory_allocated` shows; the context and what
    an optimizer needs while it updates come on top.

    Args:
        model: on the device on which it trains; its parameters, buffers and submodules are used, not copied.
        sample: one batch: a tensor, a tuple of positional or a dict of keyword arguments.
        budget: such as "8GB" or 8e9.
        loss: takes what the model returns and gives the scalar that is differentiated, so that its memory counts.
            None: the model's output named `loss`, or the sum of its floating-point outputs.
        cut_points: submodules before which a range may begin or end; None: every repeated block.
        precision: "float32", or "bfloat16" or "float16" where the loop runs the model under autocast, for float16 with
            a scaler of its own.
        moments: tensors of its own size that the optimizer keeps for each parameter: 2 for Adam, 0 for plain SGD.
        host_bandwidth: between the device and the host, such as "12GB/s": what is saved may then wait on the host as
            well. None, or a model on the CPU: nothing is offloaded.

    Raises:
        DoesNotFit: no choice stays within the budget; the sentence names the static floor and the smallest budget.
        CapslogError: a size that cannot be read; a model that cannot be captured, or run on fake tensors.
    """
    size = parse_bytes(budget, "budget")
    rate = None if host_bandwidth is None else parse_rate(host_bandwidth, "host_bandwidth")
    fitted = FittedModule(model, size, loss, cut_points, Loop(precision, moments, rate))
    arguments = (sample,) if isinstance(sample, Tensor) else sample
    if isinstance(arguments, Mapping):
        fitted.fit_for((), dict(arguments))
    else:
        fitted.fit_for(tuple(arguments), {})
    return fitted


class FittedModule(nn.Module):
    """What `fit` gives: the module with its own parameters, buffers and submodules under their own names.

    A batch of other shapes is fitted when it first comes, within the same budget, which takes as long as `fit`.
    Hooks on the module itself do not run while it trains, nor those of submodules that were cut open.

    Attributes:
        fits: what was chosen, in the order in which shapes came.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: int,
        loss: Callable[[Any], Tensor] | None,
        cut_points: Sequence[str] | None,
        loop: Loop,
    ) -> None:
        super().__init__()
        # the module's own tables, so that whatever is moved, loaded or listed here is there too
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self._model = (model,)  # in a tuple it is no submodule
        self._budget, self._loss, self._cut_points, self._loop = budget, loss, cut_points, loop
        self._runs: dict[object, _Run] = {}

    @property
    def fits(self) -> list[Fit]:
        """As above."""
        return [run.fit for run in self._runs.values()]

    def train(self, mode: bool = True) -> FittedModule:
        """As of the module itself, whose own `train` may leave parts in eval mode."""
        self._model[0].train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        model = self._model[0]
        if not (self.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        return self.fit_for(args, kwargs)(args, kwargs, model)

    def fit_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        """How calls with such arguments are run; raises as `fit`. Where the module has other attributes or submodules
        than when such a call was captured, it is captured again.
        """
        model = self._model[0]
        key = _key(_bound(model, args, kwargs))
        run = self._runs.get(key)
        if run is None or run.changed:
            how = self._budget, self._loss, self._cut_points, self._loop
            self._runs[key] = run = _Run.of(model, args, kwargs, how, run)
        return run


class _Run:
    """Calls with arguments of certain shapes.

    Args:
        fit: how they are run; nothing but the module itself where it has no intervals.
        chain: of the module.
        state: of those of its modules whose code the chain does not run.
    """

    def __init__(self, fit: Fit, chain: Chain, state: PythonState) -> None:
        self.fit, self.chain, self._state = fit, chain, state
        self._segments = SegmentedChain(chain, fit.intervals, len(chain)) if fit.intervals else None

    @property
    def runs_itself(self) -> bool:
        """Whether the module itself is called."""
        return self._segments is None

    @property
    def changed(self) -> bool:
        """Whether the module has other attributes than when it was captured."""
        return not self.runs_itself and bool(self._state.changes())

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], how: tuple[Any, ...], known: _Run | None
    ) -> _Run:
        """Captures the module, and chooses the intervals.

        Args:
            known: how such calls were run until some attribute changed; where the same layers are captured, its
                intervals are taken.
        """
        budget, loss, cut_points, loop = how
        bound = _bound(model, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, Tensor)]
        if not tensors:
            raise CapslogError("the sample holds no tensor; give a batch as the module takes it")
        devices = {one.device for one in (*model.parameters(), *tensors)}
        if len(devices) != 1:
            where = ", ".join(sorted(map(str, devices)))
            raise CapslogError(f"the module and the sample are on {where}; move both to the device that trains")
        with in_training(model):
            captured = capture_layers(model, cut_points, bound, evaluates=False, compares=known is None, keeps=True)
        chain = Chain(*captured, type(model).__name__)
        state = open_state(model, chain.layers, modes=True)
        if known is not None and _structure(known.chain) == _structure(chain):
            return cls(known.fit, chain, state)
        specs = {name: TensorSpec.of(tensor.detach()) for name, tensor in zip(chain.inputs, tensors, strict=True)}
        differentiated = _differentiated(chain, loss)
        searched = Chain([*chain.layers, _leaving(chain)], chain.inputs, chain.outputs, chain.name)
        try:
            search = StepSearch(searched, specs, differentiated, devices.pop(), loop)
        except NeedsValues as error:
            raise CapslogError(
                f"{type(model).__name__} cannot be fitted to a budget: {error.what} cannot run on tensors without "
                f"values ({error.why}), so that nobody knows its bytes; give it fixed sizes, or train it as it is"
            ) from error
        return cls(search.fit(budget), chain, state)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> Any:
        """What the model returns."""
        if self._segments is None:
            return model(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(_bound(model, args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = self._segments.run(dict(zip(self.chain.inputs, tensors, strict=True)))
        leave_behind(self.chain.layers, outputs)
        return captured_result(self.chain.layers, outputs)


def _structure(chain: Chain) -> object:
    """Equal for chains whose layers run the same operators, with whatever numbers."""
    return [
        (layer.name, layer.reads, layer.writes, [(node.op, str(node.target)) for node in layer.module.graph.nodes])
        if isinstance(layer.module, fx.GraphModule)
        else layer.name
        for layer in chain.layers
    ]


class _Leaving(nn.Module):
    """A layer that hands on what it reads."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the tensors, so that each is written here."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)


def _leaving(chain: Chain) -> Layer:
    taken, name = {layer.name for layer in chain.layers}, "outputs"
    while name in taken:
        name += "_"
    return Layer(name, _Leaving(), chain.outputs, chain.outputs)


def _differentiated(chain: Chain, loss: Callable[[Any], Tensor] | None) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def find(outputs: Mapping[str, Tensor]) -> Tensor:
        if loss is not None:
            return loss(captured_result(chain.layers, outputs))
        if "loss" in outputs:
            return outputs["loss"]
        own = [one for name, one in outputs.items() if not name.startswith(LEFT)]
        found = [one.float().sum() for one in own if one.is_floating_point() and one.requires_grad]
        if not found:
            raise CapslogError(f"{chain.name}: none of its outputs carries a gradient, so there is nothing to train")
        return torch.stack(found).sum() if len(found) > 1 else found[0]

    return find


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments as the capture takes them: by name in the order of the forward's signature, where they have names,
    so that equal calls look alike.
    """
    signature = inspect.signature(model.forward)
    kinds = {one.kind for one in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        if args and kwargs:
            raise CapslogError(
                f"{type(model).__name__}.forward takes arguments without names; give all in order or all by name"
            )
        return args or kwargs
    try:
        found = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CapslogError(f"these arguments do not go with {type(model).__name__}.forward: {error}") from error
    for name, one in signature.parameters.items():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return dict(found)


def _key(bound: Any) -> object:
    """Equal for calls that one captured chain serves."""
    leaves, spec = pytree.tree_flatten(bound)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
