"""The profile: the bytes and seconds of each layer, and the conditions under which they hold. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles import conditions

__all__ = [
    "HALVES",
    "LEAST_MOMENT_BYTES",
    "ActionBytes",
    "Divisible",
    "LayerProfile",
    "Observation",
    "Profile",
    "SharedParameter",
    "TensorRecord",
    "check_parallel",
    "layers_of_runs",
    "read_profile",
    "with_beside",
    "write_profile",
]


# -- Bytes of one microbatch at each of its actions on a stage; a part of an observation.
#
# Estimates have them, and the fold of a rank's actions (`memory/fold`) adds them up. Without them only the peak of a
# stage is known, not the action that causes it.


HALVES = ("input_half_bytes", "weight_half_bytes", "first_weight_half_bytes", "noted_bytes", "noted_seed_bytes")
"""Fields of ActionBytes for a backward in two halves: first the gradients of inputs, then those of weights."""
LATER = (*HALVES, "moment_bytes", "lasting_bytes")
"""Fields that a file leaves out where they are not known."""

LEAST_MOMENT_BYTES = 512
"""Smaller moments stay on the device: a GPU's allocator has no smaller blocks, and step counts are read on the host."""


@dataclass(frozen=True)
class ActionBytes:
    """Bytes of one microbatch on one stage. Bytes of an action are its peak, less the bytes that were in memory before.

    forward_bytes, bare_bytes: of a forward (or a recomputation) that keeps its graph, and of a forward that does not;
        in memory before: the inputs.
    backward_bytes, first_backward_bytes: of a backward that adds to the parameters' gradients, and of a backward that
        makes them; in memory before: the graph and the gradients of the outputs.
    update_bytes: the peak between the last backward and the end of the step, less static_bytes.
    gradient_bytes: the parameters' gradients, a part of static_bytes.
    shared_bytes: the part of boundary_out_bytes whose storages the graph also keeps.
    statistics_bytes: running statistics, which a forward makes and which stay until the end of the step.
    graph_bytes: the bytes that a backward frees, the stage's inputs included: `saved_bytes` and tensors that autograd
        does not show (random number states), but no tensors that others also hold (targets). None, here and below: not
        known.
    moved_bytes: the part of graph_bytes that "offload" moves to the host tier: the layers' saved tensors.
    staying_bytes: the part that stays: tensors that the loss reads and saves, and those that autograd does not show.
    input_half_bytes: of the backward half that computes the inputs' gradients; in memory before: as for backward_bytes.
    weight_half_bytes, first_weight_half_bytes: of the half that adds to the parameters' gradients, or makes them; in
        memory before: the bytes held between the halves (`weight_bytes` of the observation).
    noted_bytes: the gradients that the first half keeps for the second, a part of the bytes held between them.
    noted_seed_bytes: the part of noted_bytes with which the backward began: gradients of the outputs.
    moment_bytes: moments of LEAST_MOMENT_BYTES or more, which may wait in the host tier; a part of static_bytes.
    lasting_bytes: bytes beyond static_bytes that remain from the first step on and are no tensor of the stage, such as
        the workspaces of cuBLAS; a part of the row's peak_bytes. A rank counts the maximum of its layers once, for all
        stages and calls.
    """

    forward_bytes: int
    bare_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    update_bytes: int
    gradient_bytes: int
    shared_bytes: int = 0
    statistics_bytes: int = 0
    graph_bytes: int | None = None
    moved_bytes: int | None = None
    staying_bytes: int | None = None
    input_half_bytes: int | None = None
    weight_half_bytes: int | None = None
    first_weight_half_bytes: int | None = None
    noted_bytes: int | None = None
    noted_seed_bytes: int | None = None
    moment_bytes: int | None = None
    lasting_bytes: int | None = None

    def __post_init__(self) -> None:
        for number in dataclasses.fields(self):
            value = getattr(self, number.name)
            if value is not None or number.default is not None:
                object.__setattr__(self, number.name, fields.whole(value, number.name))


@dataclass(frozen=True)
class Divisible:
    """Parts of a layer that another system can divide among the cards of a stage (`config/parallel`), for a microbatch.

    matrix_share, expert_share: fractions of the layer's parameters in matrices, and in experts; each card has all other
        parameters whole: norms, biases, the router, and projections whose whole output a norm reads.
    largest_matrix_share, largest_expert_share: fractions in the largest parameter of each kind.
    gathered_bytes: inputs that divided matrices gather, each once. scattered_bytes: outputs that are reduce-scattered.
    attended_bytes: keys and values. exchanged_bytes: tokens that are sent to their experts.
    expert_row_bytes: inputs and outputs of the experts' matrix products. expert_seconds: their forward seconds.
    """

    matrix_share: float
    expert_share: float
    largest_matrix_share: float
    largest_expert_share: float
    gathered_bytes: int
    scattered_bytes: int
    attended_bytes: int
    exchanged_bytes: int
    expert_row_bytes: int
    expert_seconds: float

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            check = fields.whole if part.name.endswith("_bytes") else fields.seconds
            object.__setattr__(self, part.name, check(getattr(self, part.name), part.name))
        if self.matrix_share + self.expert_share > 1 + 1e-9:
            raise CapslogError("matrix_share and expert_share sum to more than 1; they are parts of all parameters")


# -- the profile


FORMATS = ("varuna-capslog/profile/1", "varuna-capslog/profile/2")
"""The older format is written for a profile without fields of the newer one, so that its digest does not change."""

SOURCES = ("measured", "estimated")
MEMORY_ACTIONS = ("none", "recompute", "offload")
PARALLEL_KINDS = ("none", "data", "tensor")

_BYTE_PARTS = ("static_bytes", "saved_bytes", "transient_bytes", "boundary_bytes", "parameter_bytes")
_BYTE_SUMS = ("peak_bytes", "static_bytes", "saved_bytes", "boundary_in_bytes", "boundary_out_bytes")
_SECONDS = ("forward_seconds", "backward_seconds")
_SECONDS_OF_HALVES = ("input_seconds", "weight_seconds")
_PARTS_OF_A_RUN = ("static_bytes", "saved_bytes", "transient_bytes", *_SECONDS, *_SECONDS_OF_HALVES, "weight_bytes")
"""Fields of a layer that are copied from the run of that layer alone."""
_NEW_FIELDS = (*_SECONDS_OF_HALVES, "weight_bytes", "variant", "compile_seconds", "action_bytes", "divisible", "parts")
"""Fields of layers and observations that profile/2 added; a file leaves them out where they are None."""


@dataclass(frozen=True)
class LayerProfile:
    """Cost of a layer for one microbatch. Bytes are whole numbers; None: not measured.

    isolated_bytes: peak of a stage that holds this layer alone (M_i of CAPSlog, Sec. III-A).
    added_bytes: rise of a stage's peak when this layer joins the layer before (M_a); may be negative; None for layer 0.
    static_bytes: parameters, gradients and optimizer state. parameter_bytes: the parameters alone.
    saved_bytes: kept by the forward for the backward. transient_bytes: isolated_bytes less static_bytes.
    boundary_bytes: the tensors that cross the cut behind the layer in the forward direction.
    backward_seconds: without recomputation. input_seconds, weight_seconds: of its two halves, where it is split.
    weight_bytes: held between the two halves: the rest of the graph, and the gradients noted in it.
    divisible: parts that cards of one stage can divide; only in estimates.
    """

    name: str
    isolated_bytes: int
    added_bytes: int | None = None
    static_bytes: int | None = None
    saved_bytes: int | None = None
    transient_bytes: int | None = None
    boundary_bytes: int | None = None
    parameter_bytes: int | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    input_seconds: float | None = None
    weight_seconds: float | None = None
    weight_bytes: int | None = None
    divisible: Divisible | None = None

    @property
    def input_part(self) -> float:
        """Seconds of the backward's input half, by the profile's halves; without these half of the backward."""
        backward, first, second = self.backward_seconds or 0.0, self.input_seconds, self.weight_seconds
        if first is None or second is None or not first + second:
            return 0.5 * backward
        return backward * first / (first + second)

    def __post_init__(self) -> None:
        fields.text(self.name, "name")
        _set(self, "isolated_bytes", fields.whole(self.isolated_bytes, "isolated_bytes"))
        _check_optional(self, whole=(*_BYTE_PARTS, "weight_bytes"), seconds=(*_SECONDS, *_SECONDS_OF_HALVES))
        if self.added_bytes is not None:
            _set(self, "added_bytes", fields.whole(self.added_bytes, "added_bytes", minimum=None))
        if self.divisible is not None and not isinstance(self.divisible, Divisible):
            _set(self, "divisible", fields.build(Divisible, self.divisible, "divisible"))


@dataclass(frozen=True)
class SharedParameter:
    """Parameter that several layers use; `layers` in rising order."""

    name: str
    bytes: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        fields.text(self.name, "name")
        _set(self, "bytes", fields.whole(self.bytes, "bytes"))
        numbers = tuple(fields.whole(layer, "layers") for layer in fields.listed(self.layers, "layers"))
        if len(numbers) < 2 or any(a >= b for a, b in pairwise(numbers)):
            raise CapslogError(f"layers is {list(numbers)}; it must hold two or more layer numbers in rising order")
        _set(self, "layers", numbers)


@dataclass(frozen=True)
class TensorRecord:
    """Tensor that a layer passes on: one entry per name and writer, since names are reused along a chain.

    bytes: of one microbatch. gradient: True where it needs a gradient.
    writer: the layer that makes it; None for an input of the model.
    readers: the layers that read it, in rising order; number L stands for the loss.
    fixed: True where its size is the same for several microbatches in one call; known if the profile has such runs.
    """

    name: str
    bytes: int
    gradient: bool
    writer: int | None
    readers: tuple[int, ...]
    fixed: bool = False

    def __post_init__(self) -> None:
        fields.text(self.name, "name")
        _set(self, "bytes", fields.whole(self.bytes, "bytes"))
        fields.boolean(self.gradient, "gradient")
        fields.boolean(self.fixed, "fixed")
        if self.writer is not None:
            _set(self, "writer", fields.whole(self.writer, "writer"))
        readers = tuple(fields.whole(layer, "readers") for layer in fields.listed(self.readers, "readers"))
        first = -1 if self.writer is None else self.writer
        if not readers or any(a >= b for a, b in pairwise((first, *readers))):
            raise CapslogError(
                f"readers is {list(readers)}; it must hold layers behind the writer ({self.writer}) in rising order"
            )
        _set(self, "readers", readers)


@dataclass(frozen=True)
class Observation:
    """Run of one stage, layers (first, end), `end` not included, under one condition, with its bytes and seconds.

    input: size of the input (a shape, or names to shapes).
    parallel: {"kind", "degree"} of the parallelism inside the stage; kind: "none", "data" or "tensor".
    memory_action: "none", "recompute" or "offload".
    boundary_in_bytes, boundary_out_bytes: tensors across the cuts before and behind the stage.
    input_seconds, weight_seconds, weight_bytes: see `LayerProfile`. variant: see `runs.text_of`.
    compile_seconds: of torch.compile; small where its code was on disk. action_bytes: None: only the peak is known.
    parts: the parts that each layer recomputed inside its backward (`plans.parts.LAYER_PARTS`); None: no parts.
    """

    layers: tuple[int, int]
    device: str
    microbatch_size: int
    input: Any
    peak_bytes: int
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none", "degree": 1})
    memory_action: str = "none"
    static_bytes: int | None = None
    saved_bytes: int | None = None
    transient_bytes: int | None = None
    boundary_in_bytes: int | None = None
    boundary_out_bytes: int | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    input_seconds: float | None = None
    weight_seconds: float | None = None
    weight_bytes: int | None = None
    variant: str | None = None
    compile_seconds: float | None = None
    action_bytes: ActionBytes | None = None
    parts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _set(self, "layers", fields.interval(self.layers, "layers"))
        fields.text(self.device, "device")
        _set(self, "microbatch_size", fields.whole(self.microbatch_size, "microbatch_size", minimum=1))
        fields.json_value(self.input, "input")
        _set(self, "peak_bytes", fields.whole(self.peak_bytes, "peak_bytes"))
        _set(self, "parallel", check_parallel(self.parallel))
        fields.choice(self.memory_action, "memory_action", MEMORY_ACTIONS)
        parts = ("static_bytes", "saved_bytes", "transient_bytes", "boundary_in_bytes", "boundary_out_bytes")
        _check_optional(self, (*parts, "weight_bytes"), (*_SECONDS, *_SECONDS_OF_HALVES, "compile_seconds"))
        if self.variant is not None:
            fields.text(self.variant, "variant")
        if self.action_bytes is not None and not isinstance(self.action_bytes, ActionBytes):
            _set(self, "action_bytes", fields.build(ActionBytes, self.action_bytes, "action_bytes"))
        if self.parts is not None:
            _set(self, "parts", tuple(fields.text(name, "parts") for name in fields.listed(self.parts, "parts")))

    @property
    def condition(self) -> str:
        """Text of the conditions that must be equal in all rows of a calculation."""
        parts = [self.device, self.microbatch_size, self.input, dict(self.parallel), self.memory_action]
        parts += [] if self.variant is None else [self.variant]
        parts += [] if self.parts is None else [list(self.parts)]
        return json.dumps(parts, sort_keys=True)


@dataclass(frozen=True)
class Profile:
    """Layers of a model in chain order, with costs. Raises CapslogError for invalid values.

    source: "measured" or "estimated".
    conditions: under which the numbers hold: device, dtype, microbatch_size, input shape, optimizer, recompute, torch
        version, ...
    tensors: passed between layers. With them the chain is known as a graph; without them as a line.
    by_degree: runs of the same ranges of layers on several devices (`parallel`), `microbatch_size` samples at a time.
    """

    layers: tuple[LayerProfile, ...]
    model: str | None = None
    source: str | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    shared: tuple[SharedParameter, ...] = ()
    observations: tuple[Observation, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    by_degree: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "shared", "observations", "tensors", "by_degree"):
            _set(self, name, tuple(fields.listed(getattr(self, name), name)))
        if self.model is not None:
            fields.text(self.model, "model")
        if self.source is not None:
            fields.choice(self.source, "source", SOURCES)
        _set(self, "conditions", conditions.checked(self.conditions))
        if not self.layers:
            raise CapslogError("layers is empty; a profile needs at least one layer")
        numbers: dict[str, int] = {}
        for number, layer in enumerate(self.layers):
            where = f"layers[{number}] ({layer.name})"
            if (earlier := numbers.setdefault(layer.name, number)) != number:
                raise CapslogError(f"{where} has the name of layers[{earlier}]; layer names must differ")
            if number == 0 and layer.added_bytes is not None:
                raise CapslogError(
                    f"{where}: added_bytes is {layer.added_bytes}; no layer precedes layer 0, so write null"
                )
            if number > 0 and layer.added_bytes is None:
                raise CapslogError(f"{where}: added_bytes is missing; only layer 0 has none")
        written: dict[tuple[str, int | None], int] = {}
        for number, tensor in enumerate(self.tensors):
            if (earlier := written.setdefault((tensor.name, tensor.writer), number)) != number:
                raise CapslogError(
                    f"tensors[{number}] ({tensor.name}) has the name and the writer of tensors[{earlier}]; give one "
                    "entry with all readers"
                )
        for name in _BYTE_SUMS:
            if sum(getattr(row, name) or 0 for row in self.observations) >= 1 << 60:
                raise CapslogError(
                    f"{name} of the observations sums to more than 1 EiB, beyond what a search can add up; check the "
                    "unit, bytes"
                )
        for place, ends in self._places():
            if ends > len(self.layers):
                raise CapslogError(f"{place} names layer {ends - 1}, but the last layer is {len(self.layers) - 1}")

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    def samples(self, grain: int) -> int:
        """Return the samples in a call of `grain` microbatches, by the first observation; 0 without observations."""
        return grain * self.observations[0].microbatch_size if self.observations else 0

    @functools.cached_property
    def call_seconds(self) -> Mapping[int, tuple[list[float], list[float]]]:
        """Grain (microbatches in a call) -> forward seconds and backward seconds of every layer: grain 1, and grains
        for which every layer has a run alone with both seconds. Raises CapslogError as `column`.
        """
        single_runs: dict[int, dict[int, Observation]] = {}
        for row in self.observations:
            plain = row.variant is None and row.parts is None and row.parallel["kind"] == "none"
            if row.layers[1] - row.layers[0] == 1 and plain:
                single_runs.setdefault(row.microbatch_size, {}).setdefault(row.layers[0], row)
        forward, backward = self.column("forward_seconds"), self.column("backward_seconds")
        calls, usual = {1: (forward, backward)}, single_runs.get(self.samples(1), {})
        plain = [usual[layer].forward_seconds for layer in sorted(usual)] == forward  # no variants are chosen
        for samples, rows in sorted(single_runs.items()):
            grain, remainder = divmod(samples, self.samples(1))
            took = [(row.forward_seconds, row.backward_seconds) for _, row in sorted(rows.items())]
            if plain and grain > 1 and not remainder and len(took) == self.num_layers:
                known = [(first, second) for first, second in took if first is not None and second is not None]
                if len(known) == len(took):
                    calls[grain] = [first for first, _ in known], [second for _, second in known]
        return calls

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of (layer that writes a tensor, layer that reads it); without `tensors` each layer reads only from the
        layer before. The last layer stands for the loss, which is computed with it.
        """
        last = self.num_layers - 1
        if not self.tensors:
            return [(layer, layer + 1) for layer in range(last)]
        pairs = {(tensor.writer, min(reader, last)) for tensor in self.tensors for reader in tensor.readers}
        return sorted((writer, reader) for writer, reader in pairs if writer is not None and writer < reader)

    @property
    def known_edges(self) -> list[tuple[int, int]] | None:
        """`edges`; None without `tensors`."""
        return self.edges if self.tensors else None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the profile's content, the same for the same content however it was written."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def timed(self) -> bool:
        """True where the seconds of every layer are known."""
        return all(None not in (layer.forward_seconds, layer.backward_seconds) for layer in self.layers)

    def column(self, name: str) -> list[Any]:
        """Return field `name` of every layer. Raises CapslogError naming the first layer that lacks it."""
        values = [getattr(layer, name) for layer in self.layers]
        for number, value in enumerate(values):
            if value is None and not (name == "added_bytes" and number == 0):
                layer = self.layers[number].name
                raise CapslogError(
                    f"the profile has no {name} for layers[{number}] ({layer}), which is needed here; profile again"
                )
        return values

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; without `shared`, `observations`, `by_degree` and `tensors` where they are empty."""
        old, new = FORMATS
        rows = (*self.layers, *self.observations)
        newer = any(getattr(row, name, None) is not None for row in rows for name in _NEW_FIELDS)
        newer = bool(newer or self.tensors or self.by_degree)
        value: dict[str, Any] = {
            "format": new if newer else old,
            "model": self.model,
            "source": self.source,
            "conditions": dict(self.conditions),
            "layers": [
                {
                    name: part
                    for name, part in dataclasses.asdict(layer).items()
                    if part is not None or name == "added_bytes"
                }
                for layer in self.layers
            ],
        }
        for name in ("shared", "observations", "by_degree"):
            if of_kind := getattr(self, name):
                value[name] = [_plain(row) | {"layers": list(row.layers)} for row in of_kind]
        if self.tensors:
            value["tensors"] = [
                {name: part for name, part in vars(tensor).items() if part or name != "fixed"}
                | {"readers": list(tensor.readers)}
                for tensor in self.tensors
            ]
        return value

    @classmethod
    def from_json(cls, value: Any, where: str = "profile") -> Profile:
        """Return the profile that a JSON value holds. A CapslogError begins with `where` and names the field."""
        return fields.within(where, lambda: cls(**_parts(value)))

    def _places(self) -> list[tuple[str, int]]:
        """Return the name of each field that holds layer numbers, and the end of its last layer."""
        shared = [(f"shared[{i}] ({row.name})", row.layers[-1] + 1) for i, row in enumerate(self.shared)]
        # a reader may be L, the loss
        read = [(f"tensors[{i}] ({tensor.name})", tensor.readers[-1]) for i, tensor in enumerate(self.tensors)]
        runs = {"observations": self.observations, "by_degree": self.by_degree}
        ran = [(f"{name}[{i}]", row.layers[1]) for name, rows in runs.items() for i, row in enumerate(rows)]
        return [*shared, *ran, *read]


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file of either format. Raises CapslogError naming the file and the field."""
    return Profile.from_json(files.read_json(path), where=str(path))


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile file atomically."""
    files.write_json(path, profile.to_json())


def layers_of_runs(
    names: Sequence[str],
    runs: Sequence[Observation],
    parameter_bytes: Sequence[int] | None = None,
    grown_from_first: bool = False,
) -> tuple[LayerProfile, ...]:
    """Compute every layer's row from the 2L-1 runs of single layers and neighbouring pairs, all of one condition.

    CAPSlog, Sec. III-A with n = 1: M_i(l) is the peak of layer l alone (C1), M_a(l) the peak of {l-1, l} (C3) less the
    peak of {l-1} (C2). All other fields come from the single-layer run. With `grown_from_first`, as in mCAP, M_a(l) is
    the peak of {0 .. l} less the peak of {0 .. l-1}. Raises CapslogError where a run is missing or duplicate, or has
    another condition than the first run.
    """
    peak: dict[tuple[int, int], Observation] = {}
    for run in runs:
        if run.condition != runs[0].condition:
            raise CapslogError(
                f"layers {list(run.layers)} ran under {run.condition}, the first under {runs[0].condition}"
            )
        if peak.setdefault(run.layers, run) is not run:
            raise CapslogError(f"layers {list(run.layers)} ran twice under one condition; keep one of the rows")
    rows = []
    for layer, name in enumerate(names):
        before = (0 if grown_from_first else layer - 1, layer)
        together = (before[0], layer + 1)
        needed = [(layer, layer + 1), *([before, together] if layer else [])]
        for key in needed:
            if key not in peak:
                raise CapslogError(f"no run of layers {list(key)}; M_i and M_a of layer {layer} ({name}) need it")
        single = peak[layer, layer + 1]
        rows.append(
            LayerProfile(
                name=name,
                isolated_bytes=single.peak_bytes,
                added_bytes=peak[together].peak_bytes - peak[before].peak_bytes if layer else None,
                boundary_bytes=single.boundary_out_bytes,
                parameter_bytes=None if parameter_bytes is None else parameter_bytes[layer],
                **{part: getattr(single, part) for part in _PARTS_OF_A_RUN},
            )
        )
    return tuple(rows)


def check_parallel(value: Any, kinds: Sequence[str] = PARALLEL_KINDS) -> dict[str, Any]:
    """Return the checked {"kind", "degree"} of the parallelism inside a stage. Raises CapslogError where invalid."""
    if not isinstance(value, Mapping):
        raise CapslogError('parallel must be an object such as {"kind": "none", "degree": 1}')
    fields.refuse_unknown(value, ("kind", "degree"))
    kind = fields.choice(value.get("kind"), "parallel.kind", kinds)
    degree = fields.whole(value.get("degree", 1), "parallel.degree", minimum=1)
    if kind == "none" and degree != 1:
        raise CapslogError(f"parallel.degree is {degree} with kind none; it must be 1")
    return {"kind": kind, "degree": degree}


def _parts(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CapslogError("a JSON object is needed; is this a profile?")
    names = [part.name for part in dataclasses.fields(Profile)]
    if value.get("format") not in FORMATS:
        raise CapslogError(f"format is {value.get('format')!r}; this version reads {' and '.join(map(repr, FORMATS))}")
    fields.refuse_unknown(value, ["format", *names])
    if "layers" not in value:
        raise CapslogError("field 'layers' is missing")
    parts = {name: value[name] for name in names if name in value}
    rows: dict[str, type] = {"layers": LayerProfile, "shared": SharedParameter}
    rows |= {"observations": Observation, "tensors": TensorRecord, "by_degree": Observation}
    for name, record in rows.items():
        if name in parts:
            entries = enumerate(fields.listed(parts[name], name, fields.MOST_LAYERS))
            parts[name] = tuple(fields.build(record, entry, f"{name}[{i}]") for i, entry in entries)
    return parts


def _plain(row: Any) -> dict[str, Any]:
    """Return the JSON form of a row, without fields of profile/2 that are None."""
    values = dataclasses.asdict(row)
    if (actions := values.get("action_bytes")) is not None:
        values["action_bytes"] = {name: size for name, size in actions.items() if size is not None or name not in LATER}
    return {name: value for name, value in values.items() if value is not None or name not in _NEW_FIELDS}


def _check_optional(record: Any, whole: Sequence[str], seconds: Sequence[str]) -> None:
    for name in whole:
        if (value := getattr(record, name)) is not None:
            _set(record, name, fields.whole(value, name))
    for name in seconds:
        if (value := getattr(record, name)) is not None:
            _set(record, name, fields.seconds(value, name))


def _set(record: Any, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


# -- Bytes that layers always hold beyond a profile's (snapshots, copies, or waiting gradients), added to the profile:
#    planners need no rule for them.


def with_beside(profile: Profile, beside: Sequence[int]) -> Profile:
    """Return the profile with `beside[layer]` more bytes for each layer of every run."""
    if not any(beside):
        return profile

    def raised(size: int | None, first: int, end: int) -> int | None:
        return None if size is None else size + sum(beside[first:end])

    def layer(row: LayerProfile, at: int) -> LayerProfile:
        return dataclasses.replace(
            row,
            isolated_bytes=row.isolated_bytes + beside[at],
            added_bytes=raised(row.added_bytes, at, at + 1),
            static_bytes=raised(row.static_bytes, at, at + 1),
        )

    return dataclasses.replace(
        profile,
        layers=tuple(layer(row, at) for at, row in enumerate(profile.layers)),
        observations=tuple(
            dataclasses.replace(
                row,
                peak_bytes=row.peak_bytes + sum(beside[slice(*row.layers)]),
                static_bytes=raised(row.static_bytes, *row.layers),
            )
            for row in profile.observations
        ),
    )
