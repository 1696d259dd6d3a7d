"""Composition model: a stage's peak from the bytes that its layers save, and those that each layer needs to compute.

    M(l, m) = static(l, m) + max of:  T(l)                          while the first layer computes
                                      saved(l, k) + T(k | k-1)      while layer k computes, k = l+1 .. m-1

for layers l .. m-1, from the same 2L-1 runs as M_i and M_a. With P, static and saved of a run indexed by its layers:

    static(l, m) = static[l] + sum over k = l+1 .. m-1 of  static[k-1, k] - static[k-1]   + lasting(l, m)
    saved(l, k)  = saved[l]  + sum over j = l+1 .. k-1 of  saved[j-1, j] - saved[j-1]
    T(l)         = P[l] - static[l] - lasting[l]
    T(k | k-1)   = P[k-1, k] - static[k-1, k] - saved[k-1] - lasting[k-1, k]
    lasting(l, m) = the largest of lasting[l], lasting[k-1, k] and lasting[k]

The increments come from pairs because a layer saves other bytes beside a neighbour than alone: a frozen layer saves
nothing before another frozen layer of its stage. M_i + sum M_a, in these terms T(l) + sum of max(0, saved + T - T of
the layer before), adds peaks of different times; this model takes the largest peak. lasting is what the device's
libraries keep (`ActionBytes.lasting_bytes`, 0 where unknown). The model has one live graph; `inflight` adds others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Bytes, RangeCosts, only_ranges
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.schedules import RunShape

__all__ = ["compose", "lacking", "lasting", "lasting_of_ranges", "observed", "stage_costs"]

_PARTS = ("static_bytes", "saved_bytes")


@dataclass(frozen=True)
class Composition:
    """Bytes of every range of layers with one microbatch in flight. All [L, L + 1], 0 where end <= first. static:
    parameters, gradients, optimizer state, and what libraries keep. saved: what a forward keeps for its backward, the
    range's inputs included. transient: the peak less `static`; includes the live graph.
    """

    static: Bytes
    saved: Bytes
    transient: Bytes


def compose(single: Sequence[Observation], pair: Sequence[Observation]) -> Composition:
    """Compose every range from the runs of single layers [L] and neighbouring pairs [L - 1]; O(L^2) in numpy steps. The
    runs must hold static and saved bytes, with one graph alive (see `inflight.one_in_flight`). Raises CapslogError
    where the bytes are beyond what a search can add up.
    """
    if sum(row.peak_bytes for row in (*single, *pair)) >= 1 << 60:
        raise CapslogError(
            "the observed peaks sum to more than 1 EiB, beyond what a search can add up; check their unit, bytes"
        )
    kept, pair_kept = lasting(single), lasting(pair)
    peak, static, saved = _columns(single)
    pair_peak, pair_static, pair_saved = _columns(pair)
    held = _sums(saved, pair_saved - saved[:-1])
    size = len(single)
    # Column k + 1, while layer k computes: saved(l, k) + T(k | k-1) right of the diagonal, T(l) on the diagonal.
    at_work = np.zeros((size, size + 1), dtype=np.int64)
    at_work[:, 2:] = held[:, 1:-1] + (pair_peak - pair_kept - pair_static - saved[:-1])
    at_work[np.tri(size, size + 1, 1, dtype=np.bool_)] = 0
    np.fill_diagonal(at_work[:, 1:], peak - kept - static)
    return Composition(
        static=_sums(static, pair_static - static[:-1]) + lasting_of_ranges(kept, pair_kept),
        saved=held,
        transient=np.maximum.accumulate(at_work, axis=1),
    )


def lasting(rows: Sequence[Observation]) -> Bytes:
    """Return the bytes that the device's libraries keep after each run, a part of its peak; 0 where not known."""
    sizes = [0 if row.action_bytes is None else row.action_bytes.lasting_bytes or 0 for row in rows]
    return np.array(sizes, dtype=np.int64)


def lasting_of_ranges(single: Bytes, pair: Bytes) -> Bytes:
    """Return `lasting` for every range of layers, [L, L + 1]: the maximum over the runs of the range."""
    size = len(single)
    lasting_bytes = np.zeros((size, size + 1), dtype=np.int64)
    lasting_bytes[:, 1:] = np.triu(np.broadcast_to(np.append(0, np.maximum(pair, single[1:])), (size, size)), 1)
    np.fill_diagonal(lasting_bytes[:, 1:], single)
    return np.maximum.accumulate(lasting_bytes, axis=1)


def observed(
    profile: Profile, model: str, memory_action: str, grain: int = 1, parts: tuple[str, ...] | None = None
) -> tuple[list[Observation], list[Observation]]:
    """Return the runs of single layers and of pairs, in order of layers, with `grain` microbatches in a call: those of
    the first complete condition with `memory_action`, else of the first complete condition. parts: recomputed parts of
    layers; a run with these parts, if the profile has it, replaces the run without parts. Raises CapslogError naming
    the run or the field that memory model `model` misses.
    """
    size = profile.num_layers
    wanted = stage_runs(size)
    groups: dict[str, dict[tuple[int, int], Observation]] = {}
    parted: dict[tuple[int, int], Observation] = {}
    for row in profile.observations:
        usable = row.variant is None and row.microbatch_size == profile.samples(grain)
        if usable and row.parts is not None and row.parts == parts:
            parted[row.layers] = row
        elif usable and row.parts is None and row.layers[1] - row.layers[0] <= 2:
            groups.setdefault(row.condition, {}).setdefault(row.layers, row)
    needs = {condition: _need(rows, wanted) for condition, rows in groups.items()}
    complete = [[groups[condition][run] for run in wanted] for condition, need in needs.items() if need is None]
    if not complete and grain > 1:
        raise CapslogError(
            f"a stage of grain {grain} takes {profile.samples(grain)} samples in one call, and the profile has no runs "
            "of every layer and of every pair of layers with so many; estimate one with `capslog profile`, "
            f"profile.source=estimated and profile.grains=[{grain}]"
        )
    if not complete:
        need = next(iter(needs.values()), None) or "observations, the runs of every layer and of every pair of layers"
        raise lacking(model, need)
    rows = min(complete, key=lambda rows: rows[0].memory_action != memory_action)
    rows = [parted.get(row.layers, row) for row in rows]
    return rows[:size], rows[size:]


def stage_costs(profile: Profile, run: RunShape) -> RangeCosts:
    """Return the costs of every stage of the profiled chain; the run does not change them."""
    parts = compose(*observed(profile, "composition", "recompute"))
    return RangeCosts(only_ranges(parts.static + parts.transient))


def lacking(model: str, need: str) -> CapslogError:
    """Return the error for a profile without `need`, which memory model `model` needs."""
    return CapslogError(
        f"memory model '{model}' needs {need}, which the profile lacks; profile again with `capslog profile`, or use "
        "memory model 'additive'"
    )


def _need(rows: dict[tuple[int, int], Observation], wanted: Sequence[tuple[int, int]]) -> str | None:
    for run in wanted:
        if run not in rows:
            return f"an observation of layers {list(run)}"
        for part in _PARTS:
            if getattr(rows[run], part) is None:
                return f"{part} of the observation of layers {list(run)}"
    return None


def _columns(rows: Sequence[Observation]) -> tuple[Bytes, Bytes, Bytes]:
    names = ("peak_bytes", *_PARTS)
    peak, static, saved = (np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in names)
    return peak, static, saved


def _sums(single: Bytes, increments: Bytes) -> Bytes:
    """Return [L, L + 1]: entry [l, m] is single[l] plus the increments of layers l+1 .. m-1; 0 where m <= l."""
    running = np.append(0, np.cumsum(increments))
    sums = np.zeros((len(single), len(single) + 1), dtype=np.int64)
    sums[:, 1:] = (single - running)[:, None] + running
    return only_ranges(sums, 0)
