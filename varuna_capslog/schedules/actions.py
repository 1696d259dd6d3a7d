"""A schedule as data: the actions of each rank, in order.

An `Action` is a piece of work on one stage; a `Schedule` is an ordered list of actions for each rank of a pipeline.
The other modules of this package take and return these lists. This module knows neither the duration nor the
execution of an action.
"""

from __future__ import annotations

__all__ = [
    "KINDS",
    "Action",
    "Schedule",
    "backwards_at_once",
    "from_strings",
    "graph_keeping_forwards",
    "parse_action",
    "placement_of",
    "to_strings",
]

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.base.errors import CapslogError

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
    """A piece of work: `kind` (a key of `KINDS`) of `microbatch` on `stage`, both counted from 0.

    An update (`U`) belongs to the whole step and has microbatch None; every other kind has a microbatch. Prints as
    `<stage><kind><microbatch>`: `2F0`, `0R3`, `1U`. Raises `CapslogError` when the parts do not fit together.
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
    """Return the form of JSON (`actions` in plan.json): one list of strings per rank."""
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
    """Return `placement`: `placement[stage]` is the rank that runs the stage.

    Raises `CapslogError` when a stage has actions on two ranks or a number between 0 and the last stage has none at
    all.
    """
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
    """Return the (stage, microbatch) pairs of one rank whose backward directly follows the forward on their stage.

    Such a pair has no R, and nothing of it is offloaded: pairs with an O are left out.
    """
    at_once: set[tuple[int, int]] = set()
    offloaded: set[tuple[int, int]] = set()
    last: dict[int, Action] = {}
    for action in actions:
        if action.microbatch is None:
            continue
        call = action.stage, action.microbatch
        if action.kind == "O":
            offloaded.add(call)
        elif action.kind != "L":
            if action.kind in "BI" and last.get(action.stage) == Action(action.stage, "F", action.microbatch):
                at_once.add(call)
            last[action.stage] = action
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
