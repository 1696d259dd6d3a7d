"""The training state of one piece of a CutPoint model, in the form of `training.layer_state`, and what follows it.

Names are those of the whole model. What several pieces share is in the state of each of them, so that a stage can be
built from its own pieces alone. Nothing here knows ranks, steps or Varuna.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.training.layer_state import LayerState, StateFollower, copy_in, flatten, moments_of
from varuna_capslog.varuna_plugin.splitting.tracing import Trace

__all__ = ["OptimizerRecipe", "PieceFollower", "capture", "install", "names_of", "state_bytes"]

_STATE_FACTOR = 3
"""Bytes of a trained parameter with two moments, as multiples of its own."""


class OptimizerRecipe:
    """How the user's optimizer treats each parameter, so that one can be made for any part of the model.

    An optimizer that treats every parameter by itself, as torch's do, makes the same step on a part as on the whole.

    Args:
        optimizer: the user's, over the whole model.
        model: with the names.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._type: Any = type(optimizer)
        self._options = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self.group_of: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CapslogError(
                        "build_optimizer's optimizer has a tensor that is no parameter of the model it was given; "
                        "give it that model's parameters only"
                    )
                self.group_of[names[id(parameter)]] = number

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer for these parameters; those that the user's leaves out are left out."""
        groups = []
        for number, options in enumerate(self._options):
            chosen = [parameter for name, parameter in parameters.items() if self.group_of.get(name) == number]
            if chosen:
                groups.append({"params": chosen, **options})
        if not groups:  # optimizers refuse empty lists
            groups = [{"params": [nn.Parameter(torch.zeros(0))], **self._options[0]}]
        made: torch.optim.Optimizer = self._type(groups)
        return made


def names_of(trace: Trace, piece: int) -> tuple[list[str], list[str]]:
    """Parameters and buffers that a piece uses."""
    return (
        [name for name, pieces in trace.parameters.items() if piece in pieces],
        [name for name, pieces in trace.buffers.items() if piece in pieces],
    )


def capture(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> LayerState:
    """A piece's state as it is: the live tensors, which the next step changes.

    Args:
        optimizer: None before the first step of all.

    Raises:
        CapslogError: the optimizer keeps something that is neither a tensor nor a number.
    """
    kept = {} if optimizer is None else optimizer.state
    moments: dict[str, dict[str, Any]] = {name: kept.get(parameter, {}) for name, parameter in parameters.items()}
    for name, content in moments.items():
        for key, value in content.items():
            if not isinstance(value, (Tensor, bool, int, float, type(None))):
                raise CapslogError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key!r}) for {name!r}; only tensors "
                    "and numbers can move with a layer: use another optimizer"
                )
    return flatten(parameters, buffers, moments)


def install(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Copies a piece's state into a model and its optimizer; `state` stays as it is.

    Raises:
        CapslogError: a parameter or buffer is missing or has another shape.
    """

    def mismatch(kind: str, name: str, value: Tensor | None, target: Tensor) -> CapslogError:
        shape = "nothing" if value is None else list(value.shape)
        return CapslogError(
            f"the state of {name!r} is {shape}, the model wants {list(target.shape)}: build_model must give "
            "the same model every time"
        )

    copy_in(state, parameters, buffers, mismatch)
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        kept = moments_of(state, name)
        if kept:
            optimizer.state[parameter] = {key: _moved(value, parameter.device) for key, value in kept.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a count of steps stays on the host, where the optimizer made it
    return value.detach().to(value.device if value.dim() == 0 else device, copy=True)


def state_bytes(model: nn.Module, trace: Trace) -> tuple[int, ...]:
    """Bytes of every piece's state, the optimizer's reckoned as two moments."""
    sizes = {name: _STATE_FACTOR * p.nbytes for name, p in model.named_parameters()}
    sizes |= {name: buffer.nbytes for name, buffer in model.named_buffers()}
    return tuple(
        max(1, sum(sizes[name] for names in names_of(trace, piece) for name in names))
        for piece in range(trace.num_pieces)
    )


class PieceFollower(StateFollower):
    """A copy of a piece that makes the same steps as its owner, from the owner's final gradients and buffers.

    Args:
        frozen: parameters that need no gradient.
        prepare: the user's schedule; called with (optimizer, step) before each step.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        recipe: OptimizerRecipe,
        frozen: Iterable[str],
        prepare: Callable[[torch.optim.Optimizer, int], None],
    ) -> None:
        still = set(frozen)
        parameters = {
            name: nn.Parameter(tensor.detach().clone(), requires_grad=name not in still)
            for name, tensor in _named(state, "parameters").items()
        }
        super().__init__(f"of {', '.join(list(parameters)[:2])}", parameters)
        self._buffers = {name: tensor.clone() for name, tensor in _named(state, "buffers").items()}
        self._optimizer = recipe.build(parameters)
        self._prepare = prepare
        install(state, parameters, self._buffers, self._optimizer)

    def _live(self) -> LayerState:
        return capture(self._parameters, self._buffers, self._optimizer)

    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        if kind != "buffers" or name not in self._buffers:
            return False
        self._buffers[name] = tensor
        return True

    def _step(self, step: int, scale: float) -> None:
        self._prepare(self._optimizer, step)
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None


def _named(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): value for key, value in state.items() if key.startswith(f"{kind}/")}
