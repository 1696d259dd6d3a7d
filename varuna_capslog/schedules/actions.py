"""A schedule as data: an ordered list of actions for each rank; and the only validator of schedules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.stage_graph import StageGraph

__all__ = [
    "KINDS",
    "Action",
    "Schedule",
    "action_of",
    "backwards_at_once",
    "from_strings",
    "graph_keeping_forwards",
    "parse_action",
    "placement_of",
    "to_strings",
    "validate",
]


# -- A schedule as data
#
# An `Action` is a piece of work on one stage; a `Schedule` is an ordered list of actions for each rank of a pipeline.
# The other modules of this package take and return these lists. This module neither times nor executes actions.


KINDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input half of the backward",
    "W": "weight half of the backward",
    "R": "recompute",
    "O": "offload",
    "L": "load",
    "U": "update",
}
"""Every kind of action and its meaning. F, B, I and W are spelled as in torch.distributed.pipelining."""

_TEXT = re.compile(r"(0|[1-9][0-9]*)([A-Z])(0|[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True)
class Action:
    """A piece of work: `kind` (a key of `KINDS`) of `microbatch` on `stage`, both counted from 0. Prints as
    `<stage><kind><microbatch>`: `2F0`, `0R3`. An update (`1U`) belongs to the whole step and has microbatch None; every
    other kind has a microbatch. Raises `CapslogError` when the parts do not fit together.
    """

    stage: int
    kind: str
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CapslogError(f"unknown kind of action {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.stage < 0 or (self.microbatch is not None and self.microbatch < 0):
            raise CapslogError(
                f"action {self}: stages and microbatches are counted from 0; use numbers that are not negative"
            )
        if (self.microbatch is None) != (self.kind == "U"):
            rule = "an update has no microbatch" if self.kind == "U" else f"a {KINDS[self.kind]} needs a microbatch"
            raise CapslogError(f"action {self}: {rule}; write {self.stage}U or {self.stage}F0")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@lru_cache(maxsize=1 << 16)
def action_of(stage: int, kind: str, microbatch: int | None) -> Action:
    """Return `Action(stage, kind, microbatch)`, cached, since searches make the same lists many times."""
    return Action(stage, kind, microbatch)


Schedule: TypeAlias = list[list[Action]]
"""One ordered list of actions per rank of one pipeline."""


def parse_action(text: str) -> Action:
    """Return the action that prints as `text`. Raises `CapslogError` for any other text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CapslogError(f"{text!r} is not an action; write <stage><kind><microbatch>, for example 2F0, 0R3 or 1U")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, None if microbatch is None else int(microbatch))


def to_strings(schedule: Iterable[Iterable[Action]]) -> list[list[str]]:
    """Return the JSON form (`actions` in a plan file): one list of strings per rank."""
    return [[str(action) for action in actions] for actions in schedule]


def from_strings(rows: Sequence[Sequence[str]]) -> Schedule:
    """Return the inverse of `to_strings`. Raises `CapslogError` naming rank and position of the first invalid entry."""
    schedule: Schedule = []
    for rank, row in enumerate(rows):
        actions = []
        for position, text in enumerate(row):
            try:
                actions.append(parse_action(text))
            except CapslogError as error:
                raise CapslogError(f"rank {rank}, position {position}: {error}") from None
        schedule.append(actions)
    return schedule


def placement_of(schedule: Sequence[Sequence[Action]]) -> list[int]:
    """Return stage -> its rank. Raises `CapslogError` for a stage on two ranks, or a number without a stage."""
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            owner = rank_of.setdefault(action.stage, rank)
            if owner != rank:
                raise CapslogError(
                    f"rank {rank}, position {position}: {action} belongs to stage {action.stage}, which also has "
                    f"actions on rank {owner}; a stage lives on one rank, move all its actions there"
                )
    missing = [stage for stage in range(max(rank_of, default=-1) + 1) if stage not in rank_of]
    if missing:
        raise CapslogError(
            f"stage {missing[0]} has no action on any rank; number the stages 0, 1, 2, ... without a gap"
        )
    return [rank_of[stage] for stage in range(len(rank_of))]


def backwards_at_once(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """Return the (stage, microbatch) pairs of one rank whose backward directly follows the forward on their stage. Such
    a pair has no R and no O, so that nothing of it is offloaded.
    """
    at_once: set[tuple[int, int]] = set()
    offloaded: set[tuple[int, int]] = set()
    last: dict[int, int | None] = {}  # stage -> the microbatch of its last computation, where that was a forward
    for action in actions:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if microbatch is None:
            continue
        if kind == "O":
            offloaded.add((stage, microbatch))
        elif kind != "L":
            if kind in "BI" and last.get(stage) == microbatch:
                at_once.add((stage, microbatch))
            last[stage] = microbatch if kind == "F" else None
    return at_once - offloaded


def graph_keeping_forwards(schedule: Iterable[Iterable[Action]]) -> set[tuple[int, int]]:
    """Return the (stage, microbatch) pairs whose F must build a graph: those without an R."""
    forwards: set[tuple[int, int]] = set()
    recomputed: set[tuple[int, int]] = set()
    for actions in schedule:
        for action in actions:
            if action.microbatch is not None and action.kind in "FR":
                (forwards if action.kind == "F" else recomputed).add((action.stage, action.microbatch))
    return forwards - recomputed


# -- The only validator of schedules.
#
# The engine and the commands call `validate` on every schedule that comes from a file or a generator. It has rules for
# every kind of action, also for U, which no generator makes, and it checks each rank's list alone; `find_deadlock`
# checks whether ranks wait for each other in a circle.


def validate(
    schedule: Sequence[Sequence[Action]],
    graph: StageGraph,
    recompute: bool | Sequence[bool] = False,
    max_in_flight: Sequence[int | None] = (),
    offload: Sequence[bool] | None = None,
) -> None:
    """Check that the schedule is one complete step; raise `CapslogError` naming the first action that breaks a rule.

    The rules: a stage acts on its own rank only; for every microbatch that it takes, it runs F once, and either B, or I
    and then W, once; each in ascending microbatch order (gradients are added in that order); on a rank that holds both
    stages of an edge, the producer comes first; O then L at most once, between F or R and the backward, and no R
    between the two; U at most once, after the stage's last backward.

    Args:
        schedule: one list of actions per rank.
        graph: the stages of the step. As in the actions, a microbatch is the number of the stage's own call.
        recompute: of all stages, or of each. False refuses every R. True requires exactly one R between F and B (or I),
            except where F is the stage's last computation before them and nothing was offloaded: its graph is still
            alive.
        max_in_flight: stage -> most microbatches between begin of F and end of B (or W); None or missing: no limit.
        offload: stage -> True where it may offload; False refuses every O. Default: every stage.
    """
    recomputes = [recompute] * len(graph.ranks) if isinstance(recompute, bool) else recompute
    calls = [len(row) for row in graph.calls]
    acting = set()
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.stage >= len(calls) or (action.microbatch or 0) >= max(1, calls[action.stage]):
                raise _refusal(rank, position, action, _size_of_step(calls, action.stage))
            if graph.ranks[action.stage] != rank:
                where = f"stage {action.stage} runs on rank {graph.ranks[action.stage]}"
                raise _refusal(rank, position, action, where)
            acting.add(action.stage)
    for stage, count in enumerate(calls):
        if count and stage not in acting:
            raise CapslogError(
                f"stage {stage} has no action on any rank; every stage runs F and B of {count} microbatches"
            )

    recomputed = {(a.stage, a.microbatch) for actions in schedule for a in actions if a.kind == "R"}
    for rank, actions in enumerate(schedule):
        stages = {
            stage: _StageState(
                stage,
                calls[stage],
                recomputes[stage],
                {microbatch for of_stage, microbatch in recomputed if of_stage == stage and microbatch is not None},
                max_in_flight[stage] if stage < len(max_in_flight) else None,
                offload is None or offload[stage],
            )
            for stage in range(len(calls))
            if graph.ranks[stage] == rank
        }
        for position, action in enumerate(actions):
            rule = stages[action.stage].broken_rule(action) or _broken_order_between(graph, stages, action)
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


@dataclass
class _StageState:
    """Checks the rules of one stage by its actions so far. recomputed: microbatches that have an R in the schedule."""

    stage: int
    num_microbatches: int
    recompute: bool
    recomputed: set[int]
    max_in_flight: int | None
    offloads: bool = True
    done: set[tuple[str, int | None]] = field(default_factory=set)
    next_of_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys("FBIW", 0))
    last: Action | None = None

    def broken_rule(self, action: Action) -> str | None:
        """Return the rule of this stage that the action would break now, or None."""
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
        if kind == "F" and self.max_in_flight is not None:
            in_flight = self.next_of_kind["F"] - self.next_of_kind["B"] - self.next_of_kind["W"]
            if in_flight >= self.max_in_flight:
                return f"{in_flight} microbatches are in flight on the stage and the limit is {self.max_in_flight}"
        if kind == "R" and not self.recompute:
            return "recompute in a schedule without recomputation, or of a stage that recomputes nothing"
        if kind == "R" and ("O", microbatch) in self.done and ("L", microbatch) not in self.done:
            return f"recompute before {self.stage}L{microbatch}, what was offloaded must be loaded first"
        if kind == "O" and not self.offloads:
            return "offload of a stage that offloads nothing"
        if kind in "BI":
            return self._broken_by_backward(microbatch)
        if kind == "W":
            return self._broken_by_weight_half(microbatch)
        if kind == "L" and ("O", microbatch) not in self.done:
            return f"load without the offload {self.stage}O{microbatch}"
        return None

    def take(self, action: Action) -> None:
        """Record an action that broke no rule."""
        self.done.add((action.kind, action.microbatch))
        if action.kind not in "OLU":
            self.last = action
        if action.kind in self.next_of_kind:
            self.next_of_kind[action.kind] += 1

    def missing(self) -> str | None:
        """Describe the action that the finished list lacks, or return None."""
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
        """Check that F, B, I and W ascend; B and W, which both add to the gradients of the weights, count together."""
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

    def _broken_by_backward(self, microbatch: int) -> str | None:
        if ("O", microbatch) in self.done and ("L", microbatch) not in self.done:
            return f"backward before {self.stage}L{microbatch}, what was offloaded must be loaded first"
        if not self.recompute or ("R", microbatch) in self.done:
            return None
        if microbatch in self.recomputed:
            return f"backward before its recompute {self.stage}R{microbatch}"
        if self.last == Action(self.stage, "F", microbatch) and ("O", microbatch) not in self.done:
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


def _broken_order_between(graph: StageGraph, stages: dict[int, _StageState], action: Action) -> str | None:
    """Check that stages on this rank that make the action's input or gradient have done so before it."""
    if action.microbatch is None:
        return None
    if action.kind == "F":
        for stage, call in graph.upstream[action.stage][action.microbatch]:
            if stage in stages and ("F", call) not in stages[stage].done:
                return f"forward before {stage}F{call}, which makes its input on the same rank"
    if action.kind in "BI":
        for stage, call in graph.downstream[action.stage][action.microbatch]:
            if stage in stages and not stages[stage].done & {("B", call), ("I", call)}:
                return f"backward before {stage}B{call}, which makes its gradient on the same rank"
    return None


def _size_of_step(calls: Sequence[int], stage: int) -> str:
    if stage < len(calls) and len(set(calls)) > 1:
        return f"stage {stage} takes {calls[stage]} microbatches"
    return f"the step has {len(calls)} stages and {max(calls)} microbatches"
