"""Schedules: the actions of each rank, in order, as data. Imports no torch and starts no process.

A schedule is made (`make_schedule`), checked (`validate`), lowered to messages (`lower`) and timed (`simulate`).
"""

from __future__ import annotations

__all__ = [
    "ALWAYS_RECOMPUTE",
    "DEFAULT_K",
    "DEFAULT_RUN",
    "KINDS",
    "SCHEDULES",
    "Action",
    "Edge",
    "Lowered",
    "Message",
    "Recv",
    "RunShape",
    "Schedule",
    "SendInstruction",
    "SimulatedStep",
    "StageGraph",
    "StageSeconds",
    "TimedAction",
    "TimedMessage",
    "Timeline",
    "backwards_at_once",
    "dealt_out",
    "find_deadlock",
    "from_strings",
    "graph_keeping_forwards",
    "in_flight_limits",
    "in_turn",
    "insert_offload",
    "insert_recompute",
    "lower",
    "make_schedule",
    "parse_action",
    "placement_of",
    "schedule_of",
    "simulate",
    "simulated",
    "to_strings",
    "validate",
]

from varuna_capslog.schedules.actions import (
    KINDS,
    Action,
    Schedule,
    backwards_at_once,
    from_strings,
    graph_keeping_forwards,
    parse_action,
    placement_of,
    to_strings,
    validate,
)
from varuna_capslog.schedules.generators import (
    SCHEDULES,
    dealt_out,
    in_flight_limits,
    insert_offload,
    insert_recompute,
    make_schedule,
    schedule_of,
)
from varuna_capslog.schedules.lower import Lowered, Message, Recv, SendInstruction, find_deadlock, in_turn, lower
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE, DEFAULT_K, DEFAULT_RUN, RunShape
from varuna_capslog.schedules.simulate import (
    SimulatedStep,
    StageSeconds,
    TimedAction,
    TimedMessage,
    Timeline,
    simulate,
    simulated,
)
from varuna_capslog.schedules.stage_graph import Edge, StageGraph
