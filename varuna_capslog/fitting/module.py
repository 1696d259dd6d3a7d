"""Makes an ordinary module train within a budget of bytes, in the user's own training loop.

The module is captured as a chain (`model/capture`); `search` chooses its memory intervals and runs it with them.
Outside training (eval mode, no gradients) the module's own forward runs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import parse_bytes, parse_rate
from varuna_capslog.fitting.search import Fit, Loop, SegmentedChain, StepSearch
from varuna_capslog.model.batch_norm import warning_of_one_sample
from varuna_capslog.model.capture import LEFT, capture_layers, captured_result, leave_behind, open_state
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import NeedsValues
from varuna_capslog.model.layer import in_training
from varuna_capslog.model.python_state import PythonState

__all__ = ["FittedModule", "fit"]

_log = logging.getLogger(__name__)

_Key = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype] | str, ...]]
"""Nesting of a call's arguments; shape and dtype of each tensor among them, text of each other value."""


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
    """Return the module so that a training step on one device stays within `budget` bytes and is fastest.

    Outputs, losses and gradients are bitwise those of `model`, dropout and batch norm included: what is not kept runs
    again with the same random numbers, and counts no running statistics twice. The budget holds for one step of a loop
    that clears its gradients before each forward: parameters, gradients, moments, buffers, the inputs, and the memory
    of forward, loss and backward. On CUDA it is the value of `torch.cuda.max_memory_allocated`; the context and the
    memory of an optimizer while it updates come on top.

    Args:
        model: on the device on which it trains; its parameters, buffers and submodules are used, not copied.
        sample: one batch: a tensor, a tuple of positional or a dict of keyword arguments.
        budget: such as "8GB" or 8e9.
        loss: maps the model's result to the scalar that is differentiated, so that its memory counts. None: the model's
            output named `loss`, or the sum of its floating-point outputs.
        cut_points: submodules before which a range may begin or end; None: every repeated block.
        precision: "float32", or "bfloat16" or "float16" for a loop under autocast, which scales float16 losses itself.
        moments: tensors of its own size that the optimizer keeps for each parameter: 2 for Adam, 0 for plain SGD.
        host_bandwidth: between device and host, such as "12GB/s": saved tensors may also be offloaded to the host.
            None, or a model on the CPU: nothing is offloaded.

    Raises:
        DoesNotFit: no choice stays within the budget; the sentence gives the static floor and the smallest budget.
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
    """Module returned by `fit`: the model with its own parameters, buffers and submodules under their own names. When
    it is printed, the first lines are its `summary`.

    A batch of other shapes is fitted when it first comes, within the same budget, which takes as long as `fit`. Hooks
    on the module itself do not run while it trains, nor those of submodules that were cut open.
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
        # the module's own tables, so that moving, loading and listing affect both
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self._model = (model,)  # in a tuple it is no submodule
        self._budget, self._loss, self._cut_points, self._loop = budget, loss, cut_points, loop
        self._runs: dict[_Key, _Run] = {}
        self._warned = False  # of batch norms over one sample

    @property
    def fits(self) -> list[Fit]:
        """Choices, in the order in which shapes came."""
        return [run.fit for run in self._runs.values()]

    @property
    def summary(self) -> str:
        """Predicted peak, budget, and what is recomputed or offloaded, for each shape of batch."""
        return "\n".join(f"for {_shapes(key)}: {run.fit.summary}" for key, run in self._runs.items())

    def extra_repr(self) -> str:
        """Return the summary, below what the model itself prints of its settings."""
        return "\n".join(filter(None, (self._model[0].extra_repr(), self.summary)))

    def train(self, mode: bool = True) -> FittedModule:
        """Set the mode of the module itself, whose own `train` may leave parts in eval mode."""
        self._model[0].train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result."""
        model = self._model[0]
        if not (self.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        return self.fit_for(args, kwargs)(args, kwargs, model)

    def fit_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        """Run of calls with such arguments; raises as `fit`. Captures anew where attributes or submodules changed."""
        model = self._model[0]
        key = _key(_bound(model, args, kwargs))
        run = self._runs.get(key)
        if run is None:
            self._warn(key)
        if run is None or run.changed:
            options = self._budget, self._loss, self._cut_points, self._loop
            self._runs[key] = run = _Run.of(model, args, kwargs, options, run)
        return run

    def _warn(self, key: _Key) -> None:
        """Warn, once, of batch norms that see one sample at a time."""
        if self._warned or not _has_one_sample(key):
            return
        model = self._model[0]
        with in_training(model):
            note = warning_of_one_sample(model.named_modules(), "the batch", "give larger batches")
        if note is not None:
            self._warned = True
            _log.warning("%s", note)


class _Run:
    """Calls with arguments of certain shapes. `state`: attributes of the modules whose code the chain does not run."""

    def __init__(self, fit: Fit, chain: Chain, state: PythonState) -> None:
        self.fit, self.chain, self._state = fit, chain, state
        self._segments = SegmentedChain(chain, fit.intervals, len(chain)) if fit.intervals else None

    @property
    def runs_itself(self) -> bool:
        """True where the module itself is called."""
        return self._segments is None

    @property
    def changed(self) -> bool:
        """True where the module has other attributes than when it was captured."""
        return not self.runs_itself and bool(self._state.changes())

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: tuple[Any, ...],
        previous: _Run | None,
    ) -> _Run:
        """Capture the module, and choose the intervals; those of `previous`, the run of such calls until some attribute
        changed, are used again where the same layers are captured.
        """
        budget, loss, cut_points, loop = options
        bound = _bound(model, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, Tensor)]
        if not tensors:
            raise CapslogError("the sample holds no tensor; give a batch as the module takes it")
        devices = {tensor.device for tensor in (*model.parameters(), *tensors)}
        if len(devices) != 1:
            where = ", ".join(sorted(map(str, devices)))
            raise CapslogError(f"the module and the sample are on {where}; move both to the device that trains")
        with in_training(model):
            captured = capture_layers(model, cut_points, bound, evaluates=False, compares=previous is None, keeps=True)
        chain = Chain(*captured, type(model).__name__)
        state = open_state(model, chain.layers, modes=True)
        if previous is not None and _structure(previous.chain) == _structure(chain):
            return cls(previous.fit, chain, state)
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
        """Return the model's result."""
        if self._segments is None:
            return model(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(_bound(model, args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = self._segments.run(dict(zip(self.chain.inputs, tensors, strict=True)))
        leave_behind(self.chain.layers, outputs)
        return captured_result(self.chain.layers, outputs)


def _structure(chain: Chain) -> object:
    """Key that is equal for chains whose layers run the same operators, with whatever numbers."""
    return [
        (layer.name, layer.reads, layer.writes, [(node.op, str(node.target)) for node in layer.module.graph.nodes])
        if isinstance(layer.module, fx.GraphModule)
        else layer.name
        for layer in chain.layers
    ]


class _Leaving(nn.Module):
    """Layer that passes on the tensors that it reads."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors, so that each is written here."""
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
        tensors = [tensor for name, tensor in outputs.items() if not name.startswith(LEFT)]
        sums = [tensor.float().sum() for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]
        if not sums:
            raise CapslogError(f"{chain.name}: none of its outputs carries a gradient, so there is nothing to train")
        return torch.stack(sums).sum() if len(sums) > 1 else sums[0]

    return find


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments as the capture takes them, so that equal calls look alike: by name, in signature order, if named."""
    signature = inspect.signature(model.forward)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        if args and kwargs:
            raise CapslogError(
                f"{type(model).__name__}.forward takes arguments without names; give all in order or all by name"
            )
        return args or kwargs
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CapslogError(f"these arguments do not go with {type(model).__name__}.forward: {error}") from error
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return dict(bound)


def _key(bound: Any) -> _Key:
    """Key that is equal for calls that one captured chain serves."""
    leaves, spec = pytree.tree_flatten(bound)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )


def _has_one_sample(key: _Key) -> bool:
    """True where the tensors of such calls have one sample each; those without a dimension do not count."""
    batches = {leaf[0][0] for leaf in key[1] if not isinstance(leaf, str) and leaf[0]}
    return batches == {1}


def _shapes(key: _Key) -> str:
    """Text of the tensors of such calls: float32[8,3,224,224]."""
    tensors = [leaf for leaf in key[1] if not isinstance(leaf, str)]
    return ", ".join(f"{str(dtype).partition('.')[2]}[{','.join(map(str, shape))}]" for shape, dtype in tensors)
