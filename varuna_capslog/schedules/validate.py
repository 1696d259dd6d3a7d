"""The one validator of schedules.

The engine and the command call it on every schedule that comes from a file or a generator. It knows every kind of
action, also those the engine cannot run yet, and it checks each rank's list alone:
`find_deadlock` checks whether ranks wait for each other in a circle.
"""

from __future__ import annotations

__all__ = ["validate"]

from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import KINDS, Action, placement_of


def validate(
    schedule: Sequence[Sequence[Action]],
    num_stages: int,
    num_microbatches: int,
    recompute: bool = False,
    *,
    max_in_flight: Sequence[int] | None = None,
    max_live_graphs: int | None = None,
) -> None:
    """Returns when the schedule is one complete step; raises `CapslogError` at the first broken rule.

    The error names rank, position in the rank's list, stage, microbatch and rule. The rules: a stage lives on one rank;
    every stage runs F once and either B or I and then W once for every microbatch, each in ascending microbatch order
    (gradients are added in that order); on a rank that holds both stages of a cut, the producer comes first; O then L
    at most once, between F or R and the backward; U at most once, after the stage's last backward.

    Args:
        schedule: one list of actions per rank.
        num_stages, num_microbatches: what a complete step has.
        recompute: False refuses every R. True wants an R between F and B (or I), except where F is the stage's last
            action before them, so that its graph is still alive; a second R of a microbatch is refused.
        max_in_flight: the most microbatches per stage between begin of F and end of B (or W); default no limit.
        max_live_graphs: the most graphs a stage may keep alive at a time (1 under Varuna's schedule); default no limit.
            A graph lives from its R, or from an F without R, to B (or W), except between O and L.
    """
    placement = placement_of(schedule)
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.stage >= num_stages or (action.microbatch or 0) >= num_microbatches:
                raise _refusal(
                    rank, position, action, f"the step has {num_stages} stages and {num_microbatches} microbatches"
                )
    for stage in range(len(placement), num_stages):
        raise CapslogError(
            f"stage {stage} has no action on any rank; every stage runs F and B of {num_microbatches} microbatches"
        )

    recomputed = {(a.stage, a.microbatch) for actions in schedule for a in actions if a.kind == "R"}
    for rank, actions in enumerate(schedule):
        stages = {
            stage: _StageState(
                stage,
                num_microbatches,
                recompute,
                {microbatch for of_stage, microbatch in recomputed if of_stage == stage and microbatch is not None},
                max_in_flight[stage] if max_in_flight is not None else None,
                max_live_graphs,
            )
            for stage in range(num_stages)
            if placement[stage] == rank
        }
        for position, action in enumerate(actions):
            rule = stages[action.stage].broken_rule(action) or _broken_order_between(stages, action)
            if rule is not None:
                raise _refusal(rank, position, action, rule)
            stages[action.stage].take(action)
        for state in stages.values():
            if (rule := state.missing()) is not None:
                raise CapslogError(f"rank {rank}, stage {state.stage}, at the end of its list: {rule}")


def _refusal(rank: int, position: int, action: Action, rule: str) -> CapslogError:
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return CapslogError(
        f"rank {rank}, position {position}, stage {action.stage}{microbatch}: {action} is refused: {rule}"
    )


class _StageState:
    """What one stage has done so far, for the rules that concern it alone."""

    def __init__(
        self,
        stage: int,
        num_microbatches: int,
        recompute: bool,
        recomputed: set[int],
        max_in_flight: int | None,
        max_live_graphs: int | None,
    ) -> None:
        self.stage, self.num_microbatches, self.recompute = stage, num_microbatches, recompute
        self.recomputed = recomputed
        self.max_in_flight, self.max_live_graphs = max_in_flight, max_live_graphs
        self.done: set[tuple[str, int | None]] = set()
        self.next_of_kind = dict.fromkeys("FBIW", 0)
        self.in_flight: set[int] = set()
        self.live_graphs: set[int] = set()
        self.offloaded_graphs: set[int] = set()
        self.last: Action | None = None

    def broken_rule(self, action: Action) -> str | None:
        """The rule of this stage that the action would break now, or None."""
        kind, microbatch = action.kind, action.microbatch
        if (kind, microbatch) in self.done:
            return f"duplicate, the stage ran {action} before"
        if kind == "U":
            finished = self.next_of_kind["B"] + self.next_of_kind["W"]
            return None if finished == self.num_microbatches else f"U before the last backward, {finished} have ended"
        assert microbatch is not None
        if kind != "F" and ("F", microbatch) not in self.done:
            return f"{KINDS[kind]} before the forward {self.stage}F{microbatch}"
        if kind != "F" and kind != "W" and (("B", microbatch) in self.done or ("I", microbatch) in self.done):
            return f"{KINDS[kind]} after the backward of microbatch {microbatch}"
        if (rule := self._broken_microbatch_order(action)) is not None:
            return rule
        if kind == "O":
            return None
        return {
            "F": self._broken_by_forward,
            "R": self._broken_by_recompute,
            "B": self._broken_by_backward,
            "I": self._broken_by_backward,
            "W": self._broken_by_weight_half,
            "L": self._broken_by_load,
        }[kind](microbatch)

    def take(self, action: Action) -> None:
        """Notes an action that broke no rule."""
        kind, microbatch = action.kind, action.microbatch
        self.done.add((kind, microbatch))
        self.last = action
        if kind in self.next_of_kind:
            self.next_of_kind[kind] += 1
        if microbatch is None:
            return
        if kind == "F":
            self.in_flight.add(microbatch)
        if kind == "R" or (kind == "F" and microbatch not in self.recomputed):
            self.live_graphs.add(microbatch)
        if kind == "O" and microbatch in self.live_graphs:
            self.live_graphs.discard(microbatch)
            self.offloaded_graphs.add(microbatch)
        if kind == "L" and microbatch in self.offloaded_graphs:
            self.live_graphs.add(microbatch)
        if kind in "BW":
            self.in_flight.discard(microbatch)
            self.live_graphs.discard(microbatch)

    def missing(self) -> str | None:
        """What the finished list lacks, or None."""
        for microbatch in range(self.num_microbatches):
            if ("F", microbatch) not in self.done:
                return f"missing {self.stage}F{microbatch}, every stage runs every microbatch"
            if ("B", microbatch) not in self.done and ("W", microbatch) not in self.done:
                half = ("I", microbatch) in self.done
                return f"missing {self.stage}{'W' if half else 'B'}{microbatch}, every stage runs every microbatch"
            if ("O", microbatch) in self.done and ("L", microbatch) not in self.done:
                return f"missing {self.stage}L{microbatch}, what was offloaded must be loaded"
        return None

    def _broken_microbatch_order(self, action: Action) -> str | None:
        """F, B, I and W in ascending microbatch order; B and W count together, both add to the weights' gradients."""
        kind = action.kind
        if kind not in self.next_of_kind:
            return None
        expected = self.next_of_kind[kind]
        if kind in "BW":
            expected = self.next_of_kind["B"] + self.next_of_kind["W"]
        elif kind == "I":
            expected = self.next_of_kind["B"] + self.next_of_kind["I"]
        if action.microbatch == expected:
            return None
        return (
            f"{KINDS[kind]} out of microbatch order, the next one is {self.stage}{kind}{expected} "
            f"(gradients of microbatches are added in ascending order)"
        )

    def _broken_by_forward(self, microbatch: int) -> str | None:
        if self.max_in_flight is not None and len(self.in_flight) >= self.max_in_flight:
            return (
                f"{len(self.in_flight)} microbatches are in flight on the stage and the limit is {self.max_in_flight}"
            )
        return None if microbatch in self.recomputed else self._too_many_graphs()

    def _broken_by_recompute(self, microbatch: int) -> str | None:
        if not self.recompute:
            return "recompute in a schedule without recomputation"
        return self._too_many_graphs()

    def _broken_by_backward(self, microbatch: int) -> str | None:
        if ("O", microbatch) in self.done and ("L", microbatch) not in self.done:
            return f"backward before {self.stage}L{microbatch}, what was offloaded must be loaded first"
        if not self.recompute or ("R", microbatch) in self.done:
            return None
        if microbatch in self.recomputed:
            return f"backward before its recompute {self.stage}R{microbatch}"
        if self.last == Action(self.stage, "F", microbatch):
            return None
        return (
            f"missing {self.stage}R{microbatch}; only a backward directly after its forward on the stage "
            f"needs no recompute, and {self.last} came between"
        )

    def _broken_by_weight_half(self, microbatch: int) -> str | None:
        if ("B", microbatch) in self.done:
            return f"weight half after the full backward {self.stage}B{microbatch}"
        return (
            None if ("I", microbatch) in self.done else f"weight half before the input half {self.stage}I{microbatch}"
        )

    def _broken_by_load(self, microbatch: int) -> str | None:
        if ("O", microbatch) not in self.done:
            return f"load without the offload {self.stage}O{microbatch}"
        return self._too_many_graphs() if microbatch in self.offloaded_graphs else None

    def _too_many_graphs(self) -> str | None:
        if self.max_live_graphs is None or len(self.live_graphs) < self.max_live_graphs:
            return None
        alive = ", ".join(str(microbatch) for microbatch in sorted(self.live_graphs))
        return f"graphs of microbatches {alive} are alive on the stage and the limit is {self.max_live_graphs}"


def _broken_order_between(stages: dict[int, _StageState], action: Action) -> str | None:
    """On one rank the neighbour that makes this action's input must have run before it."""
    microbatch = action.microbatch
    if action.kind == "F" and action.stage - 1 in stages and ("F", microbatch) not in stages[action.stage - 1].done:
        return f"forward before {action.stage - 1}F{microbatch}, which makes its input on the same rank"
    if action.kind in "BI" and action.stage + 1 in stages:
        done = stages[action.stage + 1].done
        if ("B", microbatch) not in done and ("I", microbatch) not in done:
            return f"backward before {action.stage + 1}B{microbatch}, which makes its gradient on the same rank"
    return None
