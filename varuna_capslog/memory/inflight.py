"""Memory models of a schedule: the bytes of the microbatches in flight, beside the one that a stage computes.

    M(s; l, m) = static(l, m) + transient(l, m) + g_s saved(l, m) + i_s in(l) + o_s out(m)

for layers l .. m-1 as stage s of S. static, transient and saved come from `composition` (one live graph is part of the
transient); in and out are the bytes that cross the cuts before and behind the stage. k_s microbatches are in flight on
stage s (`schedules.in_flight_limits`), so k_s - 1 wait:

    without recomputation   g_s = k_s - 1, i_s = 0            their graphs, inputs included
    with recomputation      g_s = 0,       i_s = k_s - 1      their inputs; i_s = 0 where inputs wait on the host

    gpipe   k_s = M          1f1b   k_s = min(S - s, M)          varuna   recomputes; k_s = min(3 (S - 1 - s), M)

On the CPU, host memory is device memory: inputs count wherever they wait, and so do outputs that no message of the next
stage has confirmed, o_s = k_s - k_(s+1) while a backward runs. On CUDA, sent outputs wait in pinned host memory, o_s =
0. Known limit on the CPU: before a stage's first backward no output is confirmed, so a stage that peaks in a forward or
a recomputation may hold up to k_s outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.composition import compose, lacking, observed
from varuna_capslog.memory.costs import Bytes, RangeCosts, StageCosts, only_ranges
from varuna_capslog.profiles.record import HALVES, Observation, Profile
from varuna_capslog.schedules import RunShape, in_flight_limits

__all__ = [
    "DESCRIBED",
    "RANKS",
    "InFlight",
    "InflightCosts",
    "Ranges",
    "check_halves",
    "gap",
    "model_of",
    "one_in_flight",
    "ranges_within",
    "stage_costs",
    "waiting",
]


RANKS = "ranks"
"""The model that describes every schedule (`fold`)."""

DESCRIBED = ("gpipe", "1f1b", "varuna")
"""Schedules that have a memory model of this kind. For other schedules these costs guide planners, and the fold gives
the bytes of a rank.
"""


def model_of(schedule: str) -> str:
    """Return the name of the memory model that describes a schedule."""
    return schedule if schedule in DESCRIBED else RANKS


class InFlight(NamedTuple):
    """Numbers of graphs, inputs and outputs of waiting microbatches that a stage holds while it computes another."""

    graphs: int
    inputs: int
    outputs: int


def waiting(run: RunShape, stages: int, one_memory: bool) -> list[InFlight]:
    """Return g_s, i_s and o_s of every stage. one_memory: the device is the CPU, so host memory is device memory.
    Raises CapslogError for GPipe without a number of microbatches, on which its memory depends.
    """
    if run.num_microbatches is None and run.schedule == "gpipe":
        raise CapslogError(
            "memory model 'gpipe' counts all microbatches of a step, but their number is not known; plan for a CONFIG"
        )
    # Without a number: more than any stage of the other schedules can have in flight.
    in_flight = in_flight_limits(run.schedule, stages, run.num_microbatches or 3 * run.k * stages, run.k)
    recompute = run.recomputes
    kept = one_memory or run.stage_inputs == "device"
    return [
        InFlight(
            graphs=0 if recompute else count - 1,
            inputs=count - 1 if recompute and kept else 0,
            outputs=max(0, count - next_count) if one_memory else 0,
        )
        for count, next_count in zip(in_flight, [*in_flight[1:], in_flight[-1]], strict=True)
    ]


@dataclass(frozen=True)
class InflightCosts(RangeCosts):
    """Peak bytes of every stage at every place. range_bytes: with one microbatch in flight, NEVER where end <= first;
    saved, inputs, outputs: bytes of one waiting graph, input and output, 0 where end <= first. All [L, L + 1].
    """

    saved: Bytes
    inputs: Bytes
    outputs: Bytes
    run: RunShape
    one_memory: bool
    position_free: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Bytes, Bytes, Bytes]:
        """Bytes of one waiting graph, input and output, in the order of `InFlight`."""
        return self.saved, self.inputs, self.outputs

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return M(stage; first, end) of the equation above."""
        counts = _waiting(self.run, stages, self.one_memory)[stage]
        more = sum(count * part[first, end] for count, part in zip(counts, self.parts, strict=True))
        return int(self.range_bytes[first, end] + more)

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """Return the bytes of every range of layers as this stage, [L, L + 1]; see `costs.StageCosts`."""
        matrix = self.range_bytes
        for count, part in zip(_waiting(self.run, stages, self.one_memory)[stage], self.parts, strict=True):
            if count:
                matrix = matrix + count * part
        return matrix


_waiting = functools.lru_cache(maxsize=64)(waiting)


def stage_costs(model: str, profile: Profile, run: RunShape) -> InflightCosts:
    """Return the costs of every stage at every place, from the runs of single layers and pairs. Where the run splits
    its backwards, a waiting graph counts with the bytes held between the halves if these are more. Raises CapslogError
    naming the run or field that the profile lacks for memory model `model`, and as `waiting`.
    """
    waiting(run, 1, one_memory=False)
    recompute = run.recomputes
    single, pair = observed(profile, model, "recompute" if recompute else "none")
    one_memory = single[0].device == "cpu"
    rows = [one_in_flight(row, profile) for row in (*single, *pair)]
    if run.splits_backwards:
        check_halves(rows, model)
        rows = [_split(row) for row in rows]
    parts = compose(rows[: len(single)], rows[len(single) :])
    inputs = [_boundary(row, "boundary_in_bytes", model) for row in single]
    outputs = [0, *(_boundary(row, "boundary_out_bytes", model) for row in single)]
    shape = parts.saved.shape
    return InflightCosts(
        range_bytes=only_ranges(parts.static + parts.transient),
        saved=parts.saved,
        inputs=only_ranges(np.broadcast_to(np.array(inputs, dtype=np.int64)[:, None], shape), 0),
        outputs=only_ranges(np.broadcast_to(np.array(outputs, dtype=np.int64), shape), 0),
        run=run,
        one_memory=one_memory,
    )


def gap(model: str, run: RunShape) -> str | None:
    """Return why the model of one schedule does not describe another; None where it does."""
    if run.schedule == model:
        return None
    name = run.schedule
    return f"memory model '{model}' describes schedule '{model}', not '{name}'; use memory model '{model_of(name)}'"


def check_halves(rows: Iterable[Observation], model: str) -> None:
    """Raise CapslogError, naming the field and a remedy, for rows without the bytes of both halves of a backward."""
    for row in rows:
        for name in ("weight_bytes", *HALVES):
            if getattr(row if name == "weight_bytes" else row.action_bytes, name, None) is None:
                raise CapslogError(
                    f"memory model '{model}' needs {name} of the observation of layers {list(row.layers)} for "
                    "backwards in two halves, which the profile lacks; profile again with pipeline.schedule=zb-h1 (and "
                    "profile.order=packed or capslog)"
                )


def _split(row: Observation) -> Observation:
    """Return the row as if its run had split its backward; its measured peak counts where it is higher."""
    actions = row.action_bytes
    assert actions is not None
    held, static = row.weight_bytes or 0, (row.static_bytes or 0) + (actions.lasting_bytes or 0)
    graph = (row.saved_bytes or 0) + (row.boundary_out_bytes or 0)
    first, later = actions.first_weight_half_bytes or 0, actions.weight_half_bytes or 0
    halves = graph + (actions.input_half_bytes or 0), held + max(later, first - actions.gradient_bytes)
    peak = max(row.peak_bytes, static + max(halves))
    return replace(row, peak_bytes=peak, saved_bytes=max(row.saved_bytes or 0, held))


def _boundary(row: Observation, name: str, model: str) -> int:
    size: int | None = getattr(row, name)
    if size is None:
        raise lacking(model, f"{name} of the observation of layers {list(row.layers)}")
    return size


def one_in_flight(row: Observation, profile: Profile) -> Observation:
    """Return the row without the bytes that its run held for a second microbatch. In the program of `profiling.trim`,
    which measurements and estimates execute, a second microbatch is in flight in runs without the last layer. Where the
    profile has no source, all runs count as runs with one microbatch in flight.
    """
    if profile.source is None or row.layers[1] == profile.num_layers:
        return row
    held = 0
    one_memory = row.device == "cpu"
    if row.memory_action == "none":
        held += row.saved_bytes or 0
    elif one_memory or profile.conditions.get("stage_inputs") == "device":
        held += row.boundary_in_bytes or 0
    if one_memory:
        held += row.boundary_out_bytes or 0
    return replace(row, peak_bytes=max(row.static_bytes or 0, row.peak_bytes - held))


# -- The ranges of layers that fit into a given number of bytes as a stage, and their bytes at every place.
#
# These are values of `StageCosts.matrix`. `planners.exact` needs them at a hundred places of a pipeline: of a thousand
# layers few ranges are short enough to fit, and only those are computed.


_Parts = Sequence[tuple[Sequence[int], Bytes]]


@dataclass(frozen=True)
class Ranges:
    """N ranges of layers in rising order of (first, end), and their bytes. firsts, ends: [N]; layers first .. end-1.
    fixed: [N] bytes that do not depend on the stage. parts: the others, as (count at each stage, bytes of one [N]).
    """

    num_layers: int
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    fixed: Bytes
    parts: _Parts

    def bytes(self, stage: int, chosen: slice) -> Bytes:
        """Return the bytes of the `chosen` ranges as this stage; do not write to the array."""
        sizes = self.fixed[chosen]
        for counts, part in self.parts:
            if counts[stage]:
                sizes = sizes + counts[stage] * part[chosen]
        return sizes

    def within(self, most: int, stages: int) -> Ranges:
        """Return at least the ranges that take `most` bytes or less as one of the first `stages` stages."""
        kept = (_least(self.fixed, self.parts, stages) <= most).nonzero()[0]
        fixed, parts = _chosen(self.fixed, self.parts, kept)
        return replace(self, firsts=self.firsts[kept], ends=self.ends[kept], fixed=fixed, parts=parts)


@dataclass(frozen=True)
class _FromMatrix(Ranges):
    """Ranges of costs without parts; their bytes come from `costs.matrix` of every place."""

    costs: StageCosts
    stages: int

    def bytes(self, stage: int, chosen: slice) -> Bytes:
        return self.costs.matrix(stage, self.stages)[self.firsts[chosen], self.ends[chosen]]

    def within(self, most: int, stages: int) -> Ranges:
        return self


def ranges_within(costs: StageCosts, stages: int, most: int) -> Ranges:
    """Return at least the ranges that take `most` bytes or less as one of `stages` stages."""
    num_layers = costs.num_layers
    if isinstance(costs, InflightCosts):
        counts = np.array(waiting(costs.run, stages, costs.one_memory)).T.tolist()
        parts = [(count, part) for count, part in zip(counts, costs.parts, strict=True) if any(count)]
        fixed = costs.range_bytes
    elif costs.position_free:
        fixed, parts = costs.matrix(), []
    else:
        firsts, ends = np.triu_indices(num_layers)
        return _FromMatrix(num_layers, firsts, ends + 1, ends, (), costs, stages)
    # flat: numpy gathers by one index faster than by two
    fixed, parts = fixed.ravel(), [(count, part.ravel()) for count, part in parts]
    kept = (_least(fixed, parts, stages) <= most).nonzero()[0]
    firsts = kept // (num_layers + 1)
    return Ranges(num_layers, firsts, kept - firsts * (num_layers + 1), *_chosen(fixed, parts, kept))


def _least(fixed: Bytes, parts: _Parts, stages: int) -> Bytes:
    """Return lower bounds of the ranges' bytes over the first `stages` stages."""
    least = fixed
    for counts, part in parts:
        low, high = min(counts[:stages]), max(counts[:stages])
        if low or part.min(initial=0) < 0:
            least = least + np.minimum(low * part, high * part)
    return least


def _chosen(fixed: Bytes, parts: _Parts, kept: NDArray[np.int64]) -> tuple[Bytes, _Parts]:
    return fixed[kept], [(counts, part[kept]) for counts, part in parts]
