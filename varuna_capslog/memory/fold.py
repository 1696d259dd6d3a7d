"""The bytes of a rank at every position of its list of actions: memory model `ranks`.

    bytes(rank, p) = what is resident: parameters, moments, buffers
                   + gradients of parameters, and blocks of them that wait for each other or for the exchange
                   + for every call in flight at p what it holds (`treatment`), and the statistics that they leave
                   + tensors on their way: received, posted ahead, sent and not yet confirmed (`schedules/traffic`)
                   + what the action at p needs besides

A rank carries out one list, so its peak depends on the list alone and not on time. The models of
`inflight` are this sum in closed form for one pipeline of one stage per rank. It serves every full plan: several stages
on a rank, unequal blocks, memory intervals, given lists. What it does not count: what a data loader holds.

The sum is one array per rank: every event adds to the position from which it counts, and a running sum gives all
positions at once, so that ten thousand actions take some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.exchange import Holders, exchange
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.stage_tensors import Handed
from varuna_capslog.memory.treatment import Treatment, treated
from varuna_capslog.plans.parts import PlanStage, Units, with_memory
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Action, RunShape
from varuna_capslog.schedules.traffic import Messages, Numbers, RankActions, StageLink, StepActions, messages_of

__all__ = ["RankFold", "fold"]


@dataclass(frozen=True)
class RankFold:
    """One rank's bytes in one step.

    bytes: while each action of its list is at work.
    end_bytes: after the last one: the exchange of gradients, the vote and the update.
    host_bytes: the most in the host tier. moved_bytes: to the host tier in the whole step; as many come back.
    between_bytes: when each action begins, and when the last one has ended; () where it is not told.
    """

    bytes: tuple[int, ...]
    end_bytes: int
    host_bytes: int = 0
    moved_bytes: int = 0
    between_bytes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most of all positions."""
        return max(self.end_bytes, *self.bytes, 0)

    @property
    def peak_position(self) -> int:
        """The first position of the peak; the length of the list for the end of the step."""
        return (*self.bytes, self.end_bytes).index(self.peak_bytes) if self.bytes else 0


def fold(
    profile: Profile | RangeBytes,
    stages: Sequence[PlanStage],
    units: Units,
    actions: Sequence[Sequence[Action]],
    run: RunShape,
    routes: str = "relay",
    only: int | None = None,
) -> list[RankFold]:
    """The bytes of every rank, or of one.

    Args:
        profile: with the runs of all layers and all pairs; those of an estimate say what each action takes. A search
            that folds many lists makes its `RangeBytes` once.
        stages, units, routes: of the plan.
        actions: each rank's list.
        run: where the inputs of stages wait whose `memory` is None; their list says whether they recompute.
        only: the rank that is asked for; default: all, in their order.

    Raises CapslogError naming what the profile lacks; for backwards in two halves it must say what each of them takes.
    """
    ranges = profile if isinstance(profile, RangeBytes) else RangeBytes(profile, RANKS, run.recomputes)
    stages = with_memory(stages, run, actions, "cpu" if ranges.one_memory else "accelerator")
    direct = routes == "direct"
    step = StepActions.of(actions, stage_graph(stages, units, routes, ranges.edges if direct else None))
    of_grain = [ranges.of_grain(stage.grain) for stage in stages]
    own = [of_grain[i].of_stage(stage.numbers) if direct else of_grain[i] for i, stage in enumerate(stages)]
    handed = _handed(ranges, stages, step, direct)
    sizes = {"F": handed.activations, "B": handed.gradients}
    # rows that tell no actions were taken with receives posted ahead, which are in their peaks
    messages = messages_of(step, sizes, ranges.one_memory and ranges.told)
    holders = _holders(stages, units.blocks or 1)
    traffic = _Traffic(step, messages, sizes, handed.together)
    sums = {rank: _RankSum(ranges, row) for rank, row in enumerate(step.rows) if only in (None, rank)}
    calls = {
        number: _StageCalls(own[number], traffic, stage, number, units.of_block)
        for number, stage in enumerate(stages)
        if stage.rank in sums
    }
    for one in calls.values():
        one.add_to(sums[one.rank], calls, holders)
    away, elsewhere = ({rank: frozenset[int]() for rank in sums} for _ in range(2))
    for stage in stages:
        if stage.rank in sums:
            away[stage.rank] |= stage.moments_away
            elsewhere[stage.rank] |= stage.moments_elsewhere
    return [total.result(rank, holders, units.of_block, away[rank], elsewhere[rank]) for rank, total in sums.items()]


def _handed(ranges: RangeBytes, stages: Sequence[PlanStage], step: StepActions, direct: bool) -> Handed:
    """What goes over each link, in messages of the smaller of the two calls; together: what goes in whole calls."""
    grains, links = step.graph.grains, step.links
    found = {grain: _handed_in_calls(ranges.of_grain(grain), stages, step, direct) for grain in {*grains}}
    smaller = [min(grains[link.above], grains[link.below]) for link in links]
    together = []
    for grain, one in found.items():
        for size, places in one.together:
            whole = tuple(place for place in places if smaller[place] == grain == grains[links[place].above])
            together += [(size, whole)] if whole else []
    return Handed(
        [found[grain].activations[number] for number, grain in enumerate(smaller)],
        [found[grain].gradients[number] for number, grain in enumerate(smaller)],
        together,
    )


def _handed_in_calls(ranges: RangeBytes, stages: Sequence[PlanStage], step: StepActions, direct: bool) -> Handed:
    """What would go over each link in calls of one size."""
    if direct:
        layers = [frozenset(stage.numbers) for stage in stages]
        return Handed.of(
            ranges.tensors, [(layers[link.above], layers[link.below]) for link in step.links], ranges.num_layers
        )
    cuts = [stages[link.below].first for link in step.links]
    gradients = [ranges.gradient[cut] if ranges.carries[cut] else -1 for cut in cuts]
    together = [
        (ranges.crossing[stage.end], tuple(place for place, link in enumerate(step.links) if link.above == number))
        for number, stage in enumerate(stages)
    ]
    return Handed([ranges.crossing[cut] for cut in cuts], gradients, together)


def _holders(stages: Sequence[PlanStage], blocks: int) -> Holders:
    found: Holders = {}
    for stage in stages:
        for layer in stage.numbers:
            found.setdefault(layer, {})[stage.rank] = range(blocks) if stage.blocks is None else stage.blocks
    return found


@dataclass(frozen=True)
class _Traffic:
    """The messages of a step, their bytes by link, and what goes over the same links (`Handed.together`)."""

    step: StepActions
    messages: Messages
    sizes: Mapping[str, Sequence[int]]
    together: Sequence[tuple[int, tuple[int, ...]]]

    def of(self, stage: int, incoming: bool) -> list[tuple[int, StageLink]]:
        """The links into a stage, or out of it, with their numbers."""
        links = enumerate(self.step.links)
        return [(number, link) for number, link in links if stage == (link.below if incoming else link.above)]

    def in_pieces(self, stage: int, link: StageLink) -> bool:
        """Whether a call of the stage joins several messages of the link, and parts what it hands back."""
        grains = self.step.graph.grains
        return min(grains[link.above], grains[link.below]) < grains[stage]


class _RankSum:
    """The events of one rank: `change[p]` counts from the begin of action p on, `need[p]` while it is at work."""

    def __init__(self, ranges: RangeBytes, row: RankActions) -> None:
        self.ranges, self.row = ranges, row
        self.change, self.need, self.host, self.let_go = (np.zeros(len(row) + 1, dtype=np.int64) for _ in range(4))
        self.moved_bytes = 0

    def result(
        self, rank: int, holders: Holders, of_block: int, away: frozenset[int], elsewhere: frozenset[int]
    ) -> RankFold:
        """The fold of the events; away: the layers whose moments wait in the host tier, elsewhere: those of which
        another rank keeps them.
        """
        ranges, layers = self.ranges, frozenset(layer for layer, ranks in holders.items() if rank in ranks)
        if not layers:
            return RankFold((), 0)
        resident = ranges.resident(layers, away | elsewhere)
        waiting = sum(ranges.moments.of(layers, layers if ranges.moments_wait else away).values())
        between = resident + np.cumsum(self.change)
        during = between + np.maximum(self.need, self.let_go)
        # all holders of a layer get the statistics of all
        calls = {layer: of_block * sum(map(len, holders[layer].values())) for layer in layers}
        statistics = sum(ranges.statistics(layer, layer + 1) * count for layer, count in calls.items())
        # updated values go to other ranks when all gradients are gone, and one layer's are no more than its gradients
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
    """The calls of one stage, whose events go to its rank."""

    def __init__(self, ranges: RangeBytes, traffic: _Traffic, stage: PlanStage, number: int, of_block: int) -> None:
        step = traffic.step
        self.ranges, self.traffic, self.number = ranges, traffic, number
        self.of_block = of_block // stage.grain
        self.rank, self.pieces = stage.rank, stage.layers
        self.forwards, self.backwards = step.forwards[number], step.backwards[number]
        self.weights = step.weights[number]
        # where the last of a call is let go of
        self.ends = np.where(self.weights >= 0, self.weights, self.backwards)
        self.recomputes, self.loads = step.at("R", number), step.at("L", number)
        self.offloads = step.at("O", number)
        self.modes, self.statistics = self._modes(stage), sum(ranges.statistics(*piece) for piece in stage.layers)
        self.inputs, self.outputs = ranges.crossing[stage.first], ranges.crossing[stage.end]
        # of every call: the part of the outputs that is held, what enters from stages of this rank, and the gradients
        # that come back
        self.shared, self.near, self.gradients = (np.zeros(len(self.forwards), dtype=np.int64) for _ in range(3))
        for calls, one in self.modes:
            self.shared[calls] = one.shared

    def add_to(self, total: _RankSum, stages: Mapping[int, _StageCalls], holders: Holders) -> None:
        """Add all calls, those that are treated alike together.

        stages: number -> those of the rank. holders: layer -> its ranks.
        """
        self._add_arrivals(total)
        self._add_outputs(total, stages)
        self._add_gradients_sent(total)
        for calls, one in self.modes:
            self._add(total, calls, one)
        self._add_shared_inputs(total, stages)
        # gradients of parameters: a block makes them anew; of a layer with one holder two sums are alive at most
        made = sum(self.ranges.made(*piece) for piece in self.pieces)
        np.add.at(total.change, self.ends[:: self.of_block] + 1, made)
        layers = (layer for piece in self.pieces for layer in range(*piece))
        added = sum(int(self.ranges.gradients[layer]) for layer in layers if len(holders[layer]) == 1)
        np.add.at(total.change, self.ends[self.of_block - 1 :: self.of_block][1:] + 1, -added)

    def _modes(self, stage: PlanStage) -> list[tuple[Numbers, Treatment]]:
        """The calls that are treated alike, and how."""
        whole = self._kept_whole(self.traffic.step.rows[self.rank])
        facts = [self.recomputes >= 0, self.offloads >= 0, whole, self.weights >= 0]
        kinds = sum(fact.astype(np.int64) << place for place, fact in enumerate(facts))
        layers = self.ranges, stage.layers, stage.memory or ()
        return [
            (np.flatnonzero(kinds == kind), treated(*layers, *(bool(kind >> place & 1) for place in range(len(facts)))))
            for kind in np.unique(kinds).tolist()
        ]

    def _kept_whole(self, row: RankActions) -> NDArray[np.bool_]:
        """call -> whether it keeps all: `schedules.backwards_at_once`, in arrays."""
        own = row.where("FBIWR", self.number)
        kinds, calls = row.kinds[own], row.calls[own]
        followed = (kinds[:-1] == ord("F")) & np.isin(kinds[1:], [ord("B"), ord("I")]) & (calls[:-1] == calls[1:])
        found = np.zeros(len(self.forwards), dtype=np.bool_)
        found[calls[:-1][followed]] = True
        return found & (self.offloads < 0)

    def _add(self, total: _RankSum, calls: Numbers, one: Treatment) -> None:
        change = total.change
        forward, backward, again = self.forwards[calls], self.backwards[calls], self.recomputes[calls]
        rerun = again >= 0
        loaded = self._away(total, calls, one)
        # F: its input is there; it leaves what the call holds
        left, parts = one.held - self.inputs + self.near[calls] + self.statistics, self._in_pieces("F", False)[calls]
        parting = np.where(parts > 0, left + self.outputs - one.shared + parts, 0)
        total.need[forward] = np.maximum.reduce(
            [np.full(len(calls), one.forward + self.statistics), self._joined_inputs()[calls], parting]
        )
        np.add.at(change, forward + 1, left)
        # R
        np.add.at(change, again[rerun], np.where(loaded, 0, one.host)[rerun])
        total.need[again[rerun]] = one.recompute
        np.add.at(change, again[rerun] + 1, one.grown)
        # B, or I
        held = one.held - one.away + one.host + np.where(rerun, one.grown, 0) + self.gradients[calls]
        np.add.at(change, backward, np.where(loaded | rerun, 0, one.host))
        makes = calls % self.of_block == 0
        most: Numbers | int = np.where(makes, one.first_backward, one.backward)
        made = sum(self.ranges.made(*piece) for piece in self.pieces) * makes
        parts = self._in_pieces("B", True)[calls]
        parting = np.where(parts > 0, 2 * parts + made, 0)
        if one.halves is not None:
            most, weights = one.halves.inputs, self.weights[calls]
            parting += one.halves.between - made
            np.add.at(change, backward + 1, one.halves.between)
            most_then = np.where(makes, one.halves.first_weights, one.halves.weights)
            total.need[weights] = np.maximum(0, most_then - one.halves.between)
            np.add.at(change, weights + 1, -one.halves.between)
        total.need[backward] = np.maximum.reduce([self._in_pieces("B", False)[calls], most - held, parting - held])
        np.add.at(change, backward + 1, -held)

    def _away(self, total: _RankSum, calls: Numbers, one: Treatment) -> NDArray[np.bool_]:
        """O and L; which calls have an L. What an O takes stays until its copy is waited for."""
        offloads, loads, row = self.offloads[calls], self.loads[calls], total.row
        there, loaded = offloads >= 0, loads >= 0
        if one.host:
            returns = np.where(self.recomputes[calls] >= 0, self.recomputes[calls], self.backwards[calls])
            returns = np.where(loaded, loads, returns)
            work = np.append(row.where("FBIWR"), len(row) - 1)
            waited = work[np.searchsorted(work[:-1], offloads[there], side="right")] + 1
            np.add.at(total.change, np.minimum(waited, returns[there]), -one.away)
            np.add.at(total.change, loads[loaded], one.host)
            np.add.at(total.host, np.where(there, offloads, self.forwards[calls]), one.host)
            np.add.at(total.host, self.ends[calls] + 1, -one.host)
            total.moved_bytes += one.host * len(calls)
        return loaded

    def _add_arrivals(self, total: _RankSum) -> None:
        """What F takes and what B does: from when it was received on, or the data loaded."""
        inputs = np.full(len(self.forwards), self.inputs)
        for incoming, kind in ((True, "F"), (False, "B")):
            for number, link in self.traffic.of(self.number, incoming):
                size, local = max(0, self.traffic.sizes[kind][number]), self.traffic.step.is_local(link)
                calls, begun = (link.below_calls if incoming else link.above_calls), self.traffic.messages.begins[kind]
                pieces = self.traffic.in_pieces(self.number, link)
                if incoming:
                    # pieces from this rank are let go of when they are joined
                    np.subtract.at(inputs, calls, size * (not (local and pieces)))
                    np.add.at(self.near, calls, size * (local and not pieces))
                else:
                    np.add.at(self.gradients, calls, size)
                if not local:
                    np.add.at(total.change, begun[number], size)
        np.add.at(total.change, self.forwards, inputs)

    def _in_pieces(self, kind: str, incoming: bool) -> Numbers:
        """call -> bytes that it joins, or parts into tensors of their own; while it does, the pieces and the whole are
        there.

        kind: of the messages. incoming: over the links into the stage, else over those out of it.
        """
        found = np.zeros(len(self.forwards), dtype=np.int64)
        for number, link in self.traffic.of(self.number, incoming):
            if self.traffic.in_pieces(self.number, link):
                calls = link.below_calls if incoming else link.above_calls
                np.add.at(found, calls, max(0, self.traffic.sizes[kind][number]))
        return found

    def _joined_inputs(self) -> Numbers:
        """call -> bytes that F joins at once: pieces from other stages, or before them what was loaded."""
        pieces = self._in_pieces("F", True)
        if self.traffic.step.graph.grains[self.number] == 1 or not self.ranges.one_memory:
            return pieces
        loaded = np.full(len(self.forwards), self.inputs)
        for number, link in self.traffic.of(self.number, incoming=True):
            np.subtract.at(loaded, link.below_calls, self.traffic.sizes["F"][number])
        return np.maximum(pieces, loaded)

    def _add_outputs(self, total: _RankSum, stages: Mapping[int, _StageCalls]) -> None:
        """The outputs, from F until the stages here have taken them and it is sure that the peers have them."""
        sent, links = self.traffic.messages.ends["F"], self.traffic.step.links
        for size, numbers in self.traffic.together:
            if not numbers or links[numbers[0]].above != self.number:
                continue
            shared = np.maximum(0, self.shared - (self.outputs - size))
            gone, taken = (np.full(len(self.forwards), -1) for _ in range(2))
            for number in numbers:
                link = links[number]
                if self.traffic.step.is_local(link):
                    joined = self.traffic.in_pieces(link.below, link)
                    there = stages[link.below].forwards[link.below_calls] + (not joined)
                    np.maximum.at(taken, link.above_calls, there)
                elif self.ranges.one_memory:
                    np.maximum.at(gone, link.above_calls, sent[number])
            calls = np.flatnonzero(np.maximum(gone, taken) >= 0)
            gone, taken, shared = gone[calls], taken[calls], shared[calls]
            ran, last = self.recomputes[calls], np.maximum(gone, taken)
            # what a recomputation lets go, a message may hold longer
            longer = (ran >= 0) & (ran < last) & (gone >= 0)
            np.add.at(total.change, self.forwards[calls] + 1, size - shared)
            np.add.at(total.change, ran[longer] + 1, shared[longer])
            left = size - np.where(longer, 0, shared)
            np.add.at(total.change, last, -left)
            np.add.at(total.let_go, last[gone >= taken], left[gone >= taken])
        for number, link in self.traffic.of(self.number, incoming=False):
            size, local = self.traffic.sizes["F"][number], self.traffic.step.is_local(link)
            if self.traffic.in_pieces(self.number, link) and (local or self.ranges.one_memory):
                end = stages[link.below].forwards[link.below_calls] + 1 if local else sent[number]
                np.add.at(total.change, self.forwards[link.above_calls] + 1, size)
                np.add.at(total.change, end, -size)
                np.add.at(total.let_go, end, 0 if local else size)

    def _add_shared_inputs(self, total: _RankSum, stages: Mapping[int, _StageCalls]) -> None:
        """Inputs from stages of this rank that hold some of them themselves: what both keep counts once."""
        kept_before = np.zeros(len(self.forwards), dtype=np.int64)
        for number, link in self.traffic.of(self.number, incoming=True):
            grains = self.traffic.step.graph.grains
            if self.traffic.step.is_local(link) and grains[link.above] == grains[link.below]:
                other, size = stages[link.above], self.traffic.sizes["F"][number]
                part = np.maximum(0, other.shared[link.above_calls] - (other.outputs - size))
                np.add.at(kept_before, link.below_calls, part)
        for calls, one in self.modes:
            own = calls[kept_before[calls] > 0]
            kept = kept_before[own]
            both, then = (np.clip(kept + here - self.inputs, 0, kept) for here in (one.input_kept, one.input_kept_then))
            again = self.recomputes[own]
            rerun = (again >= 0) & (one.input_kept != one.input_kept_then)
            # the stage before keeps its part when this stage lets its inputs go
            needed = total.need[self.forwards[own]]
            total.need[self.forwards[own]] = np.maximum(needed, self.statistics + one.behind + kept - both)
            np.add.at(total.change, self.forwards[own] + 1, -both)
            np.add.at(total.change, again[rerun] + 1, (both - then)[rerun])
            np.add.at(total.change, self.backwards[own] + 1, np.where(rerun, then, both))

    def _add_gradients_sent(self, total: _RankSum) -> None:
        """The gradients of the inputs, until the stage before takes them or has surely received them."""
        for number, link in self.traffic.of(self.number, incoming=True):
            size = max(0, self.traffic.sizes["B"][number])
            after = self.backwards[link.below_calls] + 1
            if self.traffic.step.is_local(link):
                np.add.at(total.change, after, size)
            elif size and self.ranges.one_memory:
                gone = self.traffic.messages.ends["B"][number]
                np.add.at(total.change, after, size)
                np.add.at(total.change, gone, -size)
                np.add.at(total.let_go, gone, size)
