"""Objects that the modules of one member share; `Runtime` makes them once and hands them down."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from torch import Tensor

from varuna_capslog.elastic.member.holdings import Holdings
from varuna_capslog.elastic.member.inbox import PeerMessage, Peers
from varuna_capslog.elastic.member.process_groups import ProcessGroups, Proposals
from varuna_capslog.elastic.member.work import LayerState, Work
from varuna_capslog.membership import entries
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Job, Phase, State
from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import Generation, Member, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Place, Seat
from varuna_capslog.membership.small_motion import USUAL_GAP
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.layer_state import digest

__all__ = ["ChangeReport", "Incoming", "MemberLoop", "Parts", "decode", "encode"]


class MemberLoop(Protocol):
    """Part of `Runtime` that `Training` and `Effects` use: the protocol's state, and where events go."""

    @property
    def state(self) -> State: ...

    @property
    def roster(self) -> Roster: ...

    @property
    def ended(self) -> bool: ...

    def feed(self, *events: m.ProtocolEvent) -> None: ...

    def drain(self) -> None: ...

    def look_at_deadline(self) -> None: ...

    def append(self, entry: entries.Entry) -> None: ...

    def end(self, stopped: bool) -> None: ...

    def release(self) -> None: ...

    def stop_for_memory(self, why: str) -> NoReturn: ...


@dataclass
class ChangeReport:
    """Measurements of a change, from the last step before it to the first one after; times are of `time.monotonic`.

    Attributes:
        before: members of the last generation that trained.
        proposal_seconds: of the plan search for the record, where this member founded the generation.
        lost_step_seconds: of the step that the change interrupted here.
        rebalanced: why this member requested another plan for the same members; None: it did not.
        first_apply: when this member's first step was applied; changes: number of changes of members since then.
    """

    before: tuple[Member, ...] = ()
    last_apply: float | None = None
    search_seconds: float = 0.0
    proposal_seconds: float = 0.0
    transfer_began: float = 0.0
    transfer_seconds: float = 0.0
    moved_bytes: int = 0
    why: tuple[str, ...] = ()
    rebalanced: str | None = None
    lost_step_seconds: float = 0.0
    first_apply: float | None = None
    changes: int = 0

    @property
    def gap_seconds(self) -> float:
        """Expected seconds until the next change: the mean of `USUAL_GAP` and the gaps seen here."""
        seen_seconds = 0.0 if self.first_apply is None else time.monotonic() - self.first_apply
        return (USUAL_GAP + seen_seconds) / (1 + self.changes)

    def timed(self, place: Place) -> Place:
        """Wrap `place` so that the report has the seconds of its last call."""

        def search(seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
            began = time.perf_counter()
            layout = place(seats, plan)
            self.search_seconds = time.perf_counter() - began
            return layout

        return search

    def decided(self) -> None:
        """Record that the first round is complete and the layout searched: layers begin to move."""
        self.transfer_began = time.monotonic() - self.search_seconds

    def opened(self, members: Sequence[Member], dead: Collection[Member], moved_bytes: int) -> None:
        """Record that all layers are at their new owners."""
        self.transfer_seconds = time.monotonic() - self.transfer_began
        self.why = reasons(members, self.before, dead, self.rebalanced)
        self.moved_bytes += moved_bytes

    def applied(self, now: float) -> None:
        """Record an applied step. The first one after a change begins a new report."""
        if self.why:
            self.changes += self.last_apply is not None and self.rebalanced is None
            self.search_seconds = self.proposal_seconds = self.transfer_began = self.transfer_seconds = 0.0
            self.moved_bytes, self.lost_step_seconds, self.why, self.rebalanced = 0, 0.0, (), None
        self.last_apply = now
        self.first_apply = self.first_apply or now

    def event(self, record: Generation, step: int, step_began: float) -> tuple[str, dict[str, Any]]:
        """Return kind and fields of the change's event, written after its first step. step: the applied one."""
        pause = None if self.last_apply is None else step_began - self.last_apply
        return "begin" if pause is None else "morph", {
            "generation": record.number,
            "members": list(record.members),
            "why": list(self.why),
            "step": step,
            "search_seconds": self.search_seconds + self.proposal_seconds,
            "transfer_seconds": self.transfer_seconds,
            "pause_seconds": pause,
            "first_step_seconds": time.monotonic() - step_began,
            "moved_bytes": self.moved_bytes,
            "lost_step_seconds": self.lost_step_seconds,
            **({} if record.motion is None else {"motion": dict(record.motion)}),
        }


@dataclass(frozen=True)
class Parts:
    """Work and memory of one member, and its connections to the others.

    Attributes:
        probe: called at named points, for faults injected by tests.
        report: of the change under way. proposals: plans of generations that may follow.
        seats: of the participants of the present generation's first round, and of members that asked to join.
    """

    me: Member
    work: Work
    job: Job
    holdings: Holdings
    peers: Peers
    path: ProcessGroups
    probe: Callable[[str], None]
    report: ChangeReport
    proposals: Proposals
    seats: dict[Member, Seat] = field(default_factory=dict)

    def tighten(self, member: Member, capacity: int) -> None:
        """Let plans count on `capacity` bytes of a member's device, where its seat is known here."""
        if (seat := self.seats.get(member)) is not None:
            self.seats[member] = seat._replace(capacity=capacity)
            self.proposals.known.clear()

    def send_state(
        self, kind: str, target: Member, generation: int, layer: int, stamp: Stamp, state: LayerState
    ) -> None:
        """Send a layer with its digest; it must not change before the receiver is known to have it."""
        about = {"layer": layer, "stamp": list(stamp), "digest": digest(state).hex()}
        self.peers.send(target, kind, state, generation=generation, **about)


def reasons(
    members: Collection[Member], before: Collection[Member], dead: Collection[Member], rebalanced: str | None = None
) -> tuple[str, ...]:
    """Return sentences on the members that were lost, left or joined between two generations that trained.
    rebalanced: the reason for another plan where the members are the same.
    """
    if not before:
        return ("1 member begins" if len(members) == 1 else f"{len(members)} members begin",)
    lost = [member for member in before if member not in members and member in dead]
    departed = [member for member in before if member not in members and member not in dead]
    new = [member for member in members if member not in before]
    groups = [("lost", lost), ("left", departed), ("joined", new)]
    changes = tuple(f"{', '.join(names)} {verb}" for verb, names in groups if names)
    return changes or (rebalanced or "the same members, since the generation before was interrupted",)


# -- Messages of the other members, kept until this member's state lets it take them.
#
# Messages of older generations are dropped, those of newer ones wait. A message becomes an event of the protocol, or
# a state in the holdings.


class Incoming:
    """Messages that have arrived at one member. Called by its one thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._mail: list[PeerMessage] = []

    def add(self, message: PeerMessage) -> None:
        """Add a message that has arrived."""
        self._mail.append(message)

    def sort(self, state: State) -> list[m.ProtocolEvent]:
        """Handle the messages that this state allows, and return the events for the protocol, in order."""
        events: list[m.ProtocolEvent] = []
        self._mail = [message for message in self._mail if not self._take(message, state, events)]
        return events

    def _take(self, message: PeerMessage, state: State, events: list[m.ProtocolEvent]) -> bool:
        """Handle a message if the state allows it; return False to keep it for later."""
        generation, number, phase = int(message.header["generation"]), state.record.number, state.phase
        if generation < number:
            return True
        if message.kind == "value":  # the protocol keeps the values of newer generations
            value = decode(str(message.header["value"]).encode())
            events.append(m.Heard(generation, 0, message.sender, value))
            return True
        if generation > number:
            return False
        match message.kind:
            case "meet":  # the next generation is to contain this member
                if phase is Phase.OUTSIDE and state.wants_in:
                    pairs = [(source, destination) for source, destination in message.header["pairs"]]
                    self._parts.path.begin(generation + 1, message.header["members"], pairs)
                    self._parts.peers.send(message.sender, "met", generation=generation)  # opens the connection ahead
                return True
            case "met":
                return True
            case "plan":
                self._parts.proposals.record(message.header["members"], message.header["plan"])
                return True
            case "ahead":
                self._parts.work.learn(message.header["found"])
                return True
            case "tightened":
                self._parts.tighten(message.sender, int(message.header["capacity"]))
                return True
            case "farewell":
                self._parts.probe("farewell")
                events.append(m.Farewell(generation))
                return True
        if phase is Phase.GATHER or (phase is Phase.INSTALL and message.kind != "layer"):
            return False
        if phase is not (Phase.INSTALL if message.kind == "layer" else Phase.RUN):
            return True
        if message.kind == "update":
            self._update(message.header, message.tensors)
        else:
            self._state(message, state, events)
        return True

    def _update(self, header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Keep the final gradients of a step for the copies of layers here."""
        updates: dict[int, LayerState] = {layer: {} for layer in header["layers"]}  # type: ignore[attr-defined]
        for address, tensor in tensors.items():
            index, _, name = address.partition("/")
            updates[int(index)][name] = tensor
        for layer, update in updates.items():
            self._parts.holdings.updates[(layer, int(header["step"]))] = update  # type: ignore[call-overload]

    def _state(self, message: PeerMessage, state: State, events: list[m.ProtocolEvent]) -> None:
        """Take the state of a layer that this member will train ("layer"), or of a copy for it to follow."""
        parts, generation, layer = self._parts, state.record.number, int(message.header["layer"])
        arrived, stamp = dict(message.tensors), Stamp(*message.header["stamp"])
        if message.kind == "layer" and (layer not in state.roles.missing or stamp != state.at):
            return
        if digest(arrived).hex() != message.header["digest"]:
            parts.work.note("damaged", layers=[layer], sender=message.sender, generation=generation)
            events.append(m.Damaged(generation, layer))
        elif message.kind == "layer":
            parts.probe("received")
            parts.holdings.take(layer, stamp, arrived)
            events.append(m.Received(generation, layer))
        else:
            parts.holdings.follow(layer, stamp, arrived)


def encode(value: m.Value) -> bytes:
    """Encode a value of a round as JSON; a plain vote (finite, no wishes) is empty."""
    if value == m.Vote():
        return b""
    data = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return json.dumps(data, separators=(",", ":"), default=sorted).encode()


def decode(text: bytes) -> m.Value:
    """Return the value from which `encode` made this text."""
    if not text:
        return m.Vote()
    data = json.loads(text)
    if "finite" in data:
        changes = {key: frozenset(map(tuple, data[key])) for key in ("changes", "prepared", "hints")}
        return m.Vote(**{**data, **changes})
    return m.Contribution(
        frozenset((layer, Stamp(*stamp)) for layer, stamp in data["held"]),
        data["host"],
        data["capacity"],
        Stamp(*data["checkpoint"]),
        (data["voted"][0], Stamp(*data["voted"][1])),
        frozenset(m.Proof(layer, Stamp(*stamp), owner, digest) for layer, stamp, owner, digest in data["proofs"]),
    )
