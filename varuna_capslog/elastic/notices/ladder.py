"""What a notice asks for: hint -> shadow copy, notice -> commit, signal to end -> leave now; too late -> crash path.

Pure functions on a notice, the time and what is left to move. The runtime climbs; the membership protocol hears of it
as its `messages.Hint` and `messages.Wished`.
"""

from __future__ import annotations

import enum

from varuna_capslog.elastic.notices.interface import Kind, Notice
from varuna_capslog.membership import messages
from varuna_capslog.membership.generation import Member

__all__ = ["Rung", "protocol_event", "rung"]


class Rung(enum.Enum):
    """What to do about a notice."""

    SHADOW = "shadow"  # copy ahead what would move; nobody leaves
    COMMIT = "commit"  # prepare, then change the membership at a step boundary
    LEAVE = "leave"  # change it at the next boundary, whatever is prepared
    CRASH_PATH = "crash path"  # the move cannot be finished: checkpoint what has no other copy, then leave


def rung(notice: Notice, now: float, move_seconds: float = 0.0) -> Rung:
    """The rung for `notice`.

    Args:
        now: seconds of the clock that the deadline was made with.
        move_seconds: what is left to move takes so long.
    """
    if notice.kind is Kind.HINT:
        return Rung.SHADOW
    if notice.deadline is not None and notice.deadline.remaining(now) < move_seconds:
        return Rung.CRASH_PATH
    return Rung.COMMIT if notice.kind is Kind.LEAVE else Rung.LEAVE


def protocol_event(step: Rung, member: Member, alone: bool = True) -> messages.Wished | messages.Hint:
    """What the membership protocol is told of the member that is meant.

    Args:
        alone: it holds what nobody else does.
    """
    if step is Rung.SHADOW:
        return messages.Hint(("leave", member))
    return messages.Wished(("leave", member), urgent=step is not Rung.COMMIT, save=step is Rung.CRASH_PATH and alone)
