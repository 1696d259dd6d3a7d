"""Exports a checkpoint's weights to other programs, under their names, in one of several forms.

The values are those to compute with: where a run keeps averages, the averages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import persistent_buffers
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload

__all__ = ["FORMS", "WholeChain", "own_weights", "write_weights"]


class WholeChain(nn.Module):
    """A chain as one module: it takes the chain's inputs in order and returns its outputs in order."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in chain.layers)
        self._wiring = [(layer.reads, layer.writes) for layer in chain.layers]
        self._inputs, self._outputs = chain.inputs, chain.outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the chain on one microbatch."""
        values: dict[str, Any] = dict(zip(self._inputs, inputs, strict=True))
        for layer, (reads, writes) in zip(self.layers, self._wiring, strict=True):
            result = layer(*[values.get(name) for name in reads])
            values.update(zip(writes, result if isinstance(result, tuple) else (result,), strict=True))
        return tuple(values[name] for name in self._outputs)


def own_weights(workload: Workload, chain: Chain) -> dict[str, Tensor]:
    """The chain's parameters and persistent buffers by the names that the model has elsewhere; shared ones once."""
    names = workload.own_names(chain)
    tensors = chain.named_tensors()
    kept = set(chain.named_parameters())
    for layer in chain.layers:
        parameters = dict(layer.module.named_parameters())
        kept |= {f"{layer.name}.{name}" for name in persistent_buffers(layer.module, parameters)}
    return {name: tensors[address].detach().cpu().contiguous() for address, name in names.items() if address in kept}


def write_weights(workload: Workload, chain: Chain, path: Path, form: str) -> None:
    """Writes a chain's weights in one of `FORMS`; a file is complete or not there.

    Raises:
        CapslogError: an unknown form, a package that it needs is not installed, or the model has no such form.
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
        with contextlib.suppress(OSError):  # its folder may be none
            unfinished.unlink(missing_ok=True)


def _safetensors(workload: Workload, chain: Chain, path: Path) -> None:
    save_file = _needed("safetensors.torch", "safetensors").save_file
    # tensors of one storage are told apart by their names elsewhere, but a file may hold a storage once only
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
"""safetensors, torch: one file with the model's own names; detr: the original DETR's file; hf: a folder for
`from_pretrained`; dcp: a folder of torch.distributed.checkpoint, under the key "model"; onnx: the whole model in
evaluation mode, for inputs of the profile's sizes."""
