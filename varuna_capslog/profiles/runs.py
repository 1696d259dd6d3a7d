"""Lists the stage runs that a profile needs, and the launches into which three profilers group them. Each run trains a
stage of one or two layers and reads its peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["StageRun", "capslog_partitionings", "mcap_partitionings", "stage_runs"]

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
        """Layers on each GPU."""
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

    8, 15 and 16 of them for 25, 42 and 48 layers on 8 GPUs, as the paper's Fig. 12 counts. The two series for M_a
    (pairs that begin at an even and at an odd layer) each continue until none of their pairs is missing. Raises
    CapslogError for fewer than 3 GPUs when the layers outnumber them: the method gains gpus - 2 stages a launch.
    """
    num_layers, gpus = _checked(num_layers, gpus)
    isolated = _series(num_layers, gpus, size=1, begin=0)
    even = _series(num_layers, gpus, size=2, begin=0)
    odd = _series(num_layers, gpus, size=2, begin=1)
    return isolated + even + odd


def _series(num_layers: int, gpus: int, size: int, begin: int) -> list[Partitioning]:
    """Return the partitionings [Z, size, ..., size, R] that measure ranges of `size` layers, one after another from
    layer `begin` on. Z grows by the layers that the launch before measured. GPU 0 is measured too in the first launch
    where it holds a range, GPU G-1 in a launch where the remaining layers are one range.
    """
    launches = []
    reached = begin  # Layers below this one lie on GPU 0 or before.
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

    M_i comes from the GPUs with one layer, M_a(l) from GPU 0 growing from layers 0 .. l-1 to 0 .. l. That is L
    launches, the 25, 42 and 48 that the paper's Fig. 12 prints; its text gives the formula L - G + 1 (18, 35 and 41),
    which is the number of those that use every GPU, and leaves out M_a of the last G - 1 layers. The lists are our
    inference from both numbers and the criteria C1 to C3. Raises CapslogError as `capslog_partitionings`.
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
