"""What the parts of one member have in common; `Runtime` makes it once and hands it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from varuna_capslog.elastic.member.change_report import ChangeReport
from varuna_capslog.elastic.member.holdings import Holdings
from varuna_capslog.elastic.member.peers import Peers
from varuna_capslog.elastic.member.work import LayerState, Work
from varuna_capslog.membership.generation import Member, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.state import Job
from varuna_capslog.training.layer_state import digest

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """One member's work and memory, and its ways to the others.

    Attributes:
        probe: called at named points, for faults injected by tests.
        report: of the change that is under way.
        seats: of all that took part in the present generation's first round, and of those that asked to be let in.
    """

    me: Member
    work: Work
    job: Job
    holdings: Holdings
    peers: Peers
    probe: Callable[[str], None]
    report: ChangeReport
    seats: dict[Member, Seat] = field(default_factory=dict)

    def send_state(
        self, kind: str, target: Member, generation: int, layer: int, stamp: Stamp, state: LayerState
    ) -> None:
        """Sends a layer with its digest; it must not change before the receiver is known to have it."""
        about = {"layer": layer, "stamp": list(stamp), "digest": digest(state).hex()}
        self.peers.send(target, kind, state, generation=generation, **about)
