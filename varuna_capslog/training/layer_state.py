"""Training state of one layer as a flat dict of tensors, which is sent to members, kept in copies and written to disk.

Keys are "parameters/<name>", "buffers/<name>", "optimizer/<name>/<key>" and, for plain numbers of the optimizer,
"number/<name>/<key>"; names are relative to the layer, or to the whole model where the layer is a piece of a CutPoint
model. For a parameter with a float32 master, the state has the master. A shared parameter and its moments are in the
state of every layer that uses it, so that a layer can be restored from its own state; only a checkpoint stores it once.
In float16 every layer's state also has the run's loss scale at that boundary, "scaler/<key>". This module depends on
neither ranks nor checkpoints.

A follower is a copy of a layer that repeats every step of the layer's owner from the final gradients, so that its state
need not be sent again. `Follower` is for layers of our engine; the Varuna plugin has a follower for its pieces.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import BatchStatistics, EngineLayer, persistent_buffers, take_layers
from varuna_capslog.engine.optimizer import StageOptimizer, step_alike
from varuna_capslog.engine.recipe import EngineOptions, Recipe
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import low_bytes

__all__ = [
    "Follower",
    "LayerState",
    "StateFollower",
    "apply_together",
    "capture",
    "cloned",
    "copy_in",
    "digest",
    "flatten",
    "gradient_size",
    "initial",
    "install",
    "lies_in",
    "model_state",
    "moments_of",
    "plain_number",
    "scaler_state",
    "size_of",
]


LayerState = dict[str, Tensor]
Mismatch = Callable[[str, str, "Tensor | None", Tensor], CapslogError]
"""Maps ("parameter" or "buffer", its name, its value in the state or None, the target tensor) to an error."""


def flatten(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Any]]
) -> LayerState:
    """State of live tensors, without a copy; moments may be tensors, numbers or None (left out)."""
    state: LayerState = {f"parameters/{name}": parameter.detach() for name, parameter in parameters.items()}
    state |= {f"buffers/{name}": buffer.detach() for name, buffer in buffers.items()}
    for name, kept in moments.items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                state[f"optimizer/{name}/{key}"] = value
            elif value is not None:
                state[f"number/{name}/{key}"] = torch.tensor(value, dtype=torch.float64)
    return state


def moments_of(state: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Optimizer state of a parameter, by key; {} before its first step."""
    kept: dict[str, Any] = {}
    for address, value in state.items():
        kind, _, path = address.partition("/")
        parameter, _, key = path.rpartition("/")
        if kind == "optimizer" and parameter == name:
            kept[key] = value
        elif kind == "number" and parameter == name:
            kept[key] = plain_number(value)
    return kept


def plain_number(value: Tensor) -> float:
    """Number in a tensor of a state; an int if it is whole, as in the optimizer."""
    number = float(value)
    return int(number) if number.is_integer() else number


def scaler_state(numbers: Mapping[str, float]) -> LayerState:
    """Entries of a `LossScale` in a layer's state. numbers: with "scale" and "streak"."""
    return {f"scaler/{key}": torch.tensor(numbers[key], dtype=torch.float64) for key in ("scale", "streak")}


def copy_in(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    mismatch: Mismatch,
) -> bool:
    """Copy a state's parameters and buffers into tensors of the same names.

    Returns True where no parameter was copied, since each one in `state` is its target tensor itself. Raises the error
    of `mismatch` for a tensor that is missing or has another shape.
    """
    in_place = True
    for kind, targets in (("parameter", parameters), ("buffer", buffers)):
        for name, target in targets.items():
            value = state.get(f"{kind}s/{name}")
            if value is None or value.shape != target.shape:
                raise mismatch(kind, name, value, target)
            if value.device == target.device and value.data_ptr() == target.data_ptr():
                continue
            in_place &= kind == "buffer"
            with torch.no_grad():
                target.copy_(value)
    return in_place


def cloned(state: Mapping[str, Tensor]) -> LayerState:
    """Copy that later steps do not change."""
    return {key: tensor.clone() for key, tensor in state.items()}


def capture(layer: EngineLayer, optimizer: StageOptimizer, copy: bool) -> LayerState:
    """State of a layer. copy: False: the live tensors, which the next `apply` changes."""
    moments = {name: optimizer.moments(layer.address(name)) for name in layer.parameters}
    state = flatten(layer.values, layer.buffers, moments)
    if optimizer.loss_scale is not None:
        state |= scaler_state(vars(optimizer.loss_scale))
    return cloned(state) if copy else state


def install(layer: EngineLayer, optimizer: StageOptimizer, state: Mapping[str, Tensor]) -> None:
    """Load a state into a layer and its optimizer; a parameter without moments in `state` has none afterwards.

    Values are copied, except where `state` is the layer's own live state (`capture` with `copy=False`, from its earlier
    optimizer): then the layer keeps its tensors, and `optimizer` uses the moments themselves. Raises CapslogError where
    a parameter or buffer is missing or has another shape.
    """

    def mismatch(kind: str, name: str, value: Tensor | None, target: Tensor) -> CapslogError:
        label, where = f"{kind} {name!r}", f"the state for layer {layer.name!r}"
        if value is None:
            return CapslogError(f"{where} has no {label}; it is of another model")
        return CapslogError(f"{where} has {label} of shape {list(value.shape)}, the model wants {list(target.shape)}")

    in_place = copy_in(state, layer.values, layer.buffers, mismatch)
    if not in_place:
        layer.round_masters()
    if optimizer.loss_scale is not None and "scaler/scale" in state:
        scale, streak = float(state["scaler/scale"]), int(state["scaler/streak"])
        optimizer.loss_scale = dataclasses.replace(optimizer.loss_scale, scale=scale, streak=streak)
    for name in layer.parameters:
        optimizer.take_moments(layer.address(name), moments_of(state, name), copy=not in_place)


def lies_in(state: Mapping[str, Tensor], layer: EngineLayer) -> bool:
    """True where a state's parameters and buffers are the layer's own tensors."""
    live = flatten(layer.values, layer.buffers, {})
    return all(key in state and state[key].data_ptr() == tensor.data_ptr() for key, tensor in live.items())


def initial(chain: Chain, index: int) -> LayerState:
    """State before step 1, copied from a chain whose layers were not trained (`take_layers` may use them directly)."""
    chain.fill([index])
    return cloned(model_state(chain, index))


def model_state(chain: Chain, index: int) -> LayerState:
    """Live parameters and persistent buffers of a chain's layer."""
    module = chain.layers[index].module
    parameters = dict(module.named_parameters())
    return flatten(parameters, persistent_buffers(module, parameters), {})


def size_of(chain: Chain, index: int, recipe: Recipe, weights: str = "float32") -> int:
    """Bytes of a layer's state after a step, without a loss scale. weights: dtype in which parameters are kept."""
    module = chain.layers[index].module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    moments = sum(sum(recipe.kept(parameter).values()) for parameter in trained)
    _, less = low_bytes(module, weights)
    return sum(tensor.nbytes for tensor in model_state(chain, index).values()) + moments - less


def gradient_size(chain: Chain, index: int) -> int:
    """Bytes of the gradients of a layer's trainable parameters; 16-bit parameters have float32 gradients."""
    return sum(parameter.nbytes for parameter in chain.layers[index].module.parameters() if parameter.requires_grad)


class StateFollower(abc.ABC):
    """Base class of followers with any optimizer, which apply a step's final gradients and run no layer."""

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self._name = name
        self._parameters = parameters

    def state(self, copy: bool) -> LayerState:
        """State of the layer. copy: False: the live tensors, which the next `apply` changes."""
        state = self._live()
        return cloned(state) if copy else state

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """Apply a step with the verdict's scale; 0: skip its update.

        update: the owner's (`PipelineEngine.update_of`); uses up its gradients. Raises CapslogError for another layer.
        """
        self._take_update(update)
        self._step(step, scale)

    def _take_update(self, update: Mapping[str, Tensor]) -> None:
        for key, tensor in update.items():
            kind, name = key.split("/", 1)
            if kind == "gradients" and name in self._parameters:
                self._parameters[name].grad = tensor.to(self._parameters[name].device)
            elif not self._take(kind, name, tensor):
                raise CapslogError(f"layer {self._name!r} has nothing to do with {key!r}: an update of another")

    @abc.abstractmethod
    def _live(self) -> LayerState:
        """Return the live tensors."""

    @abc.abstractmethod
    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        """Keep another tensor of the update (buffers, running statistics); False if this layer has no such tensor."""

    @abc.abstractmethod
    def _step(self, step: int, scale: float) -> None:
        """Apply the gradients in `.grad` and the tensors from `_take`; drop both."""


class Follower(StateFollower):
    """Follower of a layer of our engine, with the owner's optimizer, so that both states are equal to the last bit.

    Args:
        chain, options: those of the owner's engine; the chain is not changed.
        device: of the copy; for equal bits its kernels must be those of the owner's device.
        state: initial state; copied.
        ready: layer of an earlier engine, which no engine runs. If `state` is its live state, it becomes the copy, and
            `state` is not copied; never for layers with shared parameters.

    Attributes:
        layer: the copy. Once an engine runs it, this follower must apply no more steps.
    """

    def __init__(
        self,
        chain: Chain,
        index: int,
        options: EngineOptions,
        device: torch.device,
        state: Mapping[str, Tensor],
        ready: EngineLayer | None = None,
    ) -> None:
        ready_layers = {index: ready} if ready is not None and lies_in(state, ready) else {}
        (self.layer,) = take_layers(chain, [index], device, options.precision, ready_layers, options.weights)
        super().__init__(self.layer.name, self.layer.parameters)
        self._optimizer = StageOptimizer([self.layer], options.recipe, loss_scale=options.loss_scale)
        self._statistics: dict[int, dict[int, BatchStatistics]] = {}
        install(self.layer, self._optimizer, state)

    def _live(self) -> LayerState:
        return capture(self.layer, self._optimizer, copy=False)

    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        if kind != "statistics" or not self.layer.statistics:
            return False
        microbatch, call, module = map(int, name.split("/"))
        batch = BatchStatistics(module, tensor.to(self.layer.device))
        self._statistics.setdefault(microbatch, {})[call] = batch
        return True

    def _step(self, step: int, scale: float) -> None:
        self._optimizer.step(step, scale)
        self._commit()

    def _commit(self) -> None:
        statistics, self._statistics = self._statistics, {}
        if self.layer.statistics and statistics:
            calls = {microbatch: [by_call[k] for k in sorted(by_call)] for microbatch, by_call in statistics.items()}
            self.layer.statistics.commit(calls)


def apply_together(due: Iterable[tuple[Follower, Mapping[str, Tensor], int, float]]) -> None:
    """Apply each (follower, update, step, scale), all of one recipe, in fewer kernel calls than `Follower.apply`."""
    alike: dict[tuple[int, float], list[Follower]] = {}
    for follower, update, step, scale in due:
        follower._take_update(update)
        alike.setdefault((step, scale), []).append(follower)
    for (step, scale), followers in alike.items():
        step_alike([follower._optimizer for follower in followers], step, scale)
        for follower in followers:
            follower._commit()


# -- A digest of a layer's state that takes little longer than reading the state, computed on the state's device.
#
# It detects damage and members that computed differently. It does not authenticate: an attacker can change a state and
# keep its digest (`base/connection` decides who may send at all).


_WORD = 8
_COLUMNS = 4096
_ROWS_AT_A_TIME = {"cpu": 32}
"""Rows of 32 KiB that remain in a CPU core's cache until the second sum. Other devices sum all rows at once."""


def digest(state: Mapping[str, Tensor]) -> bytes:
    """Digest of 16 bytes over keys, dtypes, shapes and bits, whatever the layout, device and order of the tensors.

    A tensor's bytes are read as rows of 4096 words of 8 bytes. The sums of all rows and of all columns, modulo 2^64,
    and the bytes of an incomplete last row are hashed instead of the tensor. A change within one row or column is
    always detected, and so are exchanged rows, columns or words, unless both sums agree by chance (2^-64); a change
    that keeps all sums needs at least four words, at the corners of a rectangle. 13 GB/s on a core where blake2b
    reaches 0.7 (`benchmarks/morph/state`); a GPU copies only the sums to the host.
    """
    total = hashlib.blake2b(digest_size=16)
    for key in sorted(state):
        tensor = state[key].detach()
        total.update(f"{key} {tensor.dtype} {list(tensor.shape)};".encode())
        if tensor.numel():
            for part in _parts(tensor.contiguous().reshape(-1).view(torch.uint8)):
                total.update(part.cpu().numpy().data)
    return total.digest()


def _parts(content: Tensor) -> list[Tensor]:
    """Hashed parts of a tensor's bytes: the row sums, the column sums, and an incomplete last row."""
    rows = content.numel() // (_WORD * _COLUMNS)
    if not rows:
        return [content]
    full_rows, remainder = content.split([rows * _WORD * _COLUMNS, content.numel() - rows * _WORD * _COLUMNS])
    if full_rows.storage_offset() % _WORD:
        full_rows = full_rows.clone()
    words = full_rows.view(torch.int64).view(rows, _COLUMNS)
    by_row, by_column = torch.empty_like(words[:, 0]), torch.zeros_like(words[0])
    at_a_time = _ROWS_AT_A_TIME.get(content.device.type, rows)
    for sums, block in zip(by_row.split(at_a_time), words.split(at_a_time), strict=True):
        torch.sum(block, 1, out=sums)
        by_column += block.sum(0)
    return [by_row, by_column, remainder]
