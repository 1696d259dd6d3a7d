"""Memory model `ranks`: the bytes of a rank at every position of its list of actions.

    bytes(rank, p) = resident bytes: parameters, moments, buffers
                   + gradients of parameters, and gradient blocks that wait for other blocks or for the exchange
                   + the bytes held by every call in flight at p (`segments`), and its running statistics
                   + tensors in transit: received, posted ahead, sent and not yet confirmed (`schedules/traffic`)
                   + additional bytes of the action at p

A rank executes one list, so its peak depends on the list and not on time. The models of `inflight` are this sum in
closed form for one pipeline of one stage per rank; the fold serves every full plan: several stages on a rank, unequal
blocks, memory intervals, explicit lists. It does not count the memory of a data loader. Each event adds to an array of
its rank at one position, and a running sum gives the bytes at all positions: 10,000 actions take milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import additive, inflight
from varuna_capslog.memory.cut_bytes import LinkBytes
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import Treatment, treated
from varuna_capslog.plans.parts import PlanStage, Units, with_memory
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Action, RunShape, Schedule, TimedAction, graph_keeping_forwards
from varuna_capslog.schedules.traffic import Messages, Numbers, RankActions, StageLink, StepActions, messages_of

__all__ = [
    "Course",
    "RankFold",
    "StageMemory",
    "exchange",
    "fold",
    "fold_course",
    "memory_courses",
    "peak_of",
    "stage_memory",
]

# -- The bytes of gradients, beyond the resident bytes, while a rank exchanges them at the end of a step.
#
# All ranks add the gradient blocks of a layer that several ranks hold, and the gradients of a parameter that several
# layers share, in one order (`engine/replicated`). A rank therefore holds the other ranks' blocks of its slice, or
# their gradients, until it has added them. `fold` below adds the peak.


Holders = dict[int, dict[int, Sequence[int]]]
"""layer -> rank that holds the layer -> the rank's blocks, rising."""


def exchange(ranges: RangeBytes, rank: int, holders: Holders) -> int:
    """Return the peak bytes of gradients on a rank from its last backward to the vote."""
    layers = sorted(layer for layer, ranks in holders.items() if rank in ranks)
    size = {layer: int(ranges.gradients[layer]) for layer in layers}
    several = [layer for layer in layers if len(holders[layer]) > 1]
    kept = {layer: len(holders[layer][rank]) if layer in several else 1 for layer in layers}
    peak = waiting = sum(kept[layer] * size[layer] for layer in layers)
    for layer in several:
        peak = max(peak, waiting + _beside(holders[layer], rank, size[layer]))
        waiting -= (kept[layer] - 1) * size[layer]
    return max([peak, *(waiting + more for more in _uses(ranges, rank, holders))])


def _beside(ranks: Mapping[int, Sequence[int]], rank: int, size: int) -> int:
    """Return the peak bytes beside this rank's blocks of a layer of `size` bytes while its holders add their slices:
    each block is copied and packed, then the packed blocks replace the originals.
    """
    own_blocks, blocks = len(ranks[rank]), sum(map(len, ranks.values()))
    part = math.ceil(size / len(ranks))
    return max((own_blocks + 1) * size, (blocks - own_blocks + 1) * part)


def _uses(ranges: RangeBytes, rank: int, holders: Holders) -> list[int]:
    """Return, for each shared parameter on the rank, the peak bytes beside the gradients of its local uses."""
    sizes = []
    block_lists = [ranks[rank] for ranks in holders.values() if rank in ranks]
    block = min((blocks[0] for blocks in block_lists), default=0)
    for shared in ranges.shared_parameters:
        local = [layer for layer in shared.layers if rank in holders[layer]]
        if not local or any(ranges.gradients[layer] < shared.bytes for layer in local):
            continue  # the rank has none of its uses, or the parameter is frozen
        other_holders = [holders[layer] for layer in shared.layers if layer not in local]
        peers = {peer for ranks in other_holders for peer, blocks in ranks.items() if block in blocks}
        received = sum(peer in holders[layer] for peer in peers for layer in shared.layers)
        # blocks that this rank packs for other ranks are freed before the sum is made
        sizes.append(shared.bytes * (received + max(len(local) if other_holders else 0, 1)))
    return sizes


# -- The bytes of a rank at every position of its list of actions


@dataclass(frozen=True)
class RankFold:
    """Bytes of one rank in one step. bytes: during each action of its list. between_bytes: when each action begins, and
    after the last; () where not computed. end_bytes: during the exchange of gradients, the vote and the update.
    host_bytes: peak in the host tier. moved_bytes: moved to the host tier in the step; as many come back.
    """

    bytes: tuple[int, ...]
    end_bytes: int
    host_bytes: int = 0
    moved_bytes: int = 0
    between_bytes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The maximum over all positions."""
        return max(self.end_bytes, *self.bytes, 0)


def fold(
    profile: Profile | RangeBytes,
    stages: Sequence[PlanStage],
    units: Units,
    actions: Sequence[Sequence[Action]],
    run: RunShape,
    routes: str = "relay",
    only: int | None = None,
) -> list[RankFold]:
    """Return the bytes of every rank, in order, or only of rank `only`.

    Args:
        profile: with the runs of all layers and all pairs; estimates have the bytes of each action. A planner that
            folds many lists makes its `RangeBytes` once.
        stages, units, routes: of the plan. actions: each rank's list.
        run: its `stage_inputs` are for stages whose `memory` is None; they recompute if their actions do.

    Raises CapslogError naming what the profile lacks, such as the bytes of both halves of split backwards.
    """
    ranges = profile if isinstance(profile, RangeBytes) else RangeBytes.of_ranks(profile, run.recomputes)
    stages = with_memory(stages, run, actions, "cpu" if ranges.one_memory else "accelerator")
    direct = routes == "direct"
    step = StepActions.of(actions, stage_graph(stages, units, routes, ranges.edges if direct else None))
    of_grain = [ranges.of_grain(stage.grain) for stage in stages]
    stage_ranges = [of_grain[i].of_stage(stage.numbers) if direct else of_grain[i] for i, stage in enumerate(stages)]
    handed = _handed(ranges, stages, step, direct)
    sizes = {"F": handed.activations, "B": handed.gradients}
    # the peaks of rows without action bytes include receives posted ahead
    messages = messages_of(step, sizes, ranges.one_memory and ranges.has_actions)
    holders = _holders(stages, units.blocks or 1)
    traffic = _Traffic(step, messages, sizes, handed.together)
    sums = {rank: _RankSum(ranges, row) for rank, row in enumerate(step.rows) if only in (None, rank)}
    calls = {
        number: _StageCalls(stage_ranges[number], traffic, stage, number, units.of_block)
        for number, stage in enumerate(stages)
        if stage.rank in sums
    }
    for stage_calls in calls.values():
        stage_calls.add_to(sums[stage_calls.rank], calls, holders)
    away, elsewhere = ({rank: frozenset[int]() for rank in sums} for _ in range(2))
    for stage in stages:
        if stage.rank in sums:
            away[stage.rank] |= stage.moments_away
            elsewhere[stage.rank] |= stage.moments_elsewhere
    return [total.result(rank, holders, units.of_block, away[rank], elsewhere[rank]) for rank, total in sums.items()]


def _handed(ranges: RangeBytes, stages: Sequence[PlanStage], step: StepActions, direct: bool) -> LinkBytes:
    """Return the bytes over each link, per message of the smaller grain; `together`: only tensors of whole calls."""
    grains, links = step.graph.grains, step.links
    by_grain = {grain: _handed_in_calls(ranges.of_grain(grain), stages, step, direct) for grain in {*grains}}
    smaller = [min(grains[link.above], grains[link.below]) for link in links]
    together = []
    for grain, link_bytes in by_grain.items():
        for size, places in link_bytes.together:
            in_whole_calls = tuple(place for place in places if smaller[place] == grain == grains[links[place].above])
            together += [(size, in_whole_calls)] if in_whole_calls else []
    return LinkBytes(
        [by_grain[grain].activations[number] for number, grain in enumerate(smaller)],
        [by_grain[grain].gradients[number] for number, grain in enumerate(smaller)],
        together,
    )


def _handed_in_calls(ranges: RangeBytes, stages: Sequence[PlanStage], step: StepActions, direct: bool) -> LinkBytes:
    """Return the bytes over each link for calls of the grain of `ranges`."""
    if direct:
        layers = [frozenset(stage.numbers) for stage in stages]
        return LinkBytes.of(
            ranges.tensors, [(layers[link.above], layers[link.below]) for link in step.links], ranges.num_layers
        )
    cuts = [stages[link.below].first for link in step.links]
    gradients = [ranges.gradient[cut] if ranges.carries[cut] else -1 for cut in cuts]
    together = [
        (ranges.crossing[stage.end], tuple(place for place, link in enumerate(step.links) if link.above == number))
        for number, stage in enumerate(stages)
    ]
    return LinkBytes([ranges.crossing[cut] for cut in cuts], gradients, together)


def _holders(stages: Sequence[PlanStage], blocks: int) -> Holders:
    holders: Holders = {}
    for stage in stages:
        for layer in stage.numbers:
            holders.setdefault(layer, {})[stage.rank] = range(blocks) if stage.blocks is None else stage.blocks
    return holders


@dataclass(frozen=True)
class _Traffic:
    """The messages of a step, their bytes by link, and the tensors that use several links (`LinkBytes.together`)."""

    step: StepActions
    messages: Messages
    sizes: Mapping[str, Sequence[int]]
    together: Sequence[tuple[int, tuple[int, ...]]]

    def of(self, stage: int, incoming: bool) -> list[tuple[int, StageLink]]:
        """Return the links into a stage, or out of it, with their numbers."""
        links = enumerate(self.step.links)
        return [(number, link) for number, link in links if stage == (link.below if incoming else link.above)]

    def in_pieces(self, stage: int, link: StageLink) -> bool:
        """Return True where a call of the stage joins several messages of the link, and splits the messages back."""
        grains = self.step.graph.grains
        return min(grains[link.above], grains[link.below]) < grains[stage]


class _RankSum:
    """Events of one rank. `change[p]` counts from the beginning of action p on, `need[p]` only during action p."""

    def __init__(self, ranges: RangeBytes, row: RankActions) -> None:
        self.ranges, self.row = ranges, row
        self.change, self.need, self.host, self.let_go = (np.zeros(len(row) + 1, dtype=np.int64) for _ in range(4))
        self.moved_bytes = 0

    def result(
        self, rank: int, holders: Holders, of_block: int, away: frozenset[int], elsewhere: frozenset[int]
    ) -> RankFold:
        """Return the fold of the events. away, elsewhere: layers with moments in the host tier, or on other ranks."""
        ranges, layers = self.ranges, frozenset(layer for layer, ranks in holders.items() if rank in ranks)
        if not layers:
            return RankFold((), 0)
        resident = ranges.resident(layers, away | elsewhere)
        waiting = sum(ranges.moments.of(layers, layers if ranges.moments_wait else away).values())
        between = resident + np.cumsum(self.change)
        during = between + np.maximum(self.need, self.let_go)
        # each holder of a layer receives the statistics of all holders
        calls = {layer: of_block * sum(map(len, holders[layer].values())) for layer in layers}
        statistics = sum(ranges.statistics(layer, layer + 1) * count for layer, count in calls.items())
        # updated values are sent after all gradients are freed, and a layer's values are no larger than its gradients
        at_end = statistics + max(exchange(ranges, rank, holders), ranges.update(layers, away, elsewhere))
        end = max(int(during[-1]), resident + at_end)
        return RankFold(
            tuple(during[:-1].tolist()),
            end,
            waiting + int(np.cumsum(self.host).max(initial=0)),
            self.moved_bytes + waiting,
            tuple(between.tolist()),
        )


class _StageCalls:
    def __init__(self, ranges: RangeBytes, traffic: _Traffic, stage: PlanStage, number: int, of_block: int) -> None:
        step = traffic.step
        self.ranges, self.traffic, self.number = ranges, traffic, number
        self.of_block = of_block // stage.grain
        self.rank, self.pieces = stage.rank, stage.layers
        self.forwards, self.backwards = step.forwards[number], step.backwards[number]
        self.weights = step.weights[number]
        # position after which a call holds no bytes
        self.ends = np.where(self.weights >= 0, self.weights, self.backwards)
        self.recomputes, self.loads = step.at("R", number), step.at("L", number)
        self.offloads = step.at("O", number)
        self.modes, self.statistics = self._modes(stage), sum(ranges.statistics(*piece) for piece in stage.layers)
        self.inputs, self.outputs = ranges.crossing[stage.first], ranges.crossing[stage.end]
        # bytes of every call: the held part of the outputs, inputs from stages of this rank, and incoming gradients
        self.shared, self.near, self.gradients = (np.zeros(len(self.forwards), dtype=np.int64) for _ in range(3))
        for calls, treatment in self.modes:
            self.shared[calls] = treatment.shared

    def add_to(self, total: _RankSum, stages: Mapping[int, _StageCalls], holders: Holders) -> None:
        """Add all calls, those of one treatment together. stages: number -> calls."""
        self._add_arrivals(total)
        self._add_outputs(total, stages)
        self._add_gradients_sent(total)
        for calls, treatment in self.modes:
            self._add(total, calls, treatment)
        self._add_shared_inputs(total, stages)
        # gradients of parameters: each block makes new ones; a layer with one holder has at most two sums alive
        made = sum(self.ranges.made(*piece) for piece in self.pieces)
        np.add.at(total.change, self.ends[:: self.of_block] + 1, made)
        layers = (layer for piece in self.pieces for layer in range(*piece))
        added = sum(int(self.ranges.gradients[layer]) for layer in layers if len(holders[layer]) == 1)
        np.add.at(total.change, self.ends[self.of_block - 1 :: self.of_block][1:] + 1, -added)

    def _modes(self, stage: PlanStage) -> list[tuple[Numbers, Treatment]]:
        kept_whole = self._kept_whole(self.traffic.step.rows[self.rank])
        facts = [self.recomputes >= 0, self.offloads >= 0, kept_whole, self.weights >= 0]
        kinds = sum(fact.astype(np.int64) << place for place, fact in enumerate(facts))
        layers = stage.layers, stage.memory or ()

        def treatment(kind: int) -> Treatment:
            how = (bool(kind >> place & 1) for place in range(len(facts)))
            return self.ranges.once((treated, *layers, kind), lambda: treated(self.ranges, *layers, *how))

        return [(np.flatnonzero(kinds == kind), treatment(kind)) for kind in np.unique(kinds).tolist()]

    def _kept_whole(self, row: RankActions) -> NDArray[np.bool_]:
        """Return call -> True where it keeps its whole graph: `schedules.backwards_at_once`, computed on arrays."""
        selected = row.where("FBIWR", self.number)
        kinds, calls = row.kinds[selected], row.calls[selected]
        backward = (kinds[1:] == ord("B")) | (kinds[1:] == ord("I"))  # np.isin takes several times as long
        followed = (kinds[:-1] == ord("F")) & backward & (calls[:-1] == calls[1:])
        kept = np.zeros(len(self.forwards), dtype=np.bool_)
        kept[calls[:-1][followed]] = True
        return kept & (self.offloads < 0)

    def _add(self, total: _RankSum, calls: Numbers, treatment: Treatment) -> None:
        change = total.change
        forward, backward, recompute = self.forwards[calls], self.backwards[calls], self.recomputes[calls]
        rerun = recompute >= 0
        loaded = self._add_offloads(total, calls, treatment)
        # F: its input is already counted; afterwards the call's held bytes remain
        growth, parts = (
            treatment.held - self.inputs + self.near[calls] + self.statistics,
            self._in_pieces("F", False)[calls],
        )
        parting = np.where(parts > 0, growth + self.outputs - treatment.shared + parts, 0)
        total.need[forward] = np.maximum.reduce(
            [np.full(len(calls), treatment.forward + self.statistics), self._joined_inputs()[calls], parting]
        )
        np.add.at(change, forward + 1, growth)
        # R
        np.add.at(change, recompute[rerun], np.where(loaded, 0, treatment.host)[rerun])
        total.need[recompute[rerun]] = treatment.recompute
        np.add.at(change, recompute[rerun] + 1, treatment.grown)
        # B, or I
        held = (
            treatment.held
            - treatment.away
            + treatment.host
            + np.where(rerun, treatment.grown, 0)
            + self.gradients[calls]
        )
        np.add.at(change, backward, np.where(loaded | rerun, 0, treatment.host))
        makes = calls % self.of_block == 0
        most: Numbers | int = np.where(makes, treatment.first_backward, treatment.backward)
        made = sum(self.ranges.made(*piece) for piece in self.pieces) * makes
        parts = self._in_pieces("B", True)[calls]
        parting = np.where(parts > 0, 2 * parts + made, 0)
        if treatment.halves is not None:
            most, weights = treatment.halves.inputs, self.weights[calls]
            parting += treatment.halves.between - made
            np.add.at(change, backward + 1, treatment.halves.between)
            most_then = np.where(makes, treatment.halves.first_weights, treatment.halves.weights)
            total.need[weights] = np.maximum(0, most_then - treatment.halves.between)
            np.add.at(change, weights + 1, -treatment.halves.between)
        total.need[backward] = np.maximum.reduce([self._in_pieces("B", False)[calls], most - held, parting - held])
        np.add.at(change, backward + 1, -held)

    def _add_offloads(self, total: _RankSum, calls: Numbers, treatment: Treatment) -> NDArray[np.bool_]:
        """Add O and L; return call -> True where it has an L. O's source is freed when the rank waits for the copy."""
        offloads, loads, row = self.offloads[calls], self.loads[calls], total.row
        offloaded, loaded = offloads >= 0, loads >= 0
        if treatment.host:
            returns = np.where(self.recomputes[calls] >= 0, self.recomputes[calls], self.backwards[calls])
            returns = np.where(loaded, loads, returns)
            work = np.append(row.where("FBIWR"), len(row) - 1)
            waited = work[np.searchsorted(work[:-1], offloads[offloaded], side="right")] + 1
            np.add.at(total.change, np.minimum(waited, returns[offloaded]), -treatment.away)
            np.add.at(total.change, loads[loaded], treatment.host)
            np.add.at(total.host, np.where(offloaded, offloads, self.forwards[calls]), treatment.host)
            np.add.at(total.host, self.ends[calls] + 1, -treatment.host)
            total.moved_bytes += treatment.host * len(calls)
        return loaded

    def _add_arrivals(self, total: _RankSum) -> None:
        """Add the tensors that F and B consume, from the moment when they are received or, for data, loaded."""
        inputs = np.full(len(self.forwards), self.inputs)
        for incoming, kind in ((True, "F"), (False, "B")):
            for number, link in self.traffic.of(self.number, incoming):
                size, local = max(0, self.traffic.sizes[kind][number]), self.traffic.step.is_local(link)
                calls, begun = (link.below_calls if incoming else link.above_calls), self.traffic.messages.begins[kind]
                pieces = self.traffic.in_pieces(self.number, link)
                if incoming:
                    # pieces from this rank are freed when they are joined
                    np.subtract.at(inputs, calls, size * (not (local and pieces)))
                    np.add.at(self.near, calls, size * (local and not pieces))
                else:
                    np.add.at(self.gradients, calls, size)
                if not local:
                    np.add.at(total.change, begun[number], size)
        np.add.at(total.change, self.forwards, inputs)

    def _in_pieces(self, kind: str, incoming: bool) -> Numbers:
        """Return call -> bytes of tensors that it joins or splits, during which both forms are in memory. kind: of the
        messages. incoming: over the links into the stage, else over the links out of it.
        """
        sizes = np.zeros(len(self.forwards), dtype=np.int64)
        for number, link in self.traffic.of(self.number, incoming):
            if self.traffic.in_pieces(self.number, link):
                calls = link.below_calls if incoming else link.above_calls
                np.add.at(sizes, calls, max(0, self.traffic.sizes[kind][number]))
        return sizes

    def _joined_inputs(self) -> Numbers:
        """Return call -> bytes that F joins at once: pieces from other stages, or, before these, the loaded data."""
        pieces = self._in_pieces("F", True)
        if self.traffic.step.graph.grains[self.number] == 1 or not self.ranges.one_memory:
            return pieces
        loaded = np.full(len(self.forwards), self.inputs)
        for number, link in self.traffic.of(self.number, incoming=True):
            np.subtract.at(loaded, link.below_calls, self.traffic.sizes["F"][number])
        return np.maximum(pieces, loaded)

    def _add_outputs(self, total: _RankSum, stages: Mapping[int, _StageCalls]) -> None:
        """Add the outputs, from F until this rank's stages have taken them and the peers have confirmed them."""
        sent, links = self.traffic.messages.ends["F"], self.traffic.step.links
        for size, numbers in self.traffic.together:
            if not numbers or links[numbers[0]].above != self.number:
                continue
            shared = np.maximum(0, self.shared - (self.outputs - size))
            confirmed, taken = (np.full(len(self.forwards), -1) for _ in range(2))
            for number in numbers:
                link = links[number]
                if self.traffic.step.is_local(link):
                    joined = self.traffic.in_pieces(link.below, link)
                    taken_at = stages[link.below].forwards[link.below_calls] + (not joined)
                    np.maximum.at(taken, link.above_calls, taken_at)
                elif self.ranges.one_memory:
                    np.maximum.at(confirmed, link.above_calls, sent[number])
            calls = np.flatnonzero(np.maximum(confirmed, taken) >= 0)
            confirmed, taken, shared = confirmed[calls], taken[calls], shared[calls]
            ran, last = self.recomputes[calls], np.maximum(confirmed, taken)
            # tensors that a recomputation frees may still be held by a message
            longer = (ran >= 0) & (ran < last) & (confirmed >= 0)
            np.add.at(total.change, self.forwards[calls] + 1, size - shared)
            np.add.at(total.change, ran[longer] + 1, shared[longer])
            remaining = size - np.where(longer, 0, shared)
            np.add.at(total.change, last, -remaining)
            np.add.at(total.let_go, last[confirmed >= taken], remaining[confirmed >= taken])
        for number, link in self.traffic.of(self.number, incoming=False):
            size, local = self.traffic.sizes["F"][number], self.traffic.step.is_local(link)
            if self.traffic.in_pieces(self.number, link) and (local or self.ranges.one_memory):
                end = stages[link.below].forwards[link.below_calls] + 1 if local else sent[number]
                np.add.at(total.change, self.forwards[link.above_calls] + 1, size)
                np.add.at(total.change, end, -size)
                np.add.at(total.let_go, end, 0 if local else size)

    def _add_shared_inputs(self, total: _RankSum, stages: Mapping[int, _StageCalls]) -> None:
        """Count inputs only once where the stage before is on this rank and keeps them too."""
        kept_before = np.zeros(len(self.forwards), dtype=np.int64)
        for number, link in self.traffic.of(self.number, incoming=True):
            grains = self.traffic.step.graph.grains
            if self.traffic.step.is_local(link) and grains[link.above] == grains[link.below]:
                above, size = stages[link.above], self.traffic.sizes["F"][number]
                part = np.maximum(0, above.shared[link.above_calls] - (above.outputs - size))
                np.add.at(kept_before, link.below_calls, part)
        for calls, treatment in self.modes:
            overlapping = calls[kept_before[calls] > 0]
            kept = kept_before[overlapping]
            both, then = (
                np.clip(kept + input_kept - self.inputs, 0, kept)
                for input_kept in (treatment.input_kept, treatment.input_kept_then)
            )
            recompute = self.recomputes[overlapping]
            rerun = (recompute >= 0) & (treatment.input_kept != treatment.input_kept_then)
            # the stage before keeps its part when this stage frees its inputs
            needed = total.need[self.forwards[overlapping]]
            total.need[self.forwards[overlapping]] = np.maximum(
                needed, self.statistics + treatment.behind + kept - both
            )
            np.add.at(total.change, self.forwards[overlapping] + 1, -both)
            np.add.at(total.change, recompute[rerun] + 1, (both - then)[rerun])
            np.add.at(total.change, self.backwards[overlapping] + 1, np.where(rerun, then, both))

    def _add_gradients_sent(self, total: _RankSum) -> None:
        """Add the gradients of the inputs, until the stage before takes them, or confirms them from another rank."""
        for number, link in self.traffic.of(self.number, incoming=True):
            size = max(0, self.traffic.sizes["B"][number])
            after = self.backwards[link.below_calls] + 1
            if self.traffic.step.is_local(link):
                np.add.at(total.change, after, size)
            elif size and self.ranges.one_memory:
                confirmed = self.traffic.messages.ends["B"][number]
                np.add.at(total.change, after, size)
                np.add.at(total.change, confirmed, -size)
                np.add.at(total.let_go, confirmed, size)


# -- Bytes of a stage at every moment of a step, from the timed actions of a schedule.
#
#     bytes(t) = static + live graphs * saved + waiting inputs * input + working bytes of the running action
#
# This is the equation of `memory.inflight` over time, for stages that are kept or recomputed as a whole, less the
# outputs sent ahead, which are in device memory only on the CPU. A graph is held from the F or R that makes it to its
# B, an input until its R. While an action makes or consumes a graph, that graph counts as `working_bytes`, so that a
# stage with one graph peaks at exactly the bytes of its memory model. Bytes change when actions begin and end.


Course: TypeAlias = list[tuple[float, int]]
"""(seconds since the step's begin, bytes from then on), in time order; two entries may have equal times."""


@dataclass(frozen=True)
class StageMemory:
    """Parts of one stage's bytes, for one microbatch. static_bytes: parameters, gradients, optimizer state and buffers.
    saved_bytes: a waiting graph. working_bytes: peak, less `static_bytes`, while a graph is made or consumed, with that
    graph. bare_bytes: peak of a forward without a graph, less `static_bytes`. input_bytes: an input that waits for its
    recomputation; 0 where it waits on the host.
    """

    static_bytes: int
    saved_bytes: int
    working_bytes: int
    bare_bytes: int
    input_bytes: int = 0


def stage_memory(profile: Profile, stages: Sequence[tuple[int, int]], run: RunShape) -> list[StageMemory] | str:
    """Return the parts of the bytes of each stage of layers (first, end), or a sentence naming what the profile lacks.
    They come from the schedule's memory model where the profile has the runs of single layers and pairs; otherwise they
    are sums over the layers, with the additive model's peak for one graph.
    """
    layers = profile.layers
    if any(layer.static_bytes is None or layer.saved_bytes is None for layer in layers):
        return "the profile has no static_bytes or saved_bytes of every layer"
    on_device = run.stage_inputs == "device" or profile.conditions.get("device") == "cpu"
    costs: inflight.InflightCosts | None
    try:
        costs = inflight.stage_costs(run.schedule, profile, run)
    except CapslogError:
        costs = None
    sums = additive.stage_costs(profile, run)
    memories = []
    for first, end in stages:
        static = sum(layer.static_bytes or 0 for layer in layers[first:end])
        if costs is None:
            peak, saved = sums.stage_bytes(first, end), sum(layer.saved_bytes or 0 for layer in layers[first:end])
            inputs = (layers[first - 1].boundary_bytes or 0) if first else 0
        else:
            peak, saved = int(costs.range_bytes[first, end]), int(costs.saved[first, end])
            inputs = int(costs.inputs[first, end])
        working = max(0, peak - static)
        largest = max(layer.isolated_bytes - (layer.static_bytes or 0) for layer in layers[first:end])
        memories.append(StageMemory(static, saved, working, min(working, max(0, largest)), inputs if on_device else 0))
    return memories


def memory_courses(
    timed: Iterable[Iterable[TimedAction]], schedule: Schedule, stages: Sequence[StageMemory]
) -> list[Course]:
    """Return the bytes of every stage over one step. timed: each rank's actions in order. schedule: the same actions,
    from which follows which forwards keep their graph.
    """
    keeping = graph_keeping_forwards(schedule)
    courses = []
    for stage, parts in enumerate(stages):
        actions = [timed_action for row in timed for timed_action in row if timed_action.action.stage == stage]
        courses.append(_course(actions, keeping, parts))
    return courses


def fold_course(timed: Sequence[TimedAction], fold: RankFold) -> Course:
    """Return the bytes of a rank over one step, under any plan: during each action, and between actions. timed: the
    actions of the rank's list in order, then its updates. `fold.end_bytes` counts from the first update on, without
    updates from the last action's end. fold: of that list.
    """
    course, ended = [(0.0, fold.between_bytes[0])], 0.0
    for timed_action, during, after in zip(timed, fold.bytes, fold.between_bytes[1:], strict=False):
        if timed_action.start_seconds == ended and len(course) > 1:
            course.pop()  # the bytes between two actions without a pause
        course += [(timed_action.start_seconds, during), (timed_action.end_seconds, after)]
        ended = timed_action.end_seconds
    updates = timed[len(fold.bytes) :]
    return [*course, (updates[0].start_seconds if updates else ended, fold.end_bytes)]


def peak_of(course: Course) -> int:
    """Return the peak bytes of a course."""
    return max(size for _, size in course)


def _course(actions: Sequence[TimedAction], keeping: set[tuple[int, int]], parts: StageMemory) -> Course:
    graphs: set[int] = set()
    inputs: set[int] = set()
    course: Course = [(0.0, parts.static_bytes)]
    ended: float | None = None  # when the last action ended, where it took any time

    def held() -> int:
        return parts.static_bytes + len(graphs) * parts.saved_bytes + len(inputs) * parts.input_bytes

    def note(seconds: float, size: int, after_end: bool = False) -> None:
        if after_end and len(course) > 1 and course[-1][0] == seconds:
            course.pop()  # the bytes between two actions without a pause
        if size != course[-1][1]:
            course.append((seconds, size))

    for timed_action in actions:
        kind, microbatch = timed_action.action.kind, timed_action.action.microbatch
        during = held()
        if microbatch is not None:
            if kind == "R" or (kind == "F" and (timed_action.action.stage, microbatch) in keeping):
                inputs.discard(microbatch)
                during = held() + parts.working_bytes
                graphs.add(microbatch)
            elif kind == "F":
                during = held() + parts.bare_bytes
                inputs.add(microbatch)
            elif kind in "BIW":
                graphs.discard(microbatch)
                during = held() + parts.working_bytes
                if kind == "I":
                    graphs.add(microbatch)
        note(timed_action.start_seconds, during, after_end=timed_action.start_seconds == ended)
        note(timed_action.end_seconds, held())
        ended = timed_action.end_seconds if timed_action.end_seconds > timed_action.start_seconds else None
    return course
