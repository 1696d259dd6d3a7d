"""A nested state as tensors by name, and back: the form in which what a script calls its state travels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.work import LayerState

__all__ = ["pack", "unpack"]

_STRUCTURE = "structure"


def pack(state: Any, copy: bool) -> LayerState:
    """A nested state as tensors by name; equal states give equal names, types and bytes.

    Raises:
        CapslogError: it holds something else than dicts, lists, tuples, tensors, numbers, text, booleans and None.
    """
    tensors: LayerState = {}

    def fold(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            name = f"tensor/{len(tensors):06d}"
            tensors[name] = value.detach().clone() if copy else value.detach()
            return {"tensor": name}
        if isinstance(value, Mapping):  # keys may be numbers, and their order counts
            return {"dict": [[fold(key, where), fold(entry, f"{where}[{key!r}]")] for key, entry in value.items()]}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [fold(entry, f"{where}[{index}]") for index, entry in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CapslogError(
            f"state(){where} is a {type(value).__name__}; a state may hold dicts, lists, tuples, tensors, numbers, "
            "text, booleans and None"
        )

    text = json.dumps(fold(state, "")).encode()
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def unpack(packed: Mapping[str, Tensor]) -> Any:
    """The nested state; its tensors are those of `packed`."""

    def unfold(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return packed[content]
        if kind == "dict":
            return {unfold(key): unfold(entry) for key, entry in content}
        entries = [unfold(entry) for entry in content]
        return tuple(entries) if kind == "tuple" else entries

    return unfold(json.loads(packed[_STRUCTURE].numpy().tobytes()))
