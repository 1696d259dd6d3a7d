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
from varuna_capslog.memory.treatment import Treatment, treated
from varuna_capslog.plans.parts import PlanStage, Units, with_memory
from varuna_capslog.plans.rules import paths_of
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Action, RunShape
from varuna_capslog.schedules.traffic import Messages, Numbers, RankActions, StepActions, messages_of

__all__ = ["RankFold", "fold"]


@dataclass(frozen=True)
class RankFold:
    """One rank's bytes in one step.

    bytes: while each action of its list is at work.
    end_bytes: after the last one: the exchange of gradients, the vote and the update.
    host_bytes: the most in the host tier.
    """

    bytes: tuple[int, ...]
    end_bytes: int
    host_bytes: int = 0

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
    only: int | None = None,
) -> list[RankFold]:
    """The bytes of every rank, or of one.

    Args:
        profile: with the runs of all layers and all pairs; those of an estimate say what each action takes. A search
            that folds many lists makes its `RangeBytes` once.
        stages, units: of the plan; stages of one range of layers each.
        actions: each rank's list.
        run: where the inputs of stages wait whose `memory` is None; their list says whether they recompute.
        only: the rank that is asked for; default: all, in their order.

    Raises CapslogError naming what the profile lacks; for backwards in two halves it must say what each of them takes.
    """
    rows = [RankActions.of(row) for row in actions]
    ranges = profile if isinstance(profile, RangeBytes) else RangeBytes(profile, RANKS, run.recomputes)
    stages = with_memory(stages, run, actions, "cpu" if ranges.one_memory else "cuda")
    ranks = [stage.rank for stage in stages]
    step = StepActions(rows, ranks, paths_of(stages, units.blocks or 1), units.of_block)
    first = [stage.first for stage in stages]
    gradients = [ranges.gradient[cut] if ranges.carries[cut] else -1 for cut in first]
    sizes = {"F": [ranges.crossing[cut] for cut in first], "B": gradients}
    # rows that tell no actions were taken with receives posted ahead, which are in their peaks
    messages = messages_of(step, sizes, ranges.one_memory and ranges.told)
    holders = _holders(stages, units.blocks or 1)
    sums = {rank: _RankSum(ranges, row) for rank, row in enumerate(step.rows) if only in (None, rank)}
    calls = {
        number: _StageCalls(ranges, step, messages, stage, number)
        for number, stage in enumerate(stages)
        if stage.rank in sums
    }
    for one in calls.values():
        one.add_to(sums[one.rank], calls, holders)
    return [total.result(rank, holders, units.of_block) for rank, total in sums.items()]


def _holders(stages: Sequence[PlanStage], blocks: int) -> Holders:
    found: Holders = {}
    for stage in stages:
        for layer in range(stage.first, stage.end):
            found.setdefault(layer, {})[stage.rank] = range(blocks) if stage.blocks is None else stage.blocks
    return found


class _RankSum:
    """The events of one rank: `change[p]` counts from the begin of action p on, `need[p]` while it is at work."""

    def __init__(self, ranges: RangeBytes, row: RankActions) -> None:
        self.ranges, self.row = ranges, row
        self.change, self.need, self.host, self.let_go = (np.zeros(len(row) + 1, dtype=np.int64) for _ in range(4))

    def result(self, rank: int, holders: Holders, of_block: int) -> RankFold:
        """The fold of the events."""
        ranges, layers = self.ranges, frozenset(layer for layer, ranks in holders.items() if rank in ranks)
        if not layers:
            return RankFold((), 0)
        resident = ranges.resident(layers)
        during = resident + np.cumsum(self.change) + np.maximum(self.need, self.let_go)
        gradients = sum(int(ranges.gradients[layer]) for layer in layers)
        # all holders of a layer get the statistics of all
        calls = {layer: of_block * sum(map(len, holders[layer].values())) for layer in layers}
        statistics = sum(ranges.statistics(layer, layer + 1) * count for layer, count in calls.items())
        at_end = statistics + max(exchange(ranges, rank, holders), gradients + ranges.update(layers))
        end = max(int(during[-1]), resident + at_end)
        return RankFold(tuple(during[:-1].tolist()), end, int(np.cumsum(self.host).max(initial=0)))


class _StageCalls:
    """The calls of one stage, whose events go to its rank."""

    def __init__(
        self,
        ranges: RangeBytes,
        step: StepActions,
        messages: Messages,
        stage: PlanStage,
        number: int,
    ) -> None:
        self.ranges, self.step, self.messages, self.number = ranges, step, messages, number
        self.rank, self.first, self.end = stage.rank, stage.first, stage.end
        self.forwards, self.backwards = step.forwards[number], step.backwards[number]
        self.weights = step.weights[number]
        # where the last of a call is let go of
        self.ends = np.where(self.weights >= 0, self.weights, self.backwards)
        self.recomputes, self.loads = step.at("R", number), step.at("L", number)
        self.modes, self.statistics = self._modes(stage), ranges.statistics(self.first, self.end)
        self.shared = np.zeros(len(self.forwards), dtype=np.int64)
        for calls, one in self.modes:
            self.shared[calls] = one.shared
        self.before, self.before_call = step.neighbours(number, -1)
        self.behind, _ = step.neighbours(number, 1)
        ranks = np.array(step.ranks)
        self.local_before = (self.before >= 0) & (ranks[self.before] == ranks[number])
        self.local_behind = (self.behind >= 0) & (ranks[self.behind] == ranks[number])

    def add_to(self, total: _RankSum, stages: Mapping[int, _StageCalls], holders: Holders) -> None:
        """Add all calls, those that are treated alike together.

        stages: number -> those of the rank. holders: layer -> its ranks.
        """
        for calls, one in self.modes:
            self._add(total, calls, one)
            self._add_shared_inputs(total, calls, one, stages)
        # gradients of parameters: a block makes them anew; of a layer with one holder two sums are alive at most
        of_block, layers = self.step.of_block, range(self.first, self.end)
        made = self.ranges.made(self.first, self.end)
        np.add.at(total.change, self.ends[::of_block] + 1, made)
        added = sum(int(self.ranges.gradients[layer]) for layer in layers if len(holders[layer]) == 1)
        np.add.at(total.change, self.ends[of_block - 1 :: of_block][1:] + 1, -added)

    def _modes(self, stage: PlanStage) -> list[tuple[Numbers, Treatment]]:
        """The calls that are treated alike, and how."""
        whole = self._kept_whole(self.step.rows[self.rank])
        facts = [self.recomputes >= 0, self.step.at("O", self.number) >= 0, whole, self.weights >= 0]
        kinds = sum(fact.astype(np.int64) << place for place, fact in enumerate(facts))
        layers = self.ranges, self.first, self.end, stage.memory or ()
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
        return found & (self.step.at("O", self.number) < 0)

    def _add(self, total: _RankSum, calls: Numbers, one: Treatment) -> None:
        ranges, change = self.ranges, total.change
        inputs, outputs = ranges.crossing[self.first], ranges.crossing[self.end]
        gradient_in, gradient_out = ranges.gradient[self.first], ranges.gradient[self.end]
        gradient_out = 0 if self.end == ranges.num_layers else gradient_out
        forward, backward, again = self.forwards[calls], self.backwards[calls], self.recomputes[calls]
        rerun = again >= 0
        loaded = self._away(total, calls, one)
        # F: its input is there; it leaves what the call holds
        arrived = self.messages.begins["F"][self.number][calls]
        np.add.at(change, np.where(arrived >= 0, arrived, forward), np.where(self.local_before[calls], 0, inputs))
        total.need[forward] = one.forward + self.statistics
        np.add.at(change, forward + 1, one.held - inputs + self.statistics)
        self._add_outputs(total, calls, one, outputs)
        # R
        np.add.at(change, again[rerun], np.where(loaded, 0, one.host)[rerun])
        total.need[again[rerun]] = one.recompute
        np.add.at(change, again[rerun] + 1, one.grown)
        # B, or I
        held = one.held - one.away + one.host + np.where(rerun, one.grown, 0)
        np.add.at(change, backward, np.where(loaded | rerun, 0, one.host))
        if gradient_out:
            arrived = self.messages.begins["B"][self.number][calls]
            np.add.at(
                change, np.where(arrived >= 0, arrived, backward), np.where(self.local_behind[calls], 0, gradient_out)
            )
        makes = calls % self.step.of_block == 0
        most: Numbers | int = np.where(makes, one.first_backward, one.backward)
        if one.halves is not None:
            most, weights = one.halves.inputs, self.weights[calls]
            np.add.at(change, backward + 1, one.halves.between)
            most_then = np.where(makes, one.halves.first_weights, one.halves.weights)
            total.need[weights] = np.maximum(0, most_then - one.halves.between)
            np.add.at(change, weights + 1, -one.halves.between)
        total.need[backward] = np.maximum(0, most - held - gradient_out)
        np.add.at(change, backward + 1, -held - gradient_out)
        self._add_gradients_sent(total, calls, gradient_in)

    def _away(self, total: _RankSum, calls: Numbers, one: Treatment) -> NDArray[np.bool_]:
        """O and L; which calls have an L. What an O takes stays until its copy is waited for."""
        offloads, loads, row = self.step.at("O", self.number)[calls], self.loads[calls], total.row
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
        return loaded

    def _add_outputs(self, total: _RankSum, calls: Numbers, one: Treatment, outputs: int) -> None:
        """The outputs, from F until the next stage here takes them, or until it is sure that the peer has them."""
        after = self.forwards[calls] + 1
        local = self.local_behind[calls]
        np.add.at(total.change, after[local], outputs - one.shared)
        sent = (self.behind[calls] >= 0) & ~local
        if self.ranges.one_memory and sent.any():
            gone = self.messages.ends["F"][self.number][calls][sent]
            # what a recomputation lets go, a message may hold longer
            ran = self.recomputes[calls][sent]
            longer = (ran >= 0) & (ran < gone)
            np.add.at(total.change, after[sent], outputs - one.shared)
            np.add.at(total.change, ran[longer] + 1, one.shared)
            size = outputs - np.where(longer, 0, one.shared)
            np.add.at(total.change, gone, -size)
            np.add.at(total.let_go, gone, size)

    def _add_shared_inputs(
        self, total: _RankSum, calls: Numbers, one: Treatment, stages: Mapping[int, _StageCalls]
    ) -> None:
        """Inputs from a stage of this rank that holds some of them itself: what both stages keep counts once."""
        own = calls[self.local_before[calls]]
        inputs, kept_before = self.ranges.crossing[self.first], np.zeros(len(own), dtype=np.int64)
        for other in np.unique(self.before[own]):
            there = self.before[own] == other
            kept_before[there] = stages[other].shared[self.before_call[own[there]]]
        both, then = (
            np.clip(kept_before + kept - inputs, 0, kept_before) for kept in (one.input_kept, one.input_kept_then)
        )
        again = self.recomputes[own]
        rerun = (again >= 0) & (one.input_kept != one.input_kept_then)
        # the stage before keeps its part when this stage lets its inputs go
        needed = total.need[self.forwards[own]]
        total.need[self.forwards[own]] = np.maximum(needed, self.statistics + one.behind + kept_before - both)
        np.add.at(total.change, self.forwards[own] + 1, kept_before - both)
        np.add.at(total.change, again[rerun] + 1, (both - then)[rerun])
        np.add.at(total.change, self.backwards[own] + 1, np.where(rerun, then, both))

    def _add_gradients_sent(self, total: _RankSum, calls: Numbers, size: int) -> None:
        """The gradients of the inputs, until the stage before takes them or has surely received them."""
        if not size:
            return
        after = self.backwards[calls] + 1
        local = self.local_before[calls]
        np.add.at(total.change, after[local], size)
        sent = (self.before[calls] >= 0) & ~local
        if self.ranges.one_memory and sent.any():
            gone = self.messages.ends["B"][self.number][calls][sent]
            np.add.at(total.change, after[sent], size)
            np.add.at(total.change, gone, -size)
            np.add.at(total.let_go, gone, size)
