"""Defines a layer of a chain: a module and the tensors that it reads and writes; its parts, dtypes and modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError

__all__ = [
    "Layer",
    "PartOf",
    "TensorPiece",
    "dense_gradient",
    "freeze_layers",
    "frozen_parts",
    "gradient_hooks",
    "in_training",
    "low_bytes",
    "low_parameters",
    "parts_from_json",
    "put_in_training",
    "put_together",
    "split_table",
    "warning_of_one_sample",
    "weights_of_parts",
]


# -- Describes which elements of a whole layer's tensors the parts of a split layer hold, and joins them again.
#
# Checkpoints and weight files depend on it: tensors written under one split can be read under any other, or none.


SplitTable = dict[str, dict[str, dict[str, list[Any]]]]
"""Whole layer -> its parts -> name of a tensor in the part -> a `TensorPiece` as JSON."""


@dataclass(frozen=True)
class TensorPiece:
    """Elements of one tensor of a whole layer that a part of the layer holds.

    name: name of the tensor inside the whole layer.
    dim, size: the dimension that is cut, and its size in the whole tensor.
    ranges: (first, end) of the indices along `dim`, in order; () for all elements.
    """

    name: str
    size: int = 0
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def of(self, full: Any) -> Any:
        """Return these elements of the full tensor, or of an optimizer moment of its shape; numbers unchanged."""
        if not self._cuts(full):
            return full
        self._check(full, self.size)
        return torch.cat([full.narrow(self.dim, first, end - first) for first, end in self.ranges], self.dim)

    def put(self, part: Any, full: Any) -> Any:
        """Copy a part into the full tensor, and return the full tensor. full: None before the first part."""
        if not self._cuts(part):
            return part if full is None else full
        self._check(part, sum(end - first for first, end in self.ranges))
        shape = [self.size if at == self.dim else size for at, size in enumerate(part.shape)]
        if full is None:
            full = part.new_empty(shape)
        elif not isinstance(full, Tensor) or list(full.shape) != shape:
            raise CapslogError(f"the parts of {self.name!r} do not make one tensor of shape {shape}")
        at = 0
        for first, end in self.ranges:
            full.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, at, end - first))
            at += end - first
        return full

    def _check(self, tensor: Tensor, size: int) -> None:
        if self.dim >= tensor.dim() or tensor.shape[self.dim] != size:
            raise CapslogError(
                f"{self.name!r} has shape {list(tensor.shape)}, but {size} in dimension {self.dim} is due"
            )

    def _cuts(self, value: Any) -> bool:
        """True where a part holds only some elements of `value`."""
        return bool(self.ranges) and isinstance(value, Tensor) and value.dim() > 0

    def to_json(self) -> list[Any]:
        """Return [name, size, dim, ranges]."""
        return [self.name, self.size, self.dim, [list(bounds) for bounds in self.ranges]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorPiece:
        """Return the piece that `to_json` described."""
        name, size, dim, ranges = value
        return cls(name, int(size), int(dim), tuple((int(first), int(end)) for first, end in ranges))


@dataclass(frozen=True)
class PartOf:
    """Name of the whole layer that a layer is a part of. pieces: name of the part's tensor -> its elements."""

    layer: str
    pieces: Mapping[str, TensorPiece]


def split_table(layers: Iterable[Layer]) -> SplitTable:
    """Return the table of split layers for a checkpoint's manifest; {} where no layer is a part."""
    table: SplitTable = {}
    for layer in layers:
        if layer.part is not None:
            rows = {name: piece.to_json() for name, piece in layer.part.pieces.items()}
            table.setdefault(layer.part.layer, {})[layer.name] = rows
    return table


def parts_from_json(rows: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, dict[str, TensorPiece]]:
    """Return the parts of one whole layer, from its rows in a `split_table`."""
    return {
        part: {name: TensorPiece.from_json(value) for name, value in pieces.items()} for part, pieces in rows.items()
    }


def put_together(parts: Iterable[tuple[Mapping[str, TensorPiece], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the whole layer's tensors by name; numbers, such as an optimizer's step, are those of the first part.

    parts: (pieces, tensors by name) of each part; a tensor that is missing is in another part.
    """
    layer_tensors: dict[str, Any] = {}
    for pieces, tensors in parts:
        for name, piece in pieces.items():
            if name in tensors:
                layer_tensors[piece.name] = piece.put(tensors[name], layer_tensors.get(piece.name))
    return layer_tensors


def weights_of_parts(weights: Mapping[str, Tensor], layers: Iterable[Layer]) -> dict[str, Tensor]:
    """Return the weights by address `<layer>.<name>`; weights of whole layers are divided among the parts."""
    parts, divided = {}, set()
    for layer in layers:
        if layer.part is None:
            continue
        for name, piece in layer.part.pieces.items():
            full_address = f"{layer.part.layer}.{piece.name}"
            if full_address in weights:
                parts[f"{layer.name}.{name}"] = piece.of(weights[full_address])
                divided.add(full_address)
    return {address: value for address, value in weights.items() if address not in divided} | parts


# -- a layer of a chain


@dataclass(frozen=True)
class Layer:
    """Indivisible piece of a chain.

    Attributes:
        name: unique in the chain; checkpoints and profiles address the layer by it.
        module: called as `module(*[tensor for name in reads])`; returns a tensor, or a tuple in the order of `writes`.
        reads: names of the tensors that it takes.
        writes: names of the tensors that it returns; an earlier tensor of the same name is replaced.
        part: the whole layer, where this layer is a part of a split one (`splitting.splitter`).
    """

    name: str
    module: nn.Module
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)
    part: PartOf | None = None

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the layer on the tensors of `values` that it reads; return the tensors that it writes."""
        return self.run(values)

    def run(self, values: Mapping[str, Tensor], instead: Callable[..., Any] | None = None) -> dict[str, Tensor]:
        """Run the layer; `instead`: called in the place of its module."""
        result = (instead or self.module)(*[values[name] for name in self.reads])
        if isinstance(result, Tensor):
            result = (result,)
        if len(result) != len(self.writes):
            raise CapslogError(
                f"layer {self.name!r} returned {len(result)} tensors but declares writes={list(self.writes)}; make "
                "both the same"
            )
        return dict(zip(self.writes, result, strict=True))


def dense_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor: an embedding's may be sparse; gradients are added, normed and sent dense."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_hooks(parameter: nn.Parameter) -> list[Any]:
    """Return the user's own hooks on a parameter's gradient."""
    hooks = [*(parameter._backward_hooks or {}).values()]
    hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return [hook for hook in hooks if hook is not dense_gradient]


# -- Chooses the parameters of a layer that are kept in 16 bits for forward and backward (`train.weights`).
#
# Shape tracing, byte counts and the engine's layers all use this choice. The engine keeps a float32 master of each
# trained parameter.


_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDE = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Normalisations whose parameters stay in 32 bits. With these, the kernels take activations of 16 or 32 bits, both of
which autocast passes; they refuse other mixtures, such as 16-bit parameters beside 32-bit running statistics."""


def low_parameters(module: nn.Module, weights: str) -> dict[nn.Parameter, torch.dtype]:
    """Return the parameters kept in 16 bits, with the dtype: those of float32, except those of normalisations.

    weights: "float32" (none are), "bfloat16" or "float16".
    """
    if weights == "float32":
        return {}
    norms = [part for part in module.modules() if isinstance(part, _WIDE)]
    wide = {id(parameter) for part in norms for parameter in part.parameters(recurse=False)}
    low = [
        parameter for parameter in module.parameters() if parameter.dtype == torch.float32 and id(parameter) not in wide
    ]
    return dict.fromkeys(low, _TYPES[weights])


def low_bytes(module: nn.Module, weights: str) -> tuple[int, int]:
    """Return (bytes that 16-bit parameters add to float32 masters, bytes saved by frozen ones, which have none)."""
    low = low_parameters(module, weights).items()
    added = sum(parameter.numel() * dtype.itemsize for parameter, dtype in low if parameter.requires_grad)
    saved = sum(
        parameter.numel() * (parameter.itemsize - dtype.itemsize)
        for parameter, dtype in low
        if not parameter.requires_grad
    )
    return added, saved


# -- Keeps modules that a user froze, such as a BatchNorm, in eval mode while the model trains.
#
# All code that trains, recomputes or estimates layers calls `put_in_training`, never `train()` alone, which would
# unfreeze them. A captured layer records which of its modules were frozen at the capture (`Frozen`); the modes at
# the beginning of the training count as well.


class Frozen(nn.Module):
    """Layer whose modules named in `frozen` stay in eval mode when the layer is put into training mode."""

    frozen: tuple[str, ...] = ()
    _trained: tuple[str, ...] = ()

    def train(self, mode: bool = True) -> Any:
        """Set the mode as any module does, except for frozen modules."""
        super().train(mode)
        for name in self.frozen:
            self.get_submodule(name).training = False
        return self

    def freeze(self, frozen: Collection[int], trained: Collection[int]) -> None:
        """Record which modules are frozen and which are in training mode at the capture, by their ids."""
        held = [(name, id(part)) for name, part in self.named_modules(remove_duplicate=False) if name]
        names = tuple(name for name, key in held if key in frozen)
        if names:
            self.frozen = names
        self._trained = tuple(name for name, key in held if key in trained)

    def freeze_as(self, layer: Frozen) -> None:
        """Record the same modules as `layer`, by name, as far as this layer holds modules of these names."""
        names = {name for name, _ in self.named_modules(remove_duplicate=False)}
        if frozen := tuple(name for name in layer.frozen if name in names):
            self.frozen = frozen
        self._trained = tuple(name for name in layer._trained if name in names)

    @property
    def trained(self) -> list[nn.Module]:
        """Modules that were in training mode at the capture."""
        return [self.get_submodule(name) for name in self._trained]


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put the model into its training mode; at the end, restore the modes of all modules.

    If the model itself is in training mode before, its parts in eval mode count as frozen and stay so. In any case,
    parts that the `train` method of one of the model's classes leaves in eval mode stay in eval mode.
    """
    before = [(part, part.training) for part in model.modules()]
    trains = model.training
    try:
        model.train()
        for part, mode in before:
            part.training &= mode or not trains
        yield
    finally:
        for part, mode in before:
            part.training = mode


def freeze_layers(layers: Iterable[Layer], model: nn.Module) -> None:
    """Record in the layers of a captured model which of their modules are frozen."""
    trained = {id(part) for part in model.modules() if part.training}
    with in_training(model):
        frozen = {id(part) for part in frozen_parts(model)}
    for layer in layers:
        assert isinstance(layer.module, Frozen)
        layer.module.freeze(frozen, trained)


def put_in_training(layers: Iterable[nn.Module], chain: Sequence[nn.Module] | None = None) -> None:
    """Put layers into training mode, except for frozen modules.

    Frozen modules are of three kinds: frozen at the capture; modules of captured layers that are in eval mode now but
    were not at the capture; and modules of other layers in eval mode. If all modules of one of the last two kinds of
    layers are in eval mode now, the user has evaluated the model, and the rule for this kind freezes no module.

    chain: the modules of all layers of the chain, where `layers` are only some of them, or copies; None: `layers`.
    """
    layers = list(layers)
    trains = {isinstance(module, Frozen) for module in chain or layers if any(part.training for part in _parts(module))}
    for module in layers:
        judged = _parts(module) if isinstance(module, Frozen) in trains else ()
        frozen = [part for part in judged if not part.training]
        module.train()
        for part in frozen:
            part.training = False


def frozen_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts in eval mode of a module that is in training mode."""
    return [part for part in module.modules() if not part.training]


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    return module.trained if isinstance(module, Frozen) else module.modules()


# -- Warns of batch norms that train on one sample at a time, in plans, at the start of a run and in `fit`.


def warning_of_one_sample(modules: Iterable[tuple[str, nn.Module]], where: str, remedy: str) -> str | None:
    """Return a warning about the first batch norm that trains; None where no batch norm trains.

    Args:
        modules: (name, module), in their training modes.
        where: what has one sample, such as "a microbatch (train.microbatch_size=1)".
        remedy: how to get more samples, such as "choose train.microbatch_size=2 or more".
    """
    norms = [(name, part) for name, part in modules if _trains(part)]
    if not norms:
        return None
    (name, part), more = norms[0], len(norms) - 1
    others = f" (and {more} more like it)" if more else ""
    return (
        f"{name!r} is a {type(part).__name__}{others}, and {where} has one sample, so that each is normalised by "
        f"itself, unlike in evaluations; {remedy}, replace it by a GroupNorm, or freeze it with eval()"
    )


def _trains(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
