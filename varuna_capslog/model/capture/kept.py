"""Keeps captures for every process of a run: files in the run's folder, each with one captured model.

`capture_layers` reads here first. A file belongs to the model's code, structure, inputs and cut points and to the
version of torch; where anything differs, or the file is damaged, the model is captured anew, which is never wrong. It
holds the layers, but not the classes of its own in which the model returns their outputs (`captured_result`), which no
run needs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.files import whole_file, write_failure, write_text
from varuna_capslog.model.capture.runtime import FixedSize, Varying
from varuna_capslog.model.capture.text import CapturedLayers, NotText, from_text, to_text
from varuna_capslog.model.sources import class_name, code_digest, module_settings
from varuna_capslog.model.state_file import load_tensors

__all__ = ["CaptureRequest", "Kept"]

_DAMAGED = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    NotText,
)
"""Errors that reading a file raises that is not the one that was written."""

_REFUSAL = ".txt"
"""Suffix of a file that says why a request cannot be captured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureRequest:
    """Arguments of `capture_layers`, which decide what is captured.

    Attributes:
        example: (positional arguments, keyword arguments).
    """

    model: nn.Module
    cut_points: Sequence[str] | None
    example: tuple[tuple[Any, ...], Mapping[str, Any]]
    outputs: Sequence[str] | None
    evaluates: bool

    def digest(self, code: Sequence[str] = ()) -> str:
        """SHA-256 of all that decides what is captured; weights do not count.

        Args:
            code: Python modules beside those of the model's classes.
        """
        digest = hashlib.sha256(repr((torch.__version__, self.cut_points, self.outputs, self.evaluates)).encode())
        leaves, spec = pytree.tree_flatten((self.example[0], dict(self.example[1])))
        digest.update(repr(([_described(leaf) for leaf in leaves], str(spec))).encode())
        tensors: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            digest.update(repr((path, class_name(type(module)), list(module_settings(module)))).encode())
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    first = tensors.setdefault(id(tensor), f"{path}.{name}")
                    digest.update(repr((name, first, tensor.shape, tensor.stride(), tensor.dtype)).encode())
                    digest.update(repr((tensor.requires_grad, name in module._non_persistent_buffers_set)).encode())
        digest.update(code_digest({type(module) for module in self.model.modules()}, code).encode())
        for file in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()


def _described(leaf: Any) -> object:
    if isinstance(leaf, Varying):
        return leaf.dimensions, _described(leaf.tensor)
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.requires_grad
    return class_name(type(leaf)), repr(leaf)


class Kept:
    """The captures of one run.

    Args:
        folder: of the run's captures; it may be missing.
        code: Python modules, beside those of the model's classes, whose code decides what is captured.

    Attributes:
        writes: whether what is captured anew is kept here.
    """

    def __init__(self, folder: Path, code: Sequence[str] = ()) -> None:
        self._folder, self._code = folder, tuple(code)
        self.writes = False

    def read(self, request: CaptureRequest) -> CapturedLayers | None:
        """Return the capture that was kept for this request, on the modules of its model; None if there is none.

        Raises FixedSize where it is known that the request cannot be captured.
        """
        if not self._folder.is_dir():
            return None
        path = self._path(request)
        if (refusal := path.with_suffix(_REFUSAL)).is_file():
            raise FixedSize(refusal.read_text(encoding="utf-8"))
        try:
            contents = load_tensors(path)
            tensors = contents["tensors"]
            if contents["digest"] != _digest(contents["layers"], tensors):
                raise ValueError("its digest differs")
            return from_text(contents["layers"], tensors, request.model)
        except FileNotFoundError:
            if not self.writes:
                _log.warning(
                    "%s holds no capture of this model, code and torch %s: it is captured here",
                    self._folder,
                    torch.__version__,
                )
        except _DAMAGED as error:
            _log.warning("the kept capture %s is damaged (%s): the model is captured here", path, error)
        return None

    def refuse(self, request: CaptureRequest, error: FixedSize) -> None:
        """Record that a request cannot be captured, so that no other process tries."""
        for evaluates in (True, False):  # the sizes of inputs do not depend on the modes that are asked for
            write_text(self._path(replace(request, evaluates=evaluates)).with_suffix(_REFUSAL), str(error))

    def write(self, request: CaptureRequest, captured: CapturedLayers) -> None:
        """Keep a capture; where it has no text form the log says so, and every process captures the model itself."""
        try:
            text, tensors = to_text(captured, request.model)
        except NotText as error:
            _log.warning("the captured model is not handed to the workers (%s): each captures it itself", error)
            return
        path = self._path(request)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                torch.save({"layers": text, "tensors": tensors, "digest": _digest(text, tensors)}, file)
        except OSError as error:
            raise write_failure(f"{path} cannot be written", error) from error

    def _path(self, request: CaptureRequest) -> Path:
        return self._folder / f"{request.digest(self._code)[:32]}.pt"


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
