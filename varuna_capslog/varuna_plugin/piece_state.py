"""The training state of one piece of a model as a flat dict of tensors, and what makes its steps again elsewhere.

Keys are "parameters/<name>", "buffers/<name>", "optimizer/<name>/<key>" and, for what an optimizer keeps as a plain
number, "number/<name>/<key>"; names as in the whole model. What several pieces share is in the state of each of them,
so that a stage can be built from its own pieces alone. Nothing here knows ranks, steps or Varuna.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.splitting.tracing import Trace

__all__ = ["Follower", "PieceState", "Recipe", "capture", "install", "names_of", "state_bytes"]

PieceState = dict[str, Tensor]

_STATE_FACTOR = 3
"""Bytes of a trained parameter with two moments, as multiples of its own."""


class Recipe:
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
) -> PieceState:
    """A piece's state as it is: the live tensors, which the next step changes.

    Args:
        optimizer: None before the first step of all.

    Raises:
        CapslogError: the optimizer keeps something that is neither a tensor nor a number.
    """
    state: PieceState = {f"parameters/{name}": parameter.detach() for name, parameter in parameters.items()}
    state |= {f"buffers/{name}": buffer.detach() for name, buffer in buffers.items()}
    for name, parameter in parameters.items() if optimizer is not None else ():
        assert optimizer is not None
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer/{name}/{key}"] = value
            elif isinstance(value, (bool, int, float)):
                state[f"number/{name}/{key}"] = torch.tensor(value, dtype=torch.float64)
            elif value is not None:
                raise CapslogError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key!r}) for {name!r}; only tensors "
                    "and numbers can move with a layer: use another optimizer"
                )
    return state


@torch.no_grad()
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
    moments: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for kind, targets in (("parameters", parameters), ("buffers", buffers)):
        for name, target in targets.items():
            value = state.get(f"{kind}/{name}")
            if value is None or value.shape != target.shape:
                shape = "nothing" if value is None else list(value.shape)
                raise CapslogError(
                    f"the state of {name!r} is {shape}, the model wants {list(target.shape)}: build_model must give "
                    "the same model every time"
                )
            target.copy_(value)
    for address, value in state.items():
        kind, _, rest = address.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optimizer" and name in moments:
            # a count of steps stays on the host, where the optimizer made it
            device = value.device if value.dim() == 0 else parameters[name].device
            moments[name][key] = value.detach().to(device, copy=True)
        elif kind == "number" and name in moments:
            number = float(value)
            moments[name][key] = int(number) if number.is_integer() else number
    for name, kept in moments.items():
        optimizer.state.pop(parameters[name], None)
        if kept:
            optimizer.state[parameters[name]] = kept


def state_bytes(model: nn.Module, trace: Trace) -> tuple[int, ...]:
    """Bytes of every piece's state, the optimizer's reckoned as two moments."""
    sizes = {name: _STATE_FACTOR * p.numel() * p.element_size() for name, p in model.named_parameters()}
    sizes |= {name: buffer.numel() * buffer.element_size() for name, buffer in model.named_buffers()}
    return tuple(
        max(1, sum(sizes[name] for names in names_of(trace, piece) for name in names))
        for piece in range(trace.num_pieces)
    )


class Follower:
    """A copy of a piece that makes the same steps as its owner, from the owner's final gradients.

    Args:
        frozen: parameters that need no gradient.
        prepare: the user's schedule; called with (optimizer, step) before each step.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        recipe: Recipe,
        frozen: Iterable[str],
        prepare: Callable[[torch.optim.Optimizer, int], None],
    ) -> None:
        still = set(frozen)
        found = {kind: _named(state, kind) for kind in ("parameters", "buffers")}
        self._parameters = {
            name: nn.Parameter(tensor.detach().clone(), requires_grad=name not in still)
            for name, tensor in found["parameters"].items()
        }
        self._buffers = {name: tensor.clone() for name, tensor in found["buffers"].items()}
        self._optimizer = recipe.build(self._parameters)
        self._prepare = prepare
        install(state, self._parameters, self._buffers, self._optimizer)

    def state(self, copy: bool) -> PieceState:
        """Its state now; without `copy` the live tensors."""
        state = capture(self._parameters, self._buffers, self._optimizer)
        return {key: tensor.clone() for key, tensor in state.items()} if copy else state

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """The step that the owner applies with this update: gradients, and buffers as the forward left them."""
        for name, parameter in self._parameters.items():
            parameter.grad = update.get(f"gradients/{name}")
        self._buffers |= _named(update, "buffers")
        self._prepare(self._optimizer, step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _named(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): value for key, value in state.items() if key.startswith(f"{kind}/")}
