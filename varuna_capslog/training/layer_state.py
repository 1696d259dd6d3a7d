"""The training state of one layer as a flat dict of tensors: what travels between members, lies in copies and on disk.

Keys are "parameters/<name>", "buffers/<name>" and "optimizer/<name>/<moment>", names as inside the layer. A shared
parameter is in the state of every layer that uses it, moments included, so that each layer can be built from its own
state alone; only a checkpoint keeps it once, under its first layer. Nothing here knows ranks or steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.model.chain import Chain

if TYPE_CHECKING:
    from varuna_capslog.training.checkpoint import Checkpoint

__all__ = [
    "LayerState",
    "capture",
    "digest",
    "from_checkpoint",
    "initial",
    "install",
    "size_of",
    "split_address",
    "to_checkpoint",
]

LayerState = dict[str, Tensor]

_STEP_BYTES = 4
"""AdamW counts the steps of each parameter in a float32."""


def capture(layer: EngineLayer, optimizer: StageOptimizer, copy: bool) -> LayerState:
    """A layer's state as it is.

    Args:
        optimizer: of the engine that has the layer.
        copy: False gives the live tensors, which the next `apply` changes.
    """
    state = {f"parameters/{name}": parameter.detach() for name, parameter in layer.parameters.items()}
    state |= {f"buffers/{name}": buffer.detach() for name, buffer in layer.buffers.items()}
    for name in layer.parameters:
        for moment, value in optimizer.moments(layer.address(name)).items():
            state[f"optimizer/{name}/{moment}"] = value
    return {key: tensor.clone() for key, tensor in state.items()} if copy else state


def install(layer: EngineLayer, optimizer: StageOptimizer, state: Mapping[str, Tensor]) -> None:
    """Puts a state into a layer; a parameter without moments in `state` has none afterwards.

    Values are copied, so that `state` stays as it is. The exception is a layer's own live state (`capture` with
    `copy=False`, from the optimizer that it had): the layer keeps its tensors, its new optimizer takes the moments.

    Raises:
        CapslogError: a parameter or buffer is missing or has another shape.
    """
    where = f"the state for layer {layer.name!r}"
    own = True
    for name, parameter in layer.parameters.items():
        own &= _copy(parameter, state.get(f"parameters/{name}"), f"parameter {name!r}", where)
    for name, buffer in layer.buffers.items():
        _copy(buffer, state.get(f"buffers/{name}"), f"buffer {name!r}", where)
    for name in layer.parameters:
        prefix = f"optimizer/{name}/"
        moments = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        optimizer.take_moments(layer.address(name), moments, copy=not own)


def _copy(target: Tensor, value: Tensor | None, what: str, where: str) -> bool:
    """Copies a value, unless it is the target itself: then True."""
    if value is None:
        raise CapslogError(f"{where} has no {what}; it is of another model")
    if value.shape != target.shape:
        raise CapslogError(f"{where} has {what} of shape {list(value.shape)}, the model wants {list(target.shape)}")
    if value.device == target.device and value.data_ptr() == target.data_ptr():
        return True
    with torch.no_grad():
        target.copy_(value)
    return False


def initial(chain: Chain, index: int) -> LayerState:
    """The state before step 1, copied from the chain, which must not have been trained: see `take_layers`."""
    return {key: tensor.detach().cpu().clone() for key, tensor in _model_state(chain, index).items()}


def _model_state(chain: Chain, index: int) -> LayerState:
    """A layer's parameters and persistent buffers in the chain itself."""
    module = chain.layers[index].module
    parameters = dict(module.named_parameters())
    state: LayerState = {f"parameters/{name}": parameter for name, parameter in parameters.items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in parameters:
            state[f"buffers/{name}"] = tensor
    return state


def from_checkpoint(checkpoint: Checkpoint, chain: Chain, index: int) -> LayerState:
    """A layer's state from disk, on the CPU; shared parameters come from their first layer's file.

    Raises:
        CapslogError: the checkpoint is damaged or of another model.
    """
    layer = chain.layers[index]
    shared = _shared_names(chain, index)
    files: dict[str, dict[str, Any]] = {}

    def part(owner: str, kind: str) -> Mapping[str, Any]:
        if owner not in files:
            files[owner] = checkpoint.layer(owner)
        found: Mapping[str, Any] = files[owner][kind]
        return found

    state: LayerState = {}
    for key, tensor in _model_state(chain, index).items():
        kind, name = key.split("/", 1)
        address, owner, inner = f"{layer.name}.{name}", layer.name, name
        if kind == "parameters":
            address = shared.get(name, address)
            owner, inner = split_address(address, layer.name, name, checkpoint)
        value = part(owner, kind).get(inner)
        if value is None or value.shape != tensor.shape:
            found = "nothing" if value is None else f"shape {list(value.shape)}"
            raise CapslogError(
                f"{checkpoint.path}: {address!r} has shape {list(tensor.shape)} in the model, {found} there; it was "
                "written for another model"
            )
        state[key] = value
        if kind == "parameters":
            for moment, content in part(owner, "optimizer").get(inner, {}).items():
                state[f"optimizer/{name}/{moment}"] = content
    return state


def split_address(address: str, layer: str, name: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """The layer in whose file a checkpoint keeps a parameter, and its name there.

    Args:
        address: of the parameter.
        layer, name: a layer that uses it, and its name there.

    Raises:
        CapslogError: it is not shared there.
    """
    if address == f"{layer}.{name}":
        return layer, name
    for owner in checkpoint.manifest["layers"]:
        if address.startswith(f"{owner}.") and address in checkpoint.manifest["shared"]:
            inner = address[len(owner) + 1 :]
            first = checkpoint.manifest["shared"][address][0]
            if inner == first[1]:
                return owner, inner
    raise CapslogError(
        f"{checkpoint.path}: parameter {address!r} is not shared there; it was written for another model"
    )


def _shared_names(chain: Chain, index: int) -> dict[str, str]:
    """Name inside the layer -> address, for its shared parameters."""
    return {name: shared.name for shared in chain.shared for use, name in shared.uses if use == index}


def to_checkpoint(state: Mapping[str, Tensor], chain: Chain, index: int) -> dict[str, Any]:
    """What a checkpoint's file of this layer holds: {"parameters", "buffers", "optimizer"}, on the CPU."""
    layer, shared = chain.layers[index], _shared_names(chain, index)
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        kind, name = key.split("/", 1)
        if kind == "buffers":
            buffers[name] = tensor.detach().cpu()
            continue
        name, _, moment = name.partition("/")
        if shared.get(name, f"{layer.name}.{name}") != f"{layer.name}.{name}":
            continue  # it belongs to an earlier layer
        if kind == "parameters":
            parameters[name] = tensor.detach().cpu()
        else:
            moments.setdefault(name, {})[moment] = tensor.cpu()
    return {"parameters": parameters, "buffers": buffers, "optimizer": moments}


def digest(state: Mapping[str, Tensor]) -> bytes:
    """16 bytes, equal for equal states: keys, dtypes, shapes and bits count; layout, device and order do not."""
    total = hashlib.blake2b(digest_size=16)
    for key in sorted(state):
        tensor = state[key].detach()
        total.update(f"{key} {tensor.dtype} {list(tensor.shape)};".encode())
        if tensor.numel():
            total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.digest()


def size_of(chain: Chain, index: int) -> int:
    """Bytes of a layer's state once every trainable parameter has AdamW's moments."""
    total = 0
    for key, tensor in _model_state(chain, index).items():
        size = tensor.numel() * tensor.dtype.itemsize
        total += size
        if key.startswith("parameters/") and tensor.requires_grad:
            total += 2 * size + _STEP_BYTES
    return total
