"""Placeholders for values that other stages compute.

Varuna runs the whole `forward` of a model on every stage; code before the stage's first cut works on phantoms. A
phantom can be used in any tensor code, which returns phantoms; code that needs a number or a decision from it gets an
error that says that another stage has the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError

__all__ = ["Phantom", "describe_structure", "find_phantom", "make_phantoms", "refuse_phantom"]


class Phantom:
    """Stands for a value of another stage.

    Args:
        source: where it comes from, for messages.
        dims: number of dimensions, where known; its `shape` can then be unpacked.
        length: number of entries, where known; it can then be unpacked itself.
    """

    def __init__(self, source: str, dims: int | None = None, length: int | None = None) -> None:
        self.__dict__.update(_source=source, _dims=dims, _length=length)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        phantom = find_phantom((arguments, keywords or {}))
        return Phantom(phantom._source if phantom is not None else "another stage")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "shape" and self._dims is not None:
            return Phantom(self._source, length=self._dims)
        if name == "ndim" and self._dims is not None:
            return self._dims
        return Phantom(self._source)

    def __setattr__(self, name: str, value: Any) -> None:
        """Do nothing: the attribute is set on the stage that has the value."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing, like `__setattr__`."""

    def __iter__(self) -> Iterator[Any]:
        if self._length is None:
            raise self._refusal("its entries (unpack the result of a module or the shape of one)")
        return iter([Phantom(self._source) for _ in range(self._length)])

    def __len__(self) -> int:
        if self._length is None:
            raise self._refusal("its length")
        return int(self._length)

    def __repr__(self) -> str:
        return f"Phantom({self._source})"

    def __hash__(self) -> int:
        return id(self)

    def _refusal(self, wanted: str) -> CapslogError:
        return CapslogError(
            f"the model's forward asks {self._source}, which another stage computes, for {wanted}; take it from the "
            "model's inputs, or move that code into a module before the cut"
        )


def _gives_phantom(self: Phantom, *others: Any, **keywords: Any) -> Phantom:
    return Phantom(self._source)


def _refuses(wanted: str) -> Callable[[Phantom], Any]:
    def refuse(self: Phantom) -> Any:
        raise self._refusal(wanted)

    return refuse


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OTHERS = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "call", "getitem")
for _name in (*(f"{kind}{name}" for name in _BINARY for kind in ("", "r", "i")), *_OTHERS):
    setattr(Phantom, f"__{_name}__", _gives_phantom)
for _name, _wanted in {"bool": "a decision", "int": "a number", "float": "a number", "index": "a number"}.items():
    setattr(Phantom, f"__{_name}__", _refuses(_wanted))


def describe_structure(value: Any) -> Any:
    """Return a plain description of a module's result: ("tensor", dims), ("tuple", [...]), ("list", [...]),
    ("dict", {...}), ("none",) or ("value",).
    """
    if isinstance(value, Tensor):
        return ("tensor", value.dim())
    if value is None:
        return ("none",)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return ("tuple" if isinstance(value, tuple) else "list", [describe_structure(item) for item in value])
    if type(value) is dict:
        return ("dict", {key: describe_structure(item) for key, item in value.items()})
    return ("value",)


def make_phantoms(structure: Any, source: str) -> Any:
    """Return phantoms in the described structure."""
    kind = structure[0]
    if kind == "tensor":
        return Phantom(source, dims=structure[1])
    if kind == "none":
        return None
    if kind in ("tuple", "list"):
        items = [make_phantoms(item, source) for item in structure[1]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: make_phantoms(item, source) for key, item in structure[1].items()}
    return Phantom(source)


def refuse_phantom(value: Any, where: str) -> None:
    """Raise CapslogError, whose sentence begins with `where`, for a phantom inside tuples, lists and dictionaries."""
    phantom = find_phantom(value)
    if phantom is not None:
        raise CapslogError(
            f"{where} {phantom!r}, which another stage computes: a value that is needed behind a cut must go through "
            "every CutPoint between, or come from the model's inputs"
        )


def find_phantom(value: Any) -> Phantom | None:
    """Return the first phantom inside tuples, lists and dictionaries, or None."""
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Phantom)), None)
