"""Makes an ordinary module train within a budget of bytes, in the user's own training loop.

The module is captured as a chain (`model/capture`); `search` chooses memory intervals and runs the chain with them.
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
from varuna_capslog.model.capture import LEFT, capture_layers, captured_result, leave_behind, open_state
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.hollow import NeedsValues
from varuna_capslog.model.layer import in_training, warning_of_one_sample
from varuna_capslog.model.python_state import PythonState

__all__ = ["FittedModule", "fit"]

_log = logging.getLogger(__name__)

_Key = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype] | str, ...]]
"""Nesting of a call's arguments; shape and dtype of each tensor in them, and repr of each other value."""


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
    """Return a module that trains like `model`, as fast as possible with at most `budget` bytes on one device.

    Outputs, losses and gradients are bitwise those of `model`, also with dropout and batch norm: recomputation uses the
    same random numbers and does not update running statistics again. The budget includes, for a loop that clears its
    gradients before each forward: parameters, gradients, moments, buffers, inputs, and the memory of forward, loss and
    backward. On CUDA it is the value of `torch.cuda.max_memory_allocated`; the CUDA context and the temporary memory of
    the optimizer's update are not included.

    Args:
        model: on the device on which it trains; its parameters, buffers and submodules are used, not copied.
        sample: one batch: a tensor, a tuple of positional or a dict of keyword arguments.
        budget: such as "8GB" or 8e9.
        loss: maps the model's result to the scalar that is differentiated; for its memory. None: the model's output
            named `loss`, or the sum of its floating-point outputs.
        cut_points: submodules before which a memory interval may begin or end; None: every repeated block.
        precision: "float32", or "bfloat16" or "float16" for a loop under autocast, which scales float16 losses itself.
        moments: number of tensors of a parameter's size that the optimizer keeps: 2 for Adam, 0 for plain SGD.
        host_bandwidth: between device and host, such as "12GB/s": saved tensors may then be offloaded to the host.
            None, or a model on the CPU: nothing is offloaded.

    Raises:
        DoesNotFit: no choice stays within the budget; the error names the static bytes and the smallest budget.
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
    """Module returned by `fit`, with the model's own parameters, buffers and submodules; its repr has its `summary`.

    A batch of new shapes is fitted to the same budget at its first call, which takes as long as `fit`. In training,
    hooks do not run if they are on the model itself or on a submodule that contains cuts.
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
        # the model's own dicts, so that moving and loading affect both modules
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self._model = (model,)  # in a tuple, so that it is not registered as a submodule
        self._budget, self._loss, self._cut_points, self._loop = budget, loss, cut_points, loop
        self._runs: dict[_Key, _Run] = {}
        self._warned = False  # about batch norms over one sample

    @property
    def fits(self) -> list[Fit]:
        """Choices for each shape of batch, in the order of their first calls."""
        return [run.fit for run in self._runs.values()]

    @property
    def summary(self) -> str:
        """Text with predicted peak, budget, and recomputed or offloaded layers, for each shape of batch."""
        return "\n".join(f"for {_shapes(key)}: {run.fit.summary}" for key, run in self._runs.items())

    def extra_repr(self) -> str:
        """Return the model's own `extra_repr`, followed by the summary."""
        return "\n".join(filter(None, (self._model[0].extra_repr(), self.summary)))

    def train(self, mode: bool = True) -> FittedModule:
        """Set the mode by the model's own `train`, which may leave parts in eval mode."""
        self._model[0].train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result."""
        model = self._model[0]
        if not (self.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        return self.fit_for(args, kwargs)(args, kwargs, model)

    def fit_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        """Run for calls with these arguments; raises as `fit`. Captures again if attributes or submodules changed."""
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
        """Warn once about batch norms that normalise over one sample."""
        if self._warned or not _has_one_sample(key):
            return
        model = self._model[0]
        with in_training(model):
            note = warning_of_one_sample(model.named_modules(), "the batch", "give larger batches")
        if note is not None:
            self._warned = True
            _log.warning("%s", note)


class _Run:
    """Captured chain for calls of certain shapes. state: attributes of modules whose code the chain does not run."""

    def __init__(self, fit: Fit, chain: Chain, state: PythonState) -> None:
        self.fit, self.chain, self._state = fit, chain, state
        self._segments = SegmentedChain(chain, fit.intervals, len(chain)) if fit.intervals else None

    @property
    def runs_itself(self) -> bool:
        """True where the model itself is called, as nothing is recomputed or offloaded."""
        return self._segments is None

    @property
    def changed(self) -> bool:
        """True where attributes of the model have changed after the capture."""
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
        """Capture the model, and choose the intervals. previous: run for such calls before attributes changed; its
        intervals are used again if the same layers are captured.
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
    """Key that is equal for chains whose layers run the same operators, also with other constants."""
    return [
        (layer.name, layer.reads, layer.writes, [(node.op, str(node.target)) for node in layer.module.graph.nodes])
        if isinstance(layer.module, fx.GraphModule)
        else layer.name
        for layer in chain.layers
    ]


class _Leaving(nn.Module):
    """Last layer of a searched chain: it returns the outputs of the layers before."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors, so that this layer counts as their writer."""
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
    """Arguments in the form that the capture takes: by name in the order of the signature, if they have names."""
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
    """Key that is equal for calls that one captured chain can run."""
    leaves, spec = pytree.tree_flatten(bound)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )


def _has_one_sample(key: _Key) -> bool:
    """True where all tensors of a call have one sample; tensors without dimensions do not count."""
    batches = {leaf[0][0] for leaf in key[1] if not isinstance(leaf, str) and leaf[0]}
    return batches == {1}


def _shapes(key: _Key) -> str:
    """Text with dtype and shape of a call's tensors, such as float32[8,3,224,224]."""
    tensors = [leaf for leaf in key[1] if not isinstance(leaf, str)]
    return ", ".join(f"{str(dtype).partition('.')[2]}[{','.join(map(str, shape))}]" for shape, dtype in tensors)
