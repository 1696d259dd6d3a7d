"""Lists the stage runs that a profile needs, and the launches into which CAPSlog and mCAP group them. Each run trains a
stage and reads its peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Observation, Profile, layers_of_runs

__all__ = [
    "PLAIN",
    "StageRun",
    "alternatives_of",
    "capslog_partitionings",
    "compile_seconds",
    "mcap_partitionings",
    "stage_runs",
    "text_of",
    "under",
    "variant_pairs",
]

StageRun = tuple[int, int]
"""Layers (first, end) of one stage run, `end` not included."""


@dataclass(frozen=True)
class Partitioning:
    """Profiling launch of the whole pipeline: layers on each GPU, and the numbers of the GPUs whose peaks are read. A
    trimmed profiler replaces the layers on every other GPU by dummy tensors.
    """

    layers_per_gpu: tuple[int, ...]
    measured: tuple[int, ...]

    @property
    def stages(self) -> list[StageRun]:
        """Layers (first, end) on each GPU."""
        ends = [sum(self.layers_per_gpu[: gpu + 1]) for gpu in range(len(self.layers_per_gpu))]
        return [(end - layers, end) for end, layers in zip(ends, self.layers_per_gpu, strict=True)]

    @property
    def runs(self) -> list[StageRun]:
        """Stage runs that the measured GPUs perform."""
        stages = self.stages
        return [stages[gpu] for gpu in self.measured]


def stage_runs(num_layers: int) -> list[StageRun]:
    """Return the 2L-1 runs that give every M_i and M_a: each layer alone (C1, C2), each pair (C3); Sec. III-A."""
    num_layers = fields.whole(num_layers, "number of layers", minimum=1)
    singles = [(layer, layer + 1) for layer in range(num_layers)]
    return singles + [(layer, layer + 2) for layer in range(num_layers - 1)]


def capslog_partitionings(num_layers: int, gpus: int) -> list[Partitioning]:
    """Return CAPSlog's trimmed profiling partitionings, Sec. III-A: those for M_i, then those for M_a.

    For 25, 42 and 48 layers on 8 GPUs these are 8, 15 and 16 launches, as in the paper's Fig. 12. The two series for
    M_a (pairs that begin at an even layer, and at an odd layer) each end when all their pairs are measured. Raises
    CapslogError for 1 or 2 GPUs and more layers than GPUs: a launch measures only gpus - 2 new stages.
    """
    num_layers, gpus = _checked(num_layers, gpus)
    isolated = _series(num_layers, gpus, size=1, begin=0)
    even = _series(num_layers, gpus, size=2, begin=0)
    odd = _series(num_layers, gpus, size=2, begin=1)
    return isolated + even + odd


def _series(num_layers: int, gpus: int, size: int, begin: int) -> list[Partitioning]:
    """Return the partitionings [Z, size, ..., size, R] that measure ranges of `size` layers, one after another from
    layer `begin` on. Z grows by the layers that the launch before measured. GPU 0 is also measured in the first launch
    if it holds a range there, and GPU G-1 in a launch whose remaining layers are one range.
    """
    launches = []
    reached = begin  # GPU 0 holds the layers before this layer.
    while reached + size <= num_layers:
        layers = [reached] if reached else []
        slots = gpus - len(layers)
        ranges = min(slots, (num_layers - reached) // size)
        remaining = num_layers - reached - ranges * size
        if remaining and ranges == slots:
            ranges, remaining = ranges - 1, remaining + size  # The last GPU must hold the remaining layers.
        measured = tuple(range(len(layers), len(layers) + ranges))
        launches.append(Partitioning((*layers, *[size] * ranges, *([remaining] if remaining else [])), measured))
        reached += ranges * size
    return launches


def mcap_partitionings(num_layers: int, gpus: int) -> list[Partitioning]:
    """Return mCAP's profiling partitionings, which keep the whole model in memory: [k, 1, ..., 1, rest] for k = 1 .. L.

    M_i comes from the GPUs with one layer, M_a(l) from GPU 0 when it holds layers 0 .. l-1 and then 0 .. l. These are L
    launches, the 25, 42 and 48 of the paper's Fig. 12. The paper's text has the formula L - G + 1 (18, 35 and 41): the
    launches that use every GPU, without M_a of the last G - 1 layers. We inferred the lists from both numbers and the
    criteria C1 to C3. Raises CapslogError as `capslog_partitionings`.
    """
    num_layers, gpus = _checked(num_layers, gpus)
    launches = []
    for grown in range(1, num_layers + 1):
        single = min(gpus - 2, num_layers - grown)
        remaining = num_layers - grown - single
        layers = (grown, *[1] * single, *([remaining] if remaining else []))
        measured = range(len(layers) - (1 if remaining > 1 else 0))
        launches.append(Partitioning(layers, tuple(measured)))
    return launches


def _checked(num_layers: int, gpus: int) -> tuple[int, int]:
    num_layers = fields.whole(num_layers, "number of layers", minimum=1)
    gpus = fields.whole(gpus, "number of GPUs", minimum=1)
    if gpus < 3 and num_layers > gpus:
        raise CapslogError(
            f"{gpus} GPUs cannot isolate every one of {num_layers} layers by whole-pipeline launches; "
            f"use at least 3, or the packed runs, which need only one worker"
        )
    return num_layers, gpus


# -- Rows of a profile for variants of layers, and the profile of one choice of variants. The `variant` of a row is the
# variant of its layer, or both variants of two layers, such as "sdpa,plain". Memory models read only rows without a
# variant: layers as configured.


PLAIN = "plain"
"""Name in rows of two layers for the layer that is computed as configured."""


def text_of(names: Sequence[str]) -> str | None:
    """Return the `variant` of a row for layers with these names; None where all are as configured."""
    return None if all(name == PLAIN for name in names) else ",".join(names)


def variant_pairs(alternatives: Mapping[int, Sequence[str]], num_layers: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (first layer, names) of the runs of layers and pairs that `alternatives` (layer -> variants) need."""
    names_of_layer = {layer: (PLAIN, *alternatives.get(layer, ())) for layer in range(num_layers)}
    for first, end in stage_runs(num_layers):
        choices: list[tuple[str, ...]] = [()]
        for layer in range(first, end):
            choices = [(*names, name) for names in choices for name in names_of_layer[layer]]
        yield from ((first, names) for names in choices if text_of(names) is not None)


def alternatives_of(profile: Profile) -> dict[int, tuple[str, ...]]:
    """Return layer -> the variants for which the profile has rows, in the order of these rows."""
    alternatives: dict[int, tuple[str, ...]] = {}
    for row in profile.observations:
        if row.variant is not None and row.layers[1] - row.layers[0] == 1:
            alternatives[row.layers[0]] = (*alternatives.get(row.layers[0], ()), row.variant)
    return dict(sorted(alternatives.items()))


def under(profile: Profile, chosen: Mapping[int, str]) -> Profile:
    """Return the profile of the same model with `chosen` variants (layer -> name), and without the rows of other
    variants. Raises CapslogError naming a run that the profile lacks.
    """
    rows: dict[tuple[tuple[int, int], str | None], Observation] = {}
    for row in profile.observations:
        if row.microbatch_size == profile.samples(1):
            rows.setdefault((row.layers, row.variant), row)
    chosen_rows = []
    for first, end in stage_runs(profile.num_layers):
        names = [chosen.get(layer, PLAIN) for layer in range(first, end)]
        wanted = rows.get(((first, end), text_of(names)))
        if wanted is None:
            raise CapslogError(
                f"the profile has no run of layers {[first, end]} as {', '.join(names)}; estimate it again with the "
                "same numerics"
            )
        chosen_rows.append(dataclasses.replace(wanted, variant=None))
    chosen_rows = _with_savings(profile, chosen, rows, chosen_rows)
    names, sizes = [layer.name for layer in profile.layers], [layer.parameter_bytes for layer in profile.layers]
    known_sizes = [size for size in sizes if size is not None]
    layers = layers_of_runs(names, chosen_rows, known_sizes if len(known_sizes) == len(sizes) else None)
    return dataclasses.replace(profile, layers=layers, observations=tuple(chosen_rows), by_degree=())


_Rows = Mapping[tuple[tuple[int, int], str | None], Observation]


def _with_savings(
    profile: Profile, chosen: Mapping[int, str], rows: _Rows, rows_of_choice: Sequence[Observation]
) -> list[Observation]:
    """Return the rows of a choice, with less time for each layer behind a layer of the same joined variant, since a
    conversion is saved: its time is `_spared` of the two layers, less `_spared` of the two plain layers.
    """
    joined, less = profile.conditions.get(JOINED, ()), dict[int, tuple[float, float]]()
    for layer in range(1, profile.num_layers):
        name = chosen.get(layer)
        if name is not None and name in joined and chosen.get(layer - 1) == name:
            spared, usual = _spared(rows, layer, name), _spared(rows, layer, PLAIN)
            less[layer] = spared[0] - usual[0], spared[1] - usual[1]
    return [
        dataclasses.replace(
            row,
            forward_seconds=max(0.0, (row.forward_seconds or 0.0) - less[row.layers[0]][0]),
            backward_seconds=max(0.0, (row.backward_seconds or 0.0) - less[row.layers[0]][1]),
        )
        if row.layers[1] - row.layers[0] == 1 and row.layers[0] in less
        else row
        for row in rows_of_choice
    ]


def _spared(rows: _Rows, layer: int, name: str) -> tuple[float, float]:
    """Return the forward and backward seconds that this layer and the layer before save in one run of both."""
    variant = text_of([name])
    parts = rows[(layer - 1, layer), variant], rows[(layer, layer + 1), variant]
    pair = rows[(layer - 1, layer + 1), text_of([name, name])]
    forward = sum(row.forward_seconds or 0.0 for row in parts) - (pair.forward_seconds or 0.0)
    backward = sum(row.backward_seconds or 0.0 for row in parts) - (pair.backward_seconds or 0.0)
    return forward, backward


def compile_seconds(profile: Profile, names: Collection[str]) -> float:
    """Return the seconds of compilation before the runs in which all layers are plain or have these variants. torch
    caches code on disk, so of several runs of a layer only the first takes long.
    """
    rows = [row for row in profile.observations if row.variant is not None]
    return sum(row.compile_seconds or 0.0 for row in rows if set((row.variant or "").split(",")) <= {PLAIN, *names})
