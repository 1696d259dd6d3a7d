"""Schedules: which rank computes what in which order, as data.

A plan's schedule is made here (`make_schedule`), checked (`validate`), lowered to messages (`lower`, `find_deadlock`)
and timed (`simulate`). Planners, the engine and the reports call it; nothing here imports torch or starts a process.
"""

from __future__ import annotations

__all__ = [
    "ALWAYS_RECOMPUTE",
    "DEFAULT_RUN",
    "KINDS",
    "SCHEDULES",
    "Action",
    "Lowered",
    "Message",
    "Recv",
    "RunShape",
    "Schedule",
    "SendInstruction",
    "TimedAction",
    "TimedMessage",
    "Timeline",
    "find_deadlock",
    "format_csv",
    "from_strings",
    "graph_keeping_forwards",
    "in_flight_limits",
    "in_turn",
    "insert_recompute",
    "lower",
    "make_schedule",
    "parse_action",
    "parse_csv",
    "placement_of",
    "simulate",
    "to_strings",
    "validate",
]

import difflib
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import (
    KINDS,
    Action,
    Schedule,
    format_csv,
    from_strings,
    parse_action,
    parse_csv,
    placement_of,
    to_strings,
)
from varuna_capslog.schedules.gpipe import gpipe_limits, gpipe_schedule
from varuna_capslog.schedules.list_scheduler import check_placement
from varuna_capslog.schedules.lower import Lowered, Message, Recv, SendInstruction, find_deadlock, in_turn, lower
from varuna_capslog.schedules.one_f_one_b import one_f_one_b_limits, one_f_one_b_schedule
from varuna_capslog.schedules.recompute import graph_keeping_forwards, insert_recompute
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE, DEFAULT_RUN, RunShape
from varuna_capslog.schedules.simulate import TimedAction, TimedMessage, Timeline, simulate
from varuna_capslog.schedules.validate import validate
from varuna_capslog.schedules.varuna import varuna_limits, varuna_schedule

SCHEDULES = ("gpipe", "1f1b", "varuna")
"""The names that `make_schedule` knows."""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    recompute: bool = False,
) -> Schedule:
    """The actions of one step of one pipeline, one ordered list per rank.

    Args:
        name: `gpipe`, `1f1b` or `varuna` (which always recomputes).
        num_stages: stages of the pipeline, at least 1.
        num_microbatches: microbatches of the step that this pipeline runs, at least 1.
        placement: `placement[stage]` -> rank; default: stage s on rank s. Several stages may share a rank, in any
            order.
        recompute: put an R before each B whose forward was not the stage's last action.

    Raises `CapslogError` for an unknown name or numbers that make no schedule.
    """
    _check_name(name)
    ranks = check_placement(num_stages, num_microbatches, placement)
    if name == "gpipe":
        return gpipe_schedule(ranks, num_microbatches, recompute)
    if name == "1f1b":
        return one_f_one_b_schedule(ranks, num_microbatches, recompute)
    return varuna_schedule(ranks, num_microbatches)


def in_flight_limits(name: str, num_stages: int, num_microbatches: int) -> list[int]:
    """The most microbatches a stage has in flight (forward begun, backward not ended) under the schedule, per stage."""
    _check_name(name)
    check_placement(num_stages, num_microbatches, None)
    limits = {"gpipe": gpipe_limits, "1f1b": one_f_one_b_limits, "varuna": varuna_limits}[name]
    return limits(num_stages, num_microbatches)


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")
