"""Time limits for a member's waits for the others, and the clock that runs against them.

The protocol knows no time; the runtime decides what happens when a limit has passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.state import Phase, State

__all__ = ["Timeouts", "WaitingTime"]


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a member waits.

    Attributes:
        peer: for any message of the data path, and for layers.
        change: until a member founds a generation without knowing who is lost.
        again: between further attempts.
        gather: for the others' values in the first round; at least three steps, since no member breaks off a step.
    """

    peer: float = 30.0
    change: float = 1.0
    again: float = 0.3
    gather: float = 5.0

    @property
    def holders(self) -> float:
        """For members that hold what otherwise only the checkpoint has: three times as long as for a change."""
        return 3 * self.change

    def alone(self, usual_seconds: float) -> float:
        """Limit for work of a member by itself, without hearing anybody. usual_seconds: of its steps; 0: not known."""
        return max(self.gather, 3 * usual_seconds) if usual_seconds else self.peer


class WaitingTime:
    """Measures how long one member has waited for the next event. All times are `time.monotonic`'s."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._since = time.monotonic()
        self._ended = 0.0
        self._lacks_since = 0.0  # settled layers, through however many generations

    def moved(self, state: State) -> None:
        """Restarts the wait: the phase or the generation has changed."""
        self._since, self._ended = time.monotonic(), 0.0
        if state.phase is Phase.RUN:
            self._lacks_since = 0.0
        elif state.phase is Phase.WAIT and state.regress:
            self._lacks_since = self._lacks_since or self._since

    def ended(self) -> None:
        """Notes that the limit had passed and was acted on."""
        self._ended = time.monotonic()

    def ends(self, state: State, usual_seconds: float, computed_at: float, roster: Roster) -> float:
        """The time at which the present limit passes if nothing happens.

        Where no member that once took part may come back, none can bring the settled layers that are lacking, and the
        run need not wait for them; nor do new members without them prolong the wait.

        Args:
            usual_seconds: of a step; 0 before the first one.
            computed_at: when this member's last computation ended.
        """
        limits, since = self._timeouts, self._since
        first = again = limits.again
        match state.phase:
            case Phase.CHANGE:
                first = limits.change
            case Phase.WAIT if state.regress:
                first = again = limits.holders if roster.astray else 0.0
                since = self._lacks_since
            case Phase.WAIT:
                first = again = limits.holders
            case Phase.GATHER:
                first = again = min(limits.peer, max(limits.gather, 3 * usual_seconds))
            case Phase.INSTALL:
                first = limits.peer
            case Phase.RUN:
                first, since = limits.peer, max(since, computed_at)
        return since + first if self._ended <= since else self._ended + again
