"""Turns a notice into a request to the protocol, by its kind, the clock and the bytes that are left to move.

- A hint asks for shadow copies: layers that would move are copied ahead, and no member leaves.
- A notice to leave asks for a planned change: prepared, then made at a step boundary.
- A notice to leave now asks for the change at the next boundary, whatever is prepared.
- Where the move cannot be finished in time, layers that no other member holds are written to a checkpoint first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from varuna_capslog.elastic.host.hooks import notice_of
from varuna_capslog.elastic.member.parts import Parts
from varuna_capslog.elastic.member.training import Training
from varuna_capslog.elastic.notices.interface import Kind, Notice
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import State, find_ahead, stay_with
from varuna_capslog.membership.entries import HintEntry, NoticeEntry
from varuna_capslog.membership.generation import Member
from varuna_capslog.membership.small_motion import LINK

__all__ = ["NoticePolicy"]

CHANGE_SECONDS = 1.0
"""Assumed duration of a change besides the move of layers; two steps come on top."""


class NoticePolicy:
    """Notices of one run, as one member hears them. Called by its one thread."""

    def __init__(self, parts: Parts, training: Training) -> None:
        self._me, self._parts, self._training = parts.me, parts, training
        self._mine: Notice | None = None  # with the earliest deadline
        self._gave_up = 0  # the generation in which its deadline was found too close to prepare
        self._known: tuple[tuple[frozenset[m.Change], Member, int, int], Mapping[int, int]] | None = None

    def heard(self, entry: NoticeEntry | HintEntry, state: State) -> m.ProtocolEvent:
        """Return the protocol's event for a notice or hint in the log."""
        member, notice = entry.member, notice_of(entry, entry.member)
        if member == self._me and notice.deadline is not None:
            before = self._mine.deadline if self._mine is not None else None
            if before is None or notice.deadline.at < before.at:
                self._mine = notice
        return self._event(notice, member, state)

    def watch(self, state: State) -> m.ProtocolEvent | None:
        """Return the event where this member's deadline is now too close to prepare. Called before every step."""
        notice, number = self._mine, state.record.number
        if (
            notice is None
            or self._gave_up == number
            or ("leave", self._me) not in state.wishes.changes
            or state.wishes.urgent
        ):
            return None
        return self._event(notice, self._me, state) if self._is_late(notice, self._me, state) else None

    def _event(self, notice: Notice, member: Member, state: State) -> m.ProtocolEvent:
        if notice.kind is Kind.HINT:
            return m.Hint(("leave", member))
        late, alone = self._is_late(notice, member, state), False
        if late:
            changes = state.wishes.changes | {("leave", member)}
            layout, stay = state.roles.layout, stay_with(state.record, changes)
            # only those that leave can give what those that stay lack
            alone = layout is not None and bool(stay) and not layout.covers(stay)
            if member == self._me:
                self._gave_up = state.record.number
        return m.Wished(("leave", member), urgent=late or notice.kind is Kind.NOW, save=alone)

    def _is_late(self, notice: Notice, member: Member, state: State) -> bool:
        """True where the deadline comes before the member's layers can have moved."""
        if notice.kind is Kind.HINT or notice.deadline is None:
            return False
        return notice.deadline.remaining(time.monotonic()) < self._move_seconds(member, state)

    def _move_seconds(self, member: Member, state: State) -> float:
        """Estimated seconds until no other member needs this one any more."""
        remaining_bytes = sum(
            size for layer, size in self._moves(member, state).items() if not self._training.is_sent(layer)
        )
        return remaining_bytes / LINK + 2 * self._training.usual_seconds + CHANGE_SECONDS

    def _moves(self, member: Member, state: State) -> Mapping[int, int]:
        """Layer -> bytes that the member has to send when it leaves."""
        sizes, seats, proposals = self._parts.work.layer_bytes, self._parts.seats, self._parts.proposals
        # a vote may tell of a joining member before it has asked
        known_changes = {change for change in state.wishes.changes if change[1] in seats}
        changes = frozenset(known_changes | {("leave", member)})
        if state.roles.layout is None or member not in state.record.members:
            return {}
        key = (changes, member, state.record.number, len(proposals.known))
        if self._known is None or self._known[0] != key:
            ahead = find_ahead(member, state.record, state.roles.layout, changes, seats, proposals.place, sizes)
            self._known = (key, {layer: sizes[layer] * len(targets) for layer, targets in ahead.targets.items()})
        return self._known[1]
