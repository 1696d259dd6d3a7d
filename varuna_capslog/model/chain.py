"""A model as an ordered list of layers, and the tensors that cross each cut between them.

A chain holds names and parameters; shapes come from `varuna_capslog.model.trace`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import Kept, OneOf, Varying, capture_layers, open_state
from varuna_capslog.model.capture.runtime import OfTheModel
from varuna_capslog.model.factories import Factories, LayerFactory
from varuna_capslog.model.hollow import hollow_parameter, kept_tensors, replace_parameters
from varuna_capslog.model.layer import Layer

__all__ = ["Chain", "Layer", "LayerFactory", "TensorSpec", "Value", "is_dense"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and memory layout of a tensor, which a receiver needs before the tensor arrives.

    `stride` keeps the memory format (channels_last sent as contiguous changes results); default: contiguous.
    `requires_grad`: a gradient of the same shape comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    stride: tuple[int, ...] = ()
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if len(self.stride) != len(self.shape):
            object.__setattr__(self, "stride", _contiguous_stride(self.shape))

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of an existing (or fake) tensor; a non-dense layout is described by its contiguous form."""
        stride = tensor.stride() if is_dense(tensor) else _contiguous_stride(tensor.shape)
        return cls(tuple(tensor.shape), tensor.dtype, tuple(stride), tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Return an uninitialised tensor of this spec, without requires_grad."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device | str = "cpu") -> Tensor:
        """Return a tensor of zeros of this spec, without requires_grad."""
        return self.empty(device).zero_()


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def is_dense(tensor: Tensor) -> bool:
    """True where the elements fill one block without gaps or overlaps, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Value(NamedTuple):
    """Tensor of a chain: its name and the layer that writes it (-1: an input). A name may be written twice."""

    name: str
    writer: int


@dataclass(frozen=True)
class TiedParameter:
    """Parameter that several layers share; its gradients from all layers are added.

    name: address `<first layer>.<parameter>`.
    uses: (layer index, name inside that layer's module), in layer order.
    num_bytes: bytes of one copy.
    """

    name: str
    uses: tuple[tuple[int, str], ...]
    num_bytes: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that use it, ascending."""
        return tuple(index for index, _ in self.uses)


class Chain:
    """Ordered list of layers `0..L-1`; a cut lies *before* a layer.

    Args:
        layers: in a topological order of the model's graph.
        inputs: names of the tensors that enter before layer 0; each crosses the cuts up to its last reader.
        outputs: names of the tensors that leave after layer L-1; the loss reads them.
        factories: build the layers, whose modules are hollow until then; see `from_factories`.

    Raises:
        CapslogError: no layers, or two of one name; a layer or the loss reads a tensor that does not exist there.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        inputs: Sequence[str] = ("x",),
        outputs: Sequence[str] = ("x",),
        name: str = "model",
        factories: Factories | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.factories = factories
        self._unbuilt = set() if factories is None else set(range(len(self.layers)))
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.name = name
        self._captured = OfTheModel()
        self._ties: tuple[TiedParameter, ...] = ()
        if not self.layers:
            raise CapslogError("a chain needs at least one layer, got none")
        available, names = set(self.inputs), set()
        for layer in self.layers:
            if layer.name in names:
                raise CapslogError(
                    f"two layers are named {layer.name!r}; checkpoints address layers by name: rename one"
                )
            names.add(layer.name)
            for read in layer.reads:
                if read not in available:
                    raise CapslogError(
                        f"layer {layer.name!r} reads {read!r}, which is neither an input nor written before it; "
                        f"known there: {sorted(available)}"
                    )
            available.update(layer.writes)
        for output in self.outputs:
            if output not in available:
                raise CapslogError(
                    f"the output {output!r} is written by no layer; known at the end: {sorted(available)}"
                )

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        cut_points: Sequence[str] | None,
        example_inputs: Mapping[str, Any] | Sequence[Any] | Tensor | Varying | OneOf | None = None,
        *,
        outputs: Sequence[str] | None = None,
        name: str | None = None,
        evaluates: bool | None = True,
        kept: Kept | None = None,
        compares: bool = True,
    ) -> Chain:
        """Make a chain of an ordinary module without edits; see `varuna_capslog.model.capture.capture_layers`."""
        captured = capture_layers(model, cut_points, example_inputs, outputs, evaluates, kept, compares)
        chain = cls(*captured, name or type(model).__name__)
        chain._captured = OfTheModel(open_state(model, chain.layers, modes=False))
        chain._ties = chain.shared
        return chain

    @property
    def kept_whole(self) -> list[str]:
        """Sentences with the reason why a part of a captured model runs as a whole, or why layers are joined."""
        properties = getattr(self.layers[-1].module, "meta", {})
        kept_modules = properties.get("whole", {}).items()
        return [f"{path or 'the model'} runs as a whole, as Python: {why}" for path, why in kept_modules] + [
            *properties.get("joined", [])
        ]

    @property
    def joined_parts(self) -> dict[str, list[str]]:
        """Name of each layer that joins several parts of the model -> its other parts; no cut may separate them."""
        parts: dict[str, list[str]] = getattr(self.layers[-1].module, "meta", {}).get("parts", {})
        return parts

    def check_unchanged(self) -> None:
        """Raise CapslogError if attributes, submodules or ties of the model have changed since the capture."""
        state = self._captured.value
        for change in [] if state is None else state.changes():
            raise CapslogError(
                f"{change} of the model was changed after the model was captured (from {change.before!r:.80} to "
                f"{change.after!r:.80}), which its layers do not know; capture the model again"
            )
        if state is not None and (changed := set(self._find_shared()) ^ set(self._ties)):
            raise CapslogError(
                f"the parameter {min(tie.name for tie in changed)!r} of the model was changed after the model was "
                "captured: other layers use it now, since it was tied or untied; capture the model again"
            )

    @classmethod
    def from_factories(
        cls,
        layers: Iterable[LayerFactory],
        inputs: Sequence[str] = ("x",),
        outputs: Sequence[str] = ("x",),
        name: str = "model",
        *,
        tied: Sequence[Sequence[str]] = (),
        seed: int | None = None,
    ) -> Chain:
        """Make a chain whose layers are built only where they are needed: an engine builds its own layers, `run` all.

        Until then, a layer's module has parameters without memory, and real buffers. The initial weights depend on
        (seed, layer index) alone.

        Args:
            tied: groups of addresses `<layer>.<name inside the layer>` of shared parameters, or of modules with
                parameters; the factory of a group's first layer gives their values.
            seed: None: `torch.initial_seed()`, which the caller of `build_chain` has set.

        Raises:
            CapslogError: as for a chain; a factory returns no module, or a module with another layer's parameter;
                `tied` names no parameter, or parameters of different shapes.
        """
        factories = Factories(layers, torch.initial_seed() if seed is None else seed)
        return cls(factories.hollow_layers(tied), inputs, outputs, name, factories)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def _crossing(self) -> tuple[tuple[str, ...], ...]:
        live = set(self.outputs)
        crossing = [tuple(sorted(live))]
        for layer in reversed(self.layers):
            live = (live - set(layer.writes)) | set(layer.reads)
            crossing.append(tuple(sorted(live)))
        return tuple(reversed(crossing))

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Return the sorted names of tensors that cross the cut before layer `cut` (0: inputs, L: read by the loss)."""
        return self._crossing[cut]

    @cached_property
    def reads(self) -> tuple[tuple[Value, ...], ...]:
        """Values that each layer reads, in the order of its `reads`; the last tuple holds what the loss reads."""
        writer, reads = dict.fromkeys(self.inputs, -1), []
        for index, layer in enumerate(self.layers):
            reads.append(tuple(Value(name, writer[name]) for name in layer.reads))
            writer |= dict.fromkeys(layer.writes, index)
        return (*reads, tuple(Value(name, writer[name]) for name in self.outputs))

    def written(self, layer: int) -> tuple[Value, ...]:
        """Return the values that a layer writes."""
        return tuple(Value(name, layer) for name in self.layers[layer].writes)

    @cached_property
    def readers(self) -> dict[Value, tuple[int, ...]]:
        """Value -> the layers that read it, ascending; the loss is layer L."""
        readers: dict[Value, tuple[int, ...]] = {}
        for reader, values in enumerate(self.reads):
            for value in dict.fromkeys(values):
                readers[value] = (*readers.get(value, ()), reader)
        return readers

    def gradient_pairs(self, carries: Callable[[Value], bool]) -> set[tuple[Value, int]]:
        """Return all pairs (value, layer that reads it) where a backward computes a gradient: a path of values with
        gradients leads from them to the loss, which counts as layer L. carries: True for a value with a gradient.
        """
        pairs: set[tuple[Value, int]] = set()
        reached: set[Value] = set()
        for reader in reversed(range(len(self) + 1)):
            if reader == len(self) or not reached.isdisjoint(self.written(reader)):
                values = [value for value in self.reads[reader] if carries(value)]
                reached.update(values)
                pairs.update((value, reader) for value in values)
        return pairs

    @cached_property
    def _values_at(self) -> tuple[tuple[Value, ...], ...]:
        alive = sorted(self.readers)
        return tuple(
            tuple(value for value in alive if value.writer < cut <= self.readers[value][-1])
            for cut in range(len(self) + 1)
        )

    def values_at(self, cut: int) -> tuple[Value, ...]:
        """Return the tensors of `crossing` as values."""
        return self._values_at[cut]

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (layer that writes a value, later layer that reads it), each once, ascending; inputs are left out. The
        loss counts as part of the last layer.
        """
        last = len(self) - 1
        pairs = {(value.writer, min(reader, last)) for value, row in self.readers.items() for reader in row}
        return tuple(sorted((writer, reader) for writer, reader in pairs if 0 <= writer < reader))

    @cached_property
    def shared(self) -> tuple[TiedParameter, ...]:
        """Parameters of several layers, by first use; found by identity, so that tied modules need no declaration."""
        return self._find_shared()

    def _find_shared(self) -> tuple[TiedParameter, ...]:
        uses: dict[nn.Parameter, list[tuple[int, str]]] = {}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.module.named_parameters():
                uses.setdefault(parameter, []).append((index, name))
        return tuple(
            TiedParameter(name, tuple(uses[parameter]), parameter.nbytes)
            for name, parameter in self.named_parameters().items()
            if len(uses[parameter]) > 1
        )

    def shared_names(self, index: int) -> dict[str, str]:
        """Name inside a layer -> address, for its shared parameters."""
        return {name: shared.name for shared in self.shared for use, name in shared.uses if use == index}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its address `<layer>.<name>`; a shared one under its first layer."""
        addresses: dict[nn.Parameter, str] = {}
        for layer in self.layers:
            for name, parameter in layer.module.named_parameters():
                addresses.setdefault(parameter, f"{layer.name}.{name}")
        return {address: parameter for parameter, address in addresses.items()}

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every parameter as in `named_parameters`, and every buffer, by its address."""
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for layer in self.layers:
            tensors |= {f"{layer.name}.{name}": buffer for name, buffer in layer.module.named_buffers()}
        return tensors

    def fill(self, indices: Iterable[int] | None = None) -> None:
        """Build layers from their factories (default: all) with initial values; layers that are built already stay.

        With a layer of tied parameters, the layer whose factory gives their values is built as well.
        """
        wanted = set(range(len(self)) if indices is None else indices)
        wanted |= {shared.layers[0] for shared in self.shared if wanted & set(shared.layers)}
        for index in sorted(wanted & self._unbuilt):
            assert self.factories is not None
            old, module = self.layers[index], self.factories.build(index)
            for first, name in [(tie.layers[0], name) for tie in self.shared for use, name in tie.uses if use == index]:
                present, built = old.module.get_parameter(name), module.get_parameter(name)
                if first == index:
                    replace_parameters((layer.module for layer in self.layers), {present: built})
                else:  # the parameter's first layer is built already, and `old` holds its value
                    replace_parameters([module], {built: present})
            new = Layer(old.name, module, old.reads, old.writes)
            self.layers = (*self.layers[:index], new, *self.layers[index + 1 :])
            self._unbuilt.discard(index)

    def release(self, kept: Iterable[nn.Parameter]) -> None:
        """Free the memory of all parameters except `kept`; parameters of the same shapes without values replace them.

        Shared parameters stay shared. Buffers stay: some are not part of a layer's state.
        """
        self._captured = OfTheModel()  # the recorded state holds parameters that are freed here
        alive = set(kept)
        freed = {
            parameter: hollow_parameter(parameter)
            for parameter in self.named_parameters().values()
            if not (parameter in alive or parameter.is_meta)
        }
        if self.factories is not None:
            self.factories.values.clear()
            for index, layer in enumerate(self.layers):
                if any(parameter in freed for parameter in layer.module.parameters()):
                    self._unbuilt.add(index)
        replace_parameters((layer.module for layer in self.layers), freed)

    def new_module(self, index: int) -> nn.Module:
        """Return a new module of a layer, with its own memory, to load a state into. Its parameters are uninitialised
        where the chain's were released. The chain stays as it is.
        """
        if self.factories is not None:
            return self.factories.build(index)
        module = self.layers[index].module
        empty = kept_tensors([module]) | {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
            )
            for parameter in module.parameters()
            if parameter.is_meta
        }
        return copy.deepcopy(module, empty)

    def begin_with(self, values: Mapping[str, Tensor]) -> None:
        """Replace the initial values of parameters and buffers (by address, as in `named_tensors`).

        Layers of factories receive them when they are built; until then, or `release`, the chain keeps `values`.
        """
        if self.factories is not None:
            self.factories.values |= values
        with torch.no_grad():
            for address, target in self.named_tensors().items():
                if address in values and not target.is_meta:
                    target.copy_(values[address])

    def run(self, inputs: Mapping[str, Tensor], after_layer: Callable[[int], None] | None = None) -> dict[str, Tensor]:
        """Run the whole chain in one autograd graph: the plain, unsplit model (the oracle of every engine test).

        Args:
            inputs: the tensors named by `self.inputs`.
            after_layer: called with each layer's index after the layer (progress, seeding).
        """
        self.check_unchanged()
        self.fill()
        values = {name: inputs[name] for name in self.inputs}
        for index, layer in enumerate(self.layers):
            values.update(layer(values))
            if after_layer is not None:
                after_layer(index)
        return {name: values[name] for name in self.outputs}

    def run_stage(self, first: int, end: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run layers first .. end-1 as they are, and drop every tensor after its last reader.

        Args:
            values: tensors that cross the cut before layer `first`, by name; emptied, so that the caller does not hold
                them.

        Returns:
            The tensors that cross the cut before layer `end`.
        """
        live = dict(values)
        values.clear()
        for index in range(first, end):
            live.update(self.layers[index](live))
            live = {name: live[name] for name in self.crossing(index + 1)}
        return live

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Raise CapslogError unless `cuts` (first layer of each stage, beginning with 0) fits this chain."""
        why = f" ({'; '.join(self.kept_whole)})" if self.kept_whole else ""
        fields.within(
            f"these cuts do not split a chain of {len(self)} layers{why}", lambda: fields.cut_list(cuts, len(self))
        )
