"""Bytes of any range of layers at each action, from the runs of single layers and pairs: the maximum over its layers of
what a layer needs and the layers before saved (`composition`). Without `action_bytes`, a row's peak is for all actions.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.composition import lasting, observed
from varuna_capslog.memory.costs import Bytes
from varuna_capslog.memory.cut_bytes import CutBytes, StageTensors
from varuna_capslog.memory.inflight import RANKS, check_halves, one_in_flight
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import MOMENTS, kept_copies
from varuna_capslog.profiles.record import LEAST_MOMENT_BYTES, Observation, Profile

__all__ = ["BackwardWork", "RangeBytes", "bytes_by_kind", "kinds_on"]

# -- The bytes of the optimizer's moments that wait in the host tier, by the layers of a rank; and of gradients.
#
# `RangeBytes` subtracts such moments from the resident bytes of a rank, and `fold` adds them to its host tier.


def likely_gradients(profile: Profile, static: Bytes) -> Bytes:
    """Estimate gradient bytes, [L], from static bytes, taken as parameters, gradients and the optimizer's copies."""
    if any(layer.parameter_bytes is None for layer in profile.layers):
        return np.zeros(len(static), dtype=np.int64)
    parameters = np.array([layer.parameter_bytes for layer in profile.layers], dtype=np.int64)
    parts = 1 + sum(kept_copies(profile.conditions))
    return np.clip((static - parameters) // parts, 0, parameters).astype(np.int64)


class MomentBytes:
    """Bytes of each layer's optimizer moments. sizes: [L], of each layer alone; None: unknown. gradients: [L] bytes."""

    def __init__(self, sizes: Bytes | None, profile: Profile, gradients: Bytes) -> None:
        self._sizes, self._shared, self._gradients = sizes, profile.shared, gradients
        self._copies, _ = kept_copies(profile.conditions)

    @property
    def known(self) -> bool:
        """True where the profile has the moments' bytes."""
        return self._sizes is not None

    def of(self, layers: Collection[int], away: Collection[int]) -> dict[int, int]:
        """Return layer -> the bytes of its moments, in rising order, for the layers in `away`, whose moments are not on
        the device. layers: all of the rank; moments of a shared parameter belong to the first layer that uses it.
        Raises CapslogError where the profile lacks the moments' bytes.
        """
        if not away:
            return {}
        if self._sizes is None:
            raise CapslogError(
                "the profile does not say what the optimizer keeps of each layer (moment_bytes), which a plan whose "
                "moments are not all on their device needs; profile again with `capslog profile`"
            )
        moment_bytes = {layer: int(self._sizes[layer]) for layer in sorted(away)}
        for parameter in (parameter for parameter in self._shared if parameter.bytes >= LEAST_MOMENT_BYTES):
            for layer in [layer for layer in parameter.layers if layer in layers][1:]:
                if layer in moment_bytes and self._gradients[layer] >= parameter.bytes:
                    moment_bytes[layer] = max(0, moment_bytes[layer] - int(self._copies * parameter.bytes))
        return moment_bytes

    def at_update(self, layers: Collection[int], away: Collection[int], gradients: Bytes, work: Bytes) -> int:
        """Return the peak bytes of moments and gradients on the device while the `away` layers are updated, after all
        other layers and one at a time: the moments of two neighbours and the gradients not yet applied are on the
        device. gradients: [L] bytes, of parameters with moments. work: [L] additional bytes of each layer's update.
        """
        rows = [(layer, size) for layer, size in self.of(layers, away).items() if size]
        gradients_left, before, peak = sum(int(gradients[layer]) for layer, _ in rows), 0, 0
        for (layer, size), behind in zip(rows, [*(size for _, size in rows[1:]), 0], strict=False):
            peak = max(peak, gradients_left + size + max(before, behind) + int(work[layer]))
            gradients_left, before = gradients_left - int(gradients[layer]), size
        return peak


# -- Bytes of any range of layers at its actions


Known = TypeVar("Known")


class _Sums(NamedTuple):
    """Bytes of each single layer [L], and the bytes that each layer adds to the layer before [L - 1]."""

    single: Bytes
    more: Bytes

    @classmethod
    def of(cls, single: Bytes, pair: Bytes) -> _Sums:
        return cls(single, pair - single[:-1])

    def range(self, first: int, end: int) -> int:
        return max(0, int(self.single[first] + self.more[first : end - 1].sum()))


class _Halves(NamedTuple):
    """Bytes of split backwards, of single layers [L] and pairs [L - 1]. held: between the halves. noted: the gradients
    in `held`; seeds: [L], the gradients of a layer's outputs in `noted`. of_loss: freed with the loss. peaks: name ->
    the peak of a half, with the bytes in memory before.
    """

    held: _Sums
    noted: _Sums
    seeds: Bytes
    of_loss: int
    peaks: dict[str, tuple[Bytes, Bytes]]


class BackwardWork(NamedTuple):
    """Peak bytes of a backward action at a range of layers, ints or arrays. whole: while all inputs of the range are
    held. later: after some inputs were freed. freed: the most bytes of freed inputs.
    """

    whole: Any
    later: Any = 0
    freed: Any = 0

    @classmethod
    def of(cls, peaks: Bytes, freed: Bytes) -> BackwardWork:
        """Make the record from each layer's peak bytes and the bytes of inputs freed before."""
        later = freed > 0
        if not later.any():
            return cls(int(peaks.max()))
        return cls(int(peaks[~later].max(initial=0)), int(peaks[later].max()), int(freed.max()))

    @property
    def peak(self) -> int:
        """The larger of `whole` and `later`."""
        return max(self.whole, self.later)

    def without(self, elsewhere: Any) -> Any:
        """Return the peak. elsewhere: input bytes to leave out, since they count elsewhere; negative: bytes to add."""
        if isinstance(elsewhere, int):  # several times faster than numpy
            return max(self.whole - elsewhere, self.later - max(0, elsewhere - self.freed) - min(0, elsewhere))
        still = np.maximum(0, elsewhere - self.freed) + np.minimum(0, elsewhere)
        return np.maximum(self.whole - elsewhere, self.later - still)


MOVING = ("grain", "parts", "peaks")
"""First words of the keys of `RangeBytes.once` whose results depend on where the moments wait."""


class RangeBytes(CutBytes):
    """Bytes of one profile's layers in calls of `grain` microbatches. model: name of the memory model, for errors.
    recompute: prefer rows of runs with recomputation. stage_tensors: see `CutBytes`. parts: recomputed parts of layers;
    None: no parts. Raises CapslogError naming the run or field that the profile lacks.

    Attributes:
        one_memory: True where the device is the CPU: messages and what waits on the host are in its memory.
        has_actions: True where the rows have the bytes of each action; else their peaks include output gradients.
        shared_parameters: those that several layers use.
        moments, moments_wait: the optimizer's moments; True where all moments wait in the host tier.
        gradients: bytes, of each layer's parameters [L]; from the rows, else from the layers' parameter_bytes; without
            these 0, and gradients count as resident.
    """

    def __init__(
        self,
        profile: Profile,
        model: str,
        recompute: bool,
        stage_tensors: StageTensors | None = None,
        grain: int = 1,
        parts: tuple[str, ...] | None = None,
    ) -> None:
        single, pair = observed(profile, model, "recompute" if recompute else "none", grain, parts)
        boundaries = [single[0].boundary_in_bytes or 0, *(row.boundary_out_bytes or 0 for row in single)]
        super().__init__(profile, boundaries, stage_tensors, grain)
        self._model, self._rows, self._recompute, self._grain = model, (single, pair), recompute, grain
        self.shared_parameters = profile.shared
        self.one_memory = single[0].device == "cpu"
        rows = (*single, *pair)
        self.has_actions = all(row.action_bytes is not None for row in rows)
        if not self.has_actions:
            self.gradient = [0] * len(self.gradient)
        more = self._graph(pair)
        self._saved = _Sums.of(self._graph(single), more)
        last = np.array([*np.zeros(len(single) - 1), self.crossing[-1]], dtype=np.int64)
        staying = self._known_part(single, "staying_bytes", last), self._known_part(pair, "staying_bytes", last[1:])
        self._staying = _Sums.of(*staying)
        moved = self._known_part(pair, "moved_bytes", more - staying[1])
        self._moved = _Sums.of(self._known_part(single, "moved_bytes", self._saved.single - staying[0]), moved)
        self._statistics = self._part(single, "statistics_bytes")
        static = _column(single, "static_bytes")
        self.gradients = self._part(single, "gradient_bytes") if self.has_actions else likely_gradients(profile, static)
        self._update, self._shared = self._part(single, "update_bytes"), self._part(single, "shared_bytes")
        self._pair_shared = self._part(pair, "shared_bytes")
        if self._knows("moved_bytes", rows):
            # tensors that the layers on both sides of a cut save: all that rows with recomputation show of the outputs
            both = self._moved.single[1:] - self._moved.more
            self._shared[:-1] = np.maximum(self._shared[:-1], both)
            self._pair_shared[:-1] = np.maximum(self._pair_shared[:-1], both[1:])
        held = static - self.gradients
        together = self._part(pair, "gradient_bytes") if self.has_actions else self.gradients[:-1] + self.gradients[1:]
        self._resident = _Sums.of(held, _column(pair, "static_bytes") - together)
        actions = ("forward_bytes", "bare_bytes", "backward_bytes", "first_backward_bytes")
        self._single = {name: self._beside(single, name) for name in actions}
        self._pair = {name: self._beside(pair, name) - self._saved.single[:-1] for name in actions}
        sizes = self._part(single, "moment_bytes") if self.has_actions and self._knows("moment_bytes", single) else None
        self.moments, self.moments_wait = MomentBytes(sizes, profile, self.gradients), False
        self._known: dict[tuple[object, ...], Any] = {}

    @classmethod
    def of_ranks(cls, profile: Profile, recompute: bool) -> RangeBytes:
        """Return the bytes of a profile for memory model `ranks`. Searches share them, with the results of `once`."""
        for ranges in tuple(_RECENT):
            if ranges._profile is profile and ranges._recompute == recompute:
                return ranges
        _RECENT.append(ranges := cls(profile, RANKS, recompute))
        return ranges

    def of_stage(self, layers: Collection[int]) -> RangeBytes:
        """Return the bytes of the same layers in a stage of `layers` with direct routes."""
        stage_tensors = StageTensors.of(self.tensors, layers, self.num_layers)
        return self._like(RangeBytes(self._profile, self._model, self._recompute, stage_tensors, self._grain))

    def of_grain(self, grain: int) -> RangeBytes:
        """Return the bytes of the same layers in calls of `grain` microbatches."""
        arguments = self._profile, self._model, self._recompute, None, grain
        return self if grain == self._grain else self.once(("grain", grain), lambda: self._like(RangeBytes(*arguments)))

    def treating(self, interval: MemoryInterval) -> RangeBytes:
        """Return the bytes of the same layers with the interval's parts recomputed; `self` for an interval without
        parts. Raises CapslogError where the profile lacks a run of the interval's layers with these parts.
        """
        if not (parts := interval.parts):
            return self
        arguments = self._profile, self._model, self._recompute, self._stage, self._grain, parts
        ranges: RangeBytes = self.once(("parts", parts), lambda: self._like(RangeBytes(*arguments)))
        single, pair = ranges._rows
        rows = [*single[interval.first : interval.end], *pair[interval.first : interval.end - 1]]
        if any(row.parts is None for row in rows):
            raise CapslogError(
                f"the memory interval {interval.text} treats parts of its layers, and the profile has no runs of these "
                "layers with them; an estimate for the plan (pipeline.plan) has them, and so does a rehearsal of the "
                "plan (capslog plan with a capacity)"
            )
        return ranges

    def with_waiting_moments(self) -> RangeBytes:
        """Return the bytes of the same layers where all moments wait in the host tier."""
        ranges = copy.copy(self)
        ranges.moments_wait = True
        ranges._known = {key: known for key, known in self._known.items() if key[0] not in MOVING}
        return ranges

    def _like(self, ranges: RangeBytes) -> RangeBytes:
        return ranges.with_waiting_moments() if self.moments_wait else ranges

    def saved(self, first: int, end: int) -> int:
        """Return the bytes that a forward of the range keeps for its backward, its inputs included."""
        return self._saved.range(first, end)

    def moved(self, first: int, end: int) -> int:
        """Return the part of `saved` that goes to the host tier where the range is offloaded."""
        return self._moved.range(first, end)

    def staying(self, first: int, end: int) -> int:
        """Return the part of `saved` that stays on the device where the range is offloaded."""
        return self._staying.range(first, end)

    def only_entered(self, layer: int) -> int:
        """Return the rest of a layer's `saved`: inputs of its graph that nothing else needs."""
        return max(0, int(self._saved.single[layer] - self._moved.single[layer] - self._staying.single[layer]))

    def statistics(self, first: int, end: int) -> int:
        """Return the bytes of running statistics that a forward of the range keeps until the end of the step."""
        return int(self._statistics[first:end].sum())

    def forward(self, first: int, end: int) -> int:
        """Return the peak of a forward or recomputation that keeps its graph, its inputs included."""
        return self.once(("F", first, end), lambda: int(self._prefixes("forward_bytes", first, end).max()))

    def bare(self, first: int, end: int) -> int:
        """Return the peak of a forward that keeps only its inputs, with these inputs."""
        single = self._single["bare_bytes"][first:end]
        if not self.has_actions or end == first + 1:
            return min(int(single.max()), self.forward(first, end)) if not self.has_actions else int(single[0])
        kept_inputs = [self.crossing[first] - self.passed(first, layer) for layer in range(first + 1, end)]
        return max(int(single[0]), int((single[1:] + np.array(kept_inputs)).max()))

    def backward(self, first: int, end: int, makes_gradients: bool = False) -> BackwardWork:
        """Return the bytes of a backward: its graph, its outputs' gradients, and any parameter gradients made."""

        def compute() -> BackwardWork:
            behind = self._seeds(first, end)
            if not makes_gradients:
                return self._work(first, end, self._prefixes("backward_bytes", first, end) + behind)
            behind += np.cumsum(self.gradients[first:end][::-1])[::-1]
            if self.has_actions:  # the layer's own gradients are in the bytes of its first backward
                behind = behind - self.gradients[first:end]
            return self._work(first, end, self._prefixes("first_backward_bytes", first, end) + behind)

        return self.once(("B", first, end, makes_gradients), compute)

    def _work(self, first: int, end: int, peaks: Bytes) -> BackwardWork:
        return BackwardWork.of(peaks, self.left_before(first, end))

    def held_between_halves(self, first: int, end: int) -> int:
        """Return the bytes held between the halves of a backward: the rest of the graph and the noted gradients. Raises
        CapslogError where the profile lacks the halves, as do `input_half` and `weight_half`.
        """
        if (until := self._differentiated_later(first, end)) == first:
            return self._halves.held.range(first, end) + self._held_by_longer_graphs(first, end)
        behind = self.held_between_halves(until, end) if until < end else 0
        return self._prefix(first, until, end) + self.gradient[until] + behind

    def input_half(self, first: int, end: int) -> BackwardWork:
        """Return the bytes of the input half of a backward, with its graph and the gradients of its outputs."""

        def compute() -> BackwardWork:
            if (until := self._differentiated_later(first, end)) > first:
                if until == end < self.num_layers:
                    return BackwardWork(self.saved(first, end) + self.gradient[end])
                # the loss is differentiated, which is a part of the last layer's bytes
                until = min(until, end - 1)
                return BackwardWork(self._prefix(first, until, end) + self.input_half(until, end).peak)
            before, work = self._halves_at_work("input_half_bytes", self._saved, first, end)
            behind = np.zeros(end - first, dtype=np.int64)
            for layer, until in self.graph_ends(first, end):
                # a graph frees nothing before its end; of the graphs behind it only the bytes that W needs remain
                same = self._saved.more[layer : until - 1].sum() + self._halves.noted.more[layer : until - 1].sum()
                behind[layer - first] = same + self._halves.held.more[until - 1 : end - 1].sum()
                if until > layer + 1:  # the gradient with which the graph's backward began, where it is not noted
                    behind[layer - first] += self.gradient[until] - self._halves.seeds[until - 1]
                if end == self.num_layers and layer < end - 1:
                    behind[layer - first] -= self._halves.of_loss
            work = before + work + behind[-len(work) :] + self._held_by_longer_graphs(first, end)
            return BackwardWork.of(work, self.left_before(first, end)[-len(work) :])

        return self.once(("I", first, end), compute)

    def weight_half(self, first: int, end: int, makes_gradients: bool = False) -> int:
        """Return the peak of the weight half, with all bytes held between the halves and parameter gradients made."""

        def compute() -> int:
            if (until := self._differentiated_later(first, end)) > first:
                made, peak = 0, 0
                if until < end:
                    made, peak = self.made(until, end) * makes_gradients, self.weight_half(until, end, makes_gradients)
                    peak += self._prefix(first, until, end) + self.gradient[until]
                return max(peak, made + self.backward(first, until, makes_gradients).peak)
            name = "first_weight_half_bytes" if makes_gradients else "weight_half_bytes"
            before, work = self._halves_at_work(name, self._halves.held, first, end)
            single, pair = self._halves.peaks[name]
            new = self.gradients * makes_gradients
            # a graph may free nothing before its end, not even tensors recomputed by layers that checkpoint themselves
            grows = np.maximum(self._halves.held.more + new[1:], pair - single[:-1])
            behind = np.zeros(end - first, dtype=np.int64)
            for layer, until in self.graph_ends(first, end):
                behind[layer - first] = grows[layer : until - 1].sum() + new[until:end].sum()
            return int((before + work + behind[-len(work) :]).max()) + self._held_by_longer_graphs(first, end)

        return self.once(("W", first, end, makes_gradients), compute)

    def _held_by_longer_graphs(self, first: int, end: int) -> int:
        """Return additional bytes between the halves where a graph of a stage with direct routes spans several graphs
        of the rows: the layers before the last of these graphs keep all that they saved.
        """
        extra, until = 0, end
        while until > first:
            ends = range(until - 1, first, -1)
            begin = next((cut for cut in ends if not self.joined[cut]), first)
            new = next((cut for cut in range(until - 1, begin, -1) if not self.joined_in_rows[cut]), None)
            if new is not None:
                extra += max(0, self.saved(begin, new) - self._halves.held.range(begin, new))
            until = begin
        return extra

    def _differentiated_later(self, first: int, end: int) -> int:
        """Return the end of the range's first graph where the weight half differentiates the whole graph, since its
        inputs need no gradient; else, and where the rows describe the whole range, return `first`.
        """
        entered = self.read_with_gradient(first, first + 1) if self.tensors else first
        in_rows = end == first + 1 or (end == first + 2 and self.joined[first + 1] == self.joined_in_rows[first + 1])
        if entered or in_rows:
            return first
        return dict(self.graph_ends(first, end))[first]

    def _prefix(self, first: int, until: int, end: int) -> int:
        """Return the bytes that the layers before `until` save in addition to the layers behind it."""
        return self.saved(first, end) - (self.saved(until, end) if until < end else 0)

    def _halves_at_work(self, name: str, held: _Sums, first: int, end: int) -> tuple[Bytes, Bytes]:
        """Return, for each pair of the range or its only layer, the bytes held by the layers before, and the peak."""
        single, pair = self._halves.peaks[name]
        if end == first + 1:
            return np.zeros(1, dtype=np.int64), single[first:end]
        before = held.single[first] + np.append(0, np.cumsum(held.more[first : end - 2]))
        return before - held.single[first : end - 1], pair[first : end - 1]

    @cached_property
    def _halves(self) -> _Halves:
        single, pair = self._rows
        check_halves((*single, *pair), self._model)
        held = _column(single, "weight_bytes"), _column(pair, "weight_bytes")
        graphs = self._with_seeds(single), self._with_seeds(pair)
        extra = {"input_half_bytes": graphs, "weight_half_bytes": held, "first_weight_half_bytes": held}
        peaks = {
            name: (self._part(single, name) + size[0], self._part(pair, name) + size[1]) for name, size in extra.items()
        }
        noted = self._part(single, "noted_bytes"), self._part(pair, "noted_bytes")
        last, seeds = single[-1], self._part(single, "noted_seed_bytes")
        hidden = max(0, int(self._saved.single[-1]) - (last.saved_bytes or 0))
        freed_with_loss = int(self._saved.single[-1] + noted[0][-1] - held[0][-1])
        of_loss = max(0, min(int(self._staying.single[-1]) - hidden, freed_with_loss))
        return _Halves(_Sums.of(*held), _Sums.of(*noted), seeds, of_loss, peaks)

    def made(self, first: int, end: int) -> int:
        """Return the gradient bytes of the range's parameters; each use of a shared parameter counts."""
        return int(self.gradients[first:end].sum())

    def shared(self, first: int, end: int, offloaded: bool = False) -> int:
        """Return a lower bound of the output bytes that the range's graph keeps. offloaded: less inputs passed on."""
        size = int(self._shared[first] if end == first + 1 else self._pair_shared[end - 2])
        if offloaded:
            part = max(first, end - 2), end
            begun = max(0, self.saved(*part) - self.moved(*part) - self.staying(*part))
            size = max(0, size - min(begun, self.read_and_passed(*part)))
        # the stage of a row also passes on the tensors that it has read
        return size if self._stage is None else max(0, size - self._stage.read_elsewhere(max(first, end - 2), end))

    def resident(self, layers: Collection[int], away: Collection[int] = ()) -> int:
        """Return the bytes that a rank of these layers always holds: parameters, moments, buffers (and gradients, see
        `gradients`), and what its libraries keep. away: layers whose moments are in the host tier or on another rank.
        """
        total = sum(
            int(self._resident.more[layer - 1] if layer - 1 in layers else self._resident.single[layer])
            for layer in layers
        )
        for parameter in self._profile.shared:
            uses = [layer for layer in parameter.layers if layer in layers]
            # the pairs account for uses in neighbouring layers
            apart = sum(after - before > 1 for before, after in pairwise(uses))
            trained = all(self.gradients[layer] >= parameter.bytes for layer in uses)
            total -= int(apart * parameter.bytes * (1 + sum(kept_copies(self._profile.conditions)) if trained else 1))
        # the peaks of rows without action bytes include the libraries' bytes
        kept = self.once(("lasting",), lambda: [(lasting(rows) * self.has_actions).tolist() for rows in self._rows])
        (single, pair), both = kept, [layer - 1 for layer in layers if layer - 1 in layers]
        total += max([*(single[layer] for layer in layers), *(pair[layer] for layer in both)], default=0)
        return total - sum(self.moments.of(layers, layers if self.moments_wait else away).values())

    def update(self, layers: Collection[int], away: Collection[int] = (), elsewhere: Collection[int] = ()) -> int:
        """Return the peak of the update, less the resident bytes. elsewhere: layers that other ranks update."""
        away = layers if self.moments_wait else away
        # CPU kernels update in place, GPU kernels update all parameters together; other bytes are for the norms
        work = np.minimum(self._update, self.gradients) * (not self.one_memory)
        together = sum(int(work[layer]) for layer in layers if layer not in away and layer not in elsewhere)
        if MOMENTS in self._profile.conditions:  # rounded moments are widened one layer after the other
            work, together = self._update, 0
        besides = max(together, max((int(self._update[layer]) for layer in layers), default=0))
        waiting = self.moments.at_update(layers, away, self.gradients, work)
        return max(sum(int(self.gradients[layer]) for layer in layers) + besides, waiting)

    def once(self, key: tuple[object, ...], make: Callable[[], Known]) -> Known:
        """Return the result of `make`, computed once per key. Where the result depends on the place of the moments, the
        key must begin with a word of `MOVING`.
        """
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _prefixes(self, name: str, first: int, end: int) -> Bytes:
        """Return the peak at each layer of the range, with the bytes that the layers before have saved."""
        held = self._saved.single[first] + np.append(0, np.cumsum(self._saved.more[first : max(first, end - 2)]))
        peaks = np.empty(end - first, dtype=np.int64)
        peaks[0] = self._single[name][first]
        peaks[1:] = held[: end - first - 1] + self._pair[name][first : end - 1]
        return peaks

    def _seeds(self, first: int, end: int) -> Bytes:
        """Return, by layer of the range, by how many bytes the gradient of its graph's outputs, which lives as long as
        the graph's backward, exceeds the gradient of the layer's outputs. Layers share a graph where only the next
        layer reads each tensor with a gradient (`engine/stage`).
        """
        excess = np.zeros(end - first, dtype=np.int64)
        for layer, until in self.graph_ends(first, end):
            excess[layer - first] = max(0, self.gradient[until] - self.gradient[layer + 1])
        return excess

    def _part(self, rows: Sequence[Observation], name: str) -> Bytes:
        if not self.has_actions:
            return np.zeros(len(rows), dtype=np.int64)
        return np.array([getattr(row.action_bytes, name) for row in rows], dtype=np.int64)

    def _known_part(self, rows: Sequence[Observation], name: str, otherwise: Bytes) -> Bytes:
        return self._part(rows, name) if self._knows(name, rows) else otherwise

    def _knows(self, name: str, rows: Sequence[Observation]) -> bool:
        return all(getattr(row.action_bytes, name, None) is not None for row in rows)

    def _graph(self, rows: Sequence[Observation]) -> Bytes:
        return self._known_part(rows, "graph_bytes", _column(rows, "saved_bytes"))

    def _beside(self, rows: Sequence[Observation], name: str) -> Bytes:
        """Return the peak of a forward with its inputs, or of a backward with its graph and output gradients."""
        if not self.has_actions:
            kept = [one_in_flight(row, self._profile) for row in rows]
            return np.array([row.peak_bytes - (row.static_bytes or 0) for row in kept], dtype=np.int64)
        if "backward" in name:
            work = self._part(rows, name)
            if self._stage is not None:
                work = np.maximum(work, self._stage.added[[row.layers[1] - 1 for row in rows]])
            return work + self._with_seeds(rows)
        return self._part(rows, name) + np.array(self.crossing)[[row.layers[0] for row in rows]]

    def _with_seeds(self, rows: Sequence[Observation]) -> Bytes:
        end = np.array([row.layers[1] for row in rows], dtype=np.int64)
        return self._graph(rows) + np.where(end == self.num_layers, 0, np.array(self.gradient)[end])


_RECENT: deque[RangeBytes] = deque(maxlen=4)
"""Bytes of the last profiles searched. Each refers to its profile, so that no other profile gets its identity."""


def _column(rows: Sequence[Observation], name: str) -> Bytes:
    return np.array([getattr(row, name) for row in rows], dtype=np.int64)


# -- Allocated bytes of a device by kind, for reports: weights, gradients, optimizer states, activations


def kinds_on(plan: Plan, profile: Profile, place: int, of: str, peak_bytes: int) -> dict[str, int]:
    """Return `bytes_by_kind` of a plan's stage or rank, and {} where some optimizer states wait in the host tier.

    place, of: number of a "stage" or of a "rank". peak_bytes: allocated there.
    """
    stages = [stage for at, stage in enumerate(plan.stages) if (place in stage.ranks if of == "rank" else at == place)]
    if any(stage.moments_away for stage in stages):
        return {}
    layers = {layer for stage in stages for layer in stage.numbers}
    elsewhere = {layer for stage in stages for layer in stage.moments_elsewhere}
    return bytes_by_kind(profile, layers, peak_bytes, elsewhere)


def bytes_by_kind(
    profile: Profile, layers: Collection[int], peak_bytes: int, elsewhere: Collection[int] = ()
) -> dict[str, int]:
    """Return the bytes of a device that holds these layers, by kind; their sum is `peak_bytes`.

    elsewhere: layers, without shared parameters, whose optimizer states another replica keeps.

    A parameter of several layers counts once. Masters of 16-bit weights are a kind of their own. The rest is one kind:
    what the forward saves, workspaces and messages. Empty where the profile lacks the bytes of parameters, or the peak
    is smaller than the other kinds.
    """
    chosen = [profile.layers[layer] for layer in sorted(layers)]
    if any(layer.parameter_bytes is None or layer.static_bytes is None for layer in profile.layers):
        return {}
    static = np.array([layer.static_bytes for layer in profile.layers], dtype=np.int64)
    each = likely_gradients(profile, static)
    weights, gradients = sum(layer.parameter_bytes or 0 for layer in chosen), int(each[sorted(layers)].sum())
    for shared in profile.shared:
        users = sorted({*shared.layers} & {*layers})
        twice = max(0, len(users) - 1) * shared.bytes
        weights -= twice
        if users and min(each[users]) >= shared.bytes:  # else it is not trained
            gradients -= twice
    states, copies = kept_copies(profile.conditions)
    stepped = gradients - int(each[sorted(elsewhere)].sum())
    low, kept = round(copies * gradients), round(states * stepped)
    kinds = {"weights": low, "masters": weights} if low else {"weights": weights}
    kinds |= {"gradients": gradients, "optimizer states": kept}
    rest = peak_bytes - sum(kinds.values())
    return {**kinds, "activations and workspaces": rest} if rest >= 0 else {}
