"""Loads the layers of a checkpoint under any plan, by layer and parameter name, and exports them to other programs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import EngineLayer, persistent_buffers
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.layer import TensorPiece, parts_from_json, put_together, split_table
from varuna_capslog.model.workload import Workload
from varuna_capslog.training.checkpoint import Checkpoint
from varuna_capslog.training.layer_state import (
    LayerState,
    flatten,
    install,
    model_state,
    plain_number,
    scaler_state,
)

__all__ = [
    "FORMS",
    "WholeChain",
    "from_checkpoint",
    "load_chain",
    "load_layers",
    "manifest_of_layers",
    "own_weights",
    "read_for",
    "to_checkpoint",
    "write_weights",
]


# -- Reads a checkpoint into a chain whose layers are split into other parts than in the checkpoint, or not split.


def read_for(checkpoint: Checkpoint, chain: Chain) -> Checkpoint:
    """Checkpoint with the layers of this chain, converted when read if they were split otherwise."""
    if checkpoint.manifest.get("splits", {}) == split_table(chain.layers):
        return checkpoint
    return _Resplit(checkpoint, chain)


def manifest_of_layers(chain: Chain) -> dict[str, Any]:
    """Entries of a manifest about a chain: shared parameters and, if there are any, layers that are parts of others."""
    shared = {use.name: [[index, name] for index, name in use.uses] for use in chain.shared}
    splits = split_table(chain.layers)
    return {"shared": shared, **({"splits": splits} if splits else {})}


class _Resplit(Checkpoint):
    """Checkpoint that joins the stored parts to whole layers and splits these into the parts of the chain's layers."""

    def __init__(self, checkpoint: Checkpoint, chain: Chain) -> None:
        layers: dict[str, Any] = {layer.name: {} for layer in chain.layers}
        super().__init__(checkpoint.path, {**checkpoint.manifest, **manifest_of_layers(chain), "layers": layers})
        self._found, self._chain = checkpoint, chain
        self._whole = functools.lru_cache(maxsize=1)(self._put_together)  # parts of a layer are read one after another

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """Return the state of a layer of the chain; see `Checkpoint.layer`."""
        index = next(at for at, layer in enumerate(self._chain.layers) if layer.name == name)
        layer, shared = self._chain.layers[index], self._chain.shared_names(index)
        kept = self._whole(layer.part.layer if layer.part else name, mapped)
        pieces = {
            inner: piece
            for inner, piece in _pieces(layer).items()
            if shared.get(inner, f"{name}.{inner}") == f"{name}.{inner}"
        }
        state: dict[str, Any] = {
            kind: {
                inner: piece.of(kept[kind][piece.name]) for inner, piece in pieces.items() if piece.name in kept[kind]
            }
            for kind in ("parameters", "buffers")
        }
        moments = {
            inner: kept["optimizer"][piece.name] for inner, piece in pieces.items() if piece.name in kept["optimizer"]
        }
        state["optimizer"] = {
            inner: {key: pieces[inner].of(value) for key, value in held.items()} for inner, held in moments.items()
        }
        return state | _scaler_of(kept)

    def _put_together(self, layer_name: str, mapped: bool) -> dict[str, Any]:
        """Return the state of a whole layer, in the form of its file."""
        rows = self._found.manifest.get("splits", {}).get(layer_name)
        if rows is None:
            return self._found.layer(layer_name, mapped)
        parts = [(pieces, self._found.layer(part, mapped)) for part, pieces in parts_from_json(rows).items()]
        joined: dict[str, Any] = {
            kind: put_together((pieces, state[kind]) for pieces, state in parts) for kind in ("parameters", "buffers")
        }
        joined["optimizer"] = moments = defaultdict[str, dict[str, Any]](dict)
        for key in sorted({key for _, state in parts for kept in state["optimizer"].values() for key in kept}):
            of_key = [
                (pieces, {name: kept[key] for name, kept in state["optimizer"].items() if key in kept})
                for pieces, state in parts
            ]
            for name, value in put_together(of_key).items():
                moments[name][key] = value
        return joined | _scaler_of(parts[0][1])


def _scaler_of(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Loss scale of the run, which is in the file of every layer; {} without one."""
    return {"scaler": kept["scaler"]} if "scaler" in kept else {}


def _pieces(layer: Layer) -> Mapping[str, TensorPiece]:
    if layer.part is not None:
        return layer.part.pieces
    names = (*dict(layer.module.named_parameters()), *dict(layer.module.named_buffers()))
    return {name: TensorPiece(name) for name in names}


# -- reads and writes the state of layers


def from_checkpoint(checkpoint: Checkpoint, chain: Chain, index: int) -> LayerState:
    """Read a layer's state from disk to the CPU; shared parameters are read from their first layer's file.

    Raises CapslogError where the checkpoint is damaged or of another model.
    """
    return _state_of(read_for(checkpoint, chain), chain, index)


def _state_of(checkpoint: Checkpoint, chain: Chain, index: int) -> LayerState:
    """Return a layer's state as `from_checkpoint`, from a checkpoint of `read_for`."""
    layer, shared = chain.layers[index].name, chain.shared_names(index)
    read: dict[str, dict[str, Any]] = {}

    def file_of(owner: str) -> dict[str, Any]:
        if owner not in read:
            read[owner] = checkpoint.layer(owner)
        return read[owner]

    state: LayerState = {}
    for key, tensor in model_state(chain, index).items():
        kind, name = key.split("/", 1)
        address, owner, inner = f"{layer}.{name}", layer, name
        if kind == "parameters":
            address = shared.get(name, address)
            owner, inner = _split_address(address, layer, name, checkpoint)
        value = file_of(owner)[kind].get(inner)
        if value is None or value.shape != tensor.shape:
            raise _mismatch(checkpoint.path, address, value, tensor)
        state[key] = value
        if kind == "parameters":
            state |= flatten({}, {}, {name: file_of(owner)["optimizer"].get(inner, {})})
    scaler = file_of(layer).get("scaler")
    return state if scaler is None else state | scaler_state(scaler)


def _split_address(address: str, layer: str, name: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the layer whose file has a parameter, and the parameter's name in that layer.

    layer, name: a layer that uses it, and its name there. Raises CapslogError where only the chain shares it.
    """
    if address == f"{layer}.{name}":
        return layer, name
    uses = checkpoint.manifest["shared"].get(address)
    if uses is None:
        raise CapslogError(
            f"{checkpoint.path}: parameter {address!r} is not shared there; it was written for another model"
        )
    first, inner = uses[0]
    return list(checkpoint.manifest["layers"])[int(first)], inner


def _on_host(key: str, tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


def to_checkpoint(
    state: Mapping[str, Tensor], chain: Chain, index: int, host: Callable[[str, Tensor], Tensor] = _on_host
) -> dict[str, Any]:
    """Content of a layer's file in a checkpoint, on the CPU, in the form that `Checkpoint.layer` returns.

    host: maps (key, tensor) of `state` to a tensor on the CPU; by default tensors on the CPU are not copied.
    """
    layer, shared = chain.layers[index], chain.shared_names(index)
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Any]] = {}
    scaler: dict[str, float] = {}
    for key, tensor in state.items():
        kind, name = key.split("/", 1)
        if kind == "buffers":
            buffers[name] = host(key, tensor)
            continue
        if kind == "scaler":
            scaler[name] = plain_number(tensor)
            continue
        name, _, moment = name.partition("/")
        if shared.get(name, f"{layer.name}.{name}") != f"{layer.name}.{name}":
            continue  # stored with an earlier layer
        if kind == "parameters":
            parameters[name] = host(key, tensor)
        else:
            kept = moments.setdefault(name, {})
            kept[moment] = host(key, tensor) if kind == "optimizer" else plain_number(tensor)
    return {"parameters": parameters, "buffers": buffers, "optimizer": moments} | ({"scaler": scaler} if scaler else {})


def load_layers(checkpoint: Checkpoint, chain: Chain, layers: Sequence[EngineLayer], optimizer: StageOptimizer) -> None:
    """Load the parameters, buffers and moments of these layers of a chain.

    Raises CapslogError, with the name, where a layer or parameter is missing or has another shape.
    """
    checkpoint = read_for(checkpoint, chain)
    for layer in layers:
        install(layer, optimizer, _state_of(checkpoint, chain, layer.index))


def load_chain(checkpoint: Checkpoint, chain: Chain) -> None:
    """Load a whole chain's weights for prediction or export, on one device; see `Checkpoint.weights`."""
    chain.fill()
    checkpoint = read_for(checkpoint, chain)
    for layer in chain.layers:
        weights = checkpoint.weights(layer.name)
        targets: dict[str, Tensor] = dict(layer.module.named_parameters()) | dict(layer.module.named_buffers())
        for name, value in weights.items():
            if name not in targets:
                raise CapslogError(f"{checkpoint.path}: the model's layer {layer.name!r} has no parameter {name!r}")
            if value.shape != targets[name].shape:
                raise _mismatch(checkpoint.path, f"{layer.name}.{name}", value, targets[name])
            with torch.no_grad():
                targets[name].copy_(value)


def _mismatch(where: Path, address: str, value: Tensor | None, target: Tensor) -> CapslogError:
    if value is None:
        return CapslogError(f"{where}: has no {address!r}; it was written for another model")
    return CapslogError(
        f"{where}: {address!r} has shape {list(value.shape)}, the model wants {list(target.shape)}; use init_from "
        "with init_skip to leave it out"
    )


# -- Exports a checkpoint's weights in one of several forms, with the names of the original model.
#
# The values are those for inference: averages, if the run has any.


class WholeChain(nn.Module):
    """Module that runs a chain, from the chain's inputs to its outputs, both in order."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in chain.layers)
        self._wiring = [(layer.reads, layer.writes) for layer in chain.layers]
        self._inputs, self._outputs = chain.inputs, chain.outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run all layers."""
        values: dict[str, Any] = dict(zip(self._inputs, inputs, strict=True))
        for layer, (reads, writes) in zip(self.layers, self._wiring, strict=True):
            result = layer(*[values.get(name) for name in reads])
            values.update(zip(writes, result if isinstance(result, tuple) else (result,), strict=True))
        return tuple(values[name] for name in self._outputs)


def own_weights(workload: Workload, chain: Chain) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the chain by their names in the original model; shared ones once."""
    names = workload.own_names(chain)
    tensors = chain.named_tensors()
    kept = set(chain.named_parameters())
    for layer in chain.layers:
        parameters = dict(layer.module.named_parameters())
        kept |= {f"{layer.name}.{name}" for name in persistent_buffers(layer.module, parameters)}
    return {name: tensors[address].detach().cpu().contiguous() for address, name in names.items() if address in kept}


def write_weights(workload: Workload, chain: Chain, path: Path, form: str) -> None:
    """Write a chain's weights in one of `FORMS`, atomically.

    Raises CapslogError: `path` exists or cannot be written, an unknown form, a missing package, or an unsuitable model.
    """
    fields.refuse_unknown([form], list(FORMS), "form of weights")
    if path.exists():
        raise CapslogError(f"{path} is there already; name a new file, or remove it")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FORMS[form](workload, chain, unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise CapslogError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):  # its parent may not be a folder
            unfinished.unlink(missing_ok=True)


def _safetensors(workload: Workload, chain: Chain, path: Path) -> None:
    save_file = _needed("safetensors.torch", "safetensors").save_file
    # the original model may have several names for one storage, but safetensors refuses tensors that share a storage
    save_file({name: value.clone() for name, value in own_weights(workload, chain).items()}, path, {"format": "pt"})


def _torch(workload: Workload, chain: Chain, path: Path) -> None:
    torch.save({"model": own_weights(workload, chain)}, path)


def _detr(workload: Workload, chain: Chain, path: Path) -> None:
    if workload.name != "detr":
        raise CapslogError(
            f"the model {workload.name!r} is no DETR, whose original layout this form is; take safetensors or torch, "
            "which have the model's own names"
        )
    _torch(workload, chain, path)


def _dcp(workload: Workload, chain: Chain, path: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"model": own_weights(workload, chain)}, checkpoint_id=path, no_dist=True)


def _huggingface(workload: Workload, chain: Chain, path: Path) -> None:
    model: Any = workload.build_model()
    if model is None or not hasattr(model, "save_pretrained"):
        raise CapslogError(
            f"the model {workload.name!r} is no Hugging Face model (it has no save_pretrained), so there is no folder "
            "that transformers reads; take safetensors, which has the model's own names"
        )
    model.load_state_dict(own_weights(workload, chain), strict=False)
    model.save_pretrained(path)


def _onnx(workload: Workload, chain: Chain, path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        _needed(package, package)
    chain.fill()
    for layer in chain.layers:
        layer.module.eval()
    specs = workload.profile_inputs(1)
    example = tuple(spec.zeros() for spec in (specs[name] for name in chain.inputs))
    with torch.no_grad():
        program = torch.onnx.export(
            WholeChain(chain),
            example,
            dynamo=True,
            verbose=False,
            input_names=list(chain.inputs),
            output_names=list(chain.outputs),
        )
    assert program is not None
    program.save(path)


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CapslogError(f"this form needs the package {package} ({error}); pip install {package}") from error


FORMS: Mapping[str, Callable[[Workload, Chain, Path], None]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "detr": _detr,
    "hf": _huggingface,
    "dcp": _dcp,
    "onnx": _onnx,
}
"""safetensors, torch: a file with the model's own names; detr: a file in the form of the original DETR; hf: a folder
for `from_pretrained`; dcp: a folder of torch.distributed.checkpoint, under the key "model"; onnx: the whole model in
evaluation mode, for one sample of the profile's sizes."""
