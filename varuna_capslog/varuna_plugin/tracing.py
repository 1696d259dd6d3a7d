"""Finds the pieces that use each parameter and buffer, and the tensors at each CutPoint, from one real forward.

The model runs once, whole, on a small batch. Every operation is recorded below the level of modules, so the name or
view by which a parameter is used does not matter. The model does not change: gradients are not kept, buffers are
copies, random numbers are restored. A *piece* is the part between two CutPoints, counted from 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import TensorSpec

__all__ = [
    "CutSpec",
    "Partition",
    "Phantom",
    "TieGroup",
    "Trace",
    "copied_buffers",
    "find_phantom",
    "flatten_cut",
    "make_phantoms",
    "refuse_phantom",
    "tie_groups",
    "trace_model",
    "uniform_cuts",
]


# -- Placeholders for values that other stages compute.
#
# Varuna runs the whole `forward` of a model on every stage; code before the stage's first cut works on phantoms. A
# phantom can be used in any tensor code, which returns phantoms; code that needs a number or a decision from a phantom
# raises an error that says that another stage has the value.


class Phantom:
    """Placeholder for a value of another stage.

    source: origin of the value, for errors. dims: number of dimensions, where known; `shape` can then be unpacked.
    length: number of entries, where known; the phantom itself can then be unpacked.
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
    """Describe a result: ("tensor", dims), ("tuple" or "list", [...]), ("dict", {...}), ("none",), ("value",)."""
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
    """Return phantoms in a structure of `describe_structure`."""
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


# -- The pieces that use each parameter and buffer


@dataclass(frozen=True)
class CutSpec:
    """The tensors that cross a cut.

    Attributes:
        structure: structure of the CutPoint's arguments.
        present: for each leaf of the structure, True for a tensor, False for None.
        tensors: shape, dtype, stride and requires_grad in the traced run; only dtype and requires_grad hold for other
            batches.
    """

    name: str
    structure: Any
    present: tuple[bool, ...]
    tensors: tuple[TensorSpec, ...]

    def arguments(self, tensors: Iterable[Tensor]) -> Any:
        """Return the CutPoint's arguments with these tensors as leaves."""
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if present else None for present in self.present], self.structure)


@dataclass(frozen=True)
class Call:
    """Call of a module: pieces at its begin and end, index of the enclosing call, structure of the result."""

    module: str
    parent: int | None
    first: int
    last: int
    structure: Any


@dataclass(frozen=True)
class Trace:
    """All facts of a model that partitioning needs; plain data, the same on every rank.

    Attributes:
        cuts: in the order in which the forward reaches them; cut i separates piece i from piece i + 1.
        parameters, buffers: name -> pieces that use it, ascending; one name per tensor, its first.
        calls: in order of their begin.
        moving: buffers that a forward changes, other than running statistics.
        made_bytes: bytes of all results of each piece's operations: no forward of the piece can save more.
    """

    cuts: tuple[CutSpec, ...]
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    calls: tuple[Call, ...]
    moving: tuple[str, ...] = ()
    made_bytes: tuple[int, ...] = ()

    @property
    def num_pieces(self) -> int:
        """Number of pieces: the number of cuts plus one."""
        return len(self.cuts) + 1


def flatten_cut(arguments: tuple[Any, ...], name: str) -> tuple[list[Tensor], tuple[bool, ...], Any]:
    """Return the tensors among a CutPoint's arguments, a flag per leaf (True: a tensor), and the arguments' structure.

    Raises CapslogError for a leaf that is neither a tensor nor None.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise CapslogError(
                f"CutPoint {name!r} is given a {type(leaf).__name__}; only tensors (also in tuples, lists and "
                "dictionaries) and None can cross a cut"
            )
    return [leaf for leaf in leaves if leaf is not None], tuple(leaf is not None for leaf in leaves), structure


class _Uses(TorchDispatchMode):
    """Mode that records the pieces whose operations use a known storage, and the bytes that each piece makes."""

    def __init__(self, names: Mapping[int, Sequence[str]]) -> None:
        super().__init__()
        self.names, self.piece = names, 0
        self.pieces_of: dict[str, set[int]] = {}
        self.made: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = set()
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor):
                input_storages.add(_storage(leaf))
                for name in self.names.get(_storage(leaf), ()):
                    self.pieces_of.setdefault(name, set()).add(self.piece)
        result = function(*args, **(kwargs or {}))
        new = {_storage(leaf): leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
        made = sum(
            leaf.untyped_storage().nbytes()
            for storage, leaf in new.items()
            if storage and storage not in input_storages
        )
        self.made[self.piece] = self.made.get(self.piece, 0) + made
        return result


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage
        return 0


def trace_model(model: nn.Module, inputs: Mapping[str, Any], cut_type: type[nn.Module]) -> Trace:
    """Run `model(**inputs)` once and return its trace.

    cut_type: Varuna's CutPoint, whose `forward` calls `cp_func` where that is set. Raises CapslogError where a CutPoint
    is reached twice, or its arguments cannot be sent.
    """
    before = dict(model.named_buffers())
    with copied_buffers(model.modules()):
        names: dict[int, list[str]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            names.setdefault(_storage(tensor), []).append(name)
        uses, cuts = _Uses(names), list[CutSpec]()
        with contextlib.ExitStack() as on:
            on.enter_context(_watched_cuts(model, cut_type, uses, cuts))
            calls = on.enter_context(_watched_calls(model, uses))
            on.enter_context(torch.random.fork_rng(devices=[]))
            on.enter_context(torch.enable_grad())
            on.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never))
            on.enter_context(uses)
            model(**inputs)
        moving = _moving(model, before)
    return Trace(
        cuts=tuple(cuts),
        parameters=_owned([name for name, _ in model.named_parameters()], uses.pieces_of),
        buffers=_owned([name for name, _ in model.named_buffers()], uses.pieces_of),
        calls=tuple(calls),
        moving=tuple(moving),
        made_bytes=tuple(uses.made.get(piece, 0) for piece in range(len(cuts) + 1)),
    )


def _never(packed: Any) -> Tensor:
    raise CapslogError("the model computes gradients inside its forward, which Varuna cannot split")


def _owned(names: Sequence[str], pieces_of: Mapping[str, set[int]]) -> dict[str, tuple[int, ...]]:
    """Return each name's pieces. An unused tensor gets the first piece of the name before, so that a stage keeps it."""
    result: dict[str, tuple[int, ...]] = {}
    before = next((min(pieces_of[name]) for name in names if name in pieces_of), 0)
    for name in names:
        result[name] = tuple(sorted(pieces_of.get(name, {before})))
        before = result[name][0]
    return result


@contextlib.contextmanager
def copied_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace buffers by copies inside the block. Originals are put back, not overwritten: a graph may hold them."""
    kept = [(module, dict(module._buffers)) for module in modules]
    copies = {id(buffer): buffer.clone() for _, buffers in kept for buffer in buffers.values() if buffer is not None}
    for module, buffers in kept:
        module._buffers.update({name: copies.get(id(buffer)) for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


def _moving(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    statistics = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    return [
        name
        for name, now in model.named_buffers()
        if name not in statistics and name in before and not torch.equal(now.nan_to_num(), before[name].nan_to_num())
    ]


@contextlib.contextmanager
def _watched_cuts(model: nn.Module, cut_type: type[nn.Module], uses: _Uses, cuts: list[CutSpec]) -> Iterator[None]:
    """Make every CutPoint record its arguments in `cuts`, and begin the next piece in `uses`."""
    points: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, cut_type)}
    reached: set[str] = set()

    def report(name: str, *arguments: Any) -> Any:
        if name in reached:
            raise CapslogError(f"CutPoint {name!r} is reached twice in one forward; use one CutPoint per place")
        reached.add(name)
        tensors, present, structure = flatten_cut(arguments, name)
        cuts.append(CutSpec(name, structure, present, tuple(TensorSpec.of(tensor) for tensor in tensors)))
        uses.piece += 1
        return arguments[0] if len(arguments) == 1 else arguments

    for name, point in points.items():
        point.cp_func = functools.partial(report, name)
    try:
        yield
    finally:
        for point in points.values():
            point.cp_func = None


@contextlib.contextmanager
def _watched_calls(model: nn.Module, uses: _Uses) -> Iterator[list[Call]]:
    """Record every call of a submodule."""
    calls: list[Call] = []
    stack: list[int] = []
    handles = []

    def begin(name: str, module: nn.Module, arguments: Any) -> None:
        stack.append(len(calls))
        calls.append(Call(name, stack[-2] if len(stack) > 1 else None, uses.piece, uses.piece, None))

    def end(module: nn.Module, arguments: Any, result: Any) -> None:
        index = stack.pop()
        calls[index] = dataclasses.replace(calls[index], last=uses.piece, structure=describe_structure(result))

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(functools.partial(begin, name)))
            handles.append(module.register_forward_hook(end))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- A trace cut into stages: the parameters and pieces of each stage. Pure data and functions; the same on every
#    rank.
#
# A stage is a range of pieces. A parameter or buffer belongs to every stage that uses it; the first of these stages is
# its owner, which counts it in the gradient norm and writes it to a checkpoint file.


def uniform_cuts(num_pieces: int, num_stages: int) -> tuple[int, ...]:
    """Return Varuna's split: equally many pieces per stage, the last takes the rest. CapslogError: too few pieces."""
    if num_pieces < num_stages:
        raise CapslogError(
            f"the model has {num_pieces - 1} CutPoints, so {num_pieces} pieces, but {num_stages} stages; place more "
            "CutPoints or use fewer stages"
        )
    return tuple(stage * (num_pieces // num_stages) for stage in range(num_stages))


@dataclass(frozen=True)
class TieGroup:
    """Parameters with one value and one gradient: a parameter that several stages use, or several declared as shared.

    stages: all stages that hold one of the parameters, ascending; the first counts the gradient in the norm.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """A trace and the first piece of each stage. Raises CapslogError unless the cuts fit the number of pieces."""

    trace: Trace
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "cuts", fields.cut_list(self.cuts, self.trace.num_pieces))
        except CapslogError as error:
            raise CapslogError(
                f"{error} (the model has {len(self.trace.cuts)} CutPoints, so pieces 0 to {len(self.trace.cuts)})"
            ) from None

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline."""
        return len(self.cuts)

    def pieces(self, stage: int) -> range:
        """Pieces of a stage."""
        end = self.cuts[stage + 1] if stage + 1 < len(self.cuts) else self.trace.num_pieces
        return range(self.cuts[stage], end)

    def stage_of(self, piece: int) -> int:
        """Stage that holds a piece."""
        return sum(cut <= piece for cut in self.cuts) - 1

    @cached_property
    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """Stages that use each parameter and buffer, ascending."""
        return {
            name: tuple(sorted({self.stage_of(piece) for piece in pieces}))
            for name, pieces in (*self.trace.parameters.items(), *self.trace.buffers.items())
        }

    @cached_property
    def home(self) -> dict[str, int]:
        """Piece whose checkpoint file holds each parameter and buffer: the first that uses it."""
        return {name: pieces[0] for name, pieces in (*self.trace.parameters.items(), *self.trace.buffers.items())}

    def entry(self, stage: int) -> CutSpec | None:
        """Cut before a stage; None for the first."""
        return self.trace.cuts[self.cuts[stage] - 1] if stage > 0 else None

    def exit(self, stage: int) -> CutSpec | None:
        """Cut behind a stage; None for the last."""
        return self.entry(stage + 1) if stage + 1 < self.num_stages else None


def tie_groups(partition: Partition, declared: Iterable[Sequence[str]] = ()) -> tuple[TieGroup, ...]:
    """Return all ties, sorted by first name.

    declared: Varuna's `shared_weights`: groups of parameter names with equal values, whose gradients are added up.
    Raises CapslogError for a name that is no parameter of the model.
    """
    leader = {name: name for name in partition.trace.parameters}

    for names in declared:
        for name in names:
            if name not in leader:
                raise CapslogError(
                    f"shared_weights names {name!r}, which is no parameter of the model (or the second name of one "
                    "that is already the same tensor: leave it out)"
                )
            old, new = leader[name], leader[names[0]]
            leader = {parameter: new if first == old else first for parameter, first in leader.items()}
    classes: dict[str, list[str]] = {}
    for name in partition.trace.parameters:
        classes.setdefault(leader[name], []).append(name)
    groups = []
    for names in classes.values():
        stages = sorted({stage for name in names for stage in partition.stages_of[name]})
        if len(names) > 1 or len(stages) > 1:
            groups.append(TieGroup(tuple(sorted(names)), tuple(stages)))
    return tuple(sorted(groups, key=lambda group: group.names))
