"""Messages of the other members, kept until this member's state lets it take them.

Messages of older generations are dropped, those of newer ones wait. A message becomes an event of the protocol, or a
state in the holdings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from torch import Tensor

from varuna_capslog.elastic.member.inbox import PeerMessage
from varuna_capslog.elastic.member.parts import Parts
from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.membership.state import Phase, State
from varuna_capslog.training.layer_state import digest

__all__ = ["Incoming", "decode", "encode"]


class Incoming:
    """The mail of one member. Called by its one thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._mail: list[PeerMessage] = []

    def add(self, message: PeerMessage) -> None:
        """Adds a message that has arrived."""
        self._mail.append(message)

    def sort(self, state: State) -> list[m.ProtocolEvent]:
        """Takes the messages that can be taken in this state; returns the events for the protocol, in order."""
        events: list[m.ProtocolEvent] = []
        self._mail = [message for message in self._mail if not self._take(message, state, events)]
        return events

    def _take(self, message: PeerMessage, state: State, events: list[m.ProtocolEvent]) -> bool:
        """Takes a message if the state allows it; returns True once it is done with, False to keep it for later."""
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
            case "meet":  # this member is about to be let in
                if phase is Phase.OUTSIDE and state.wants_in:
                    pairs = [(source, destination) for source, destination in message.header["pairs"]]
                    self._parts.path.begin(generation + 1, message.header["members"], pairs)
                    self._parts.peers.send(message.sender, "met", generation=generation)  # opens the connection ahead
                return True
            case "met":
                return True
            case "plan":
                self._parts.proposals.heard(message.header["members"], message.header["plan"])
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
        """Keeps the updates with which copies of layers make a step."""
        updates: dict[int, LayerState] = {layer: {} for layer in header["layers"]}  # type: ignore[attr-defined]
        for address, tensor in tensors.items():
            index, _, name = address.partition("/")
            updates[int(index)][name] = tensor
        for layer, update in updates.items():
            self._parts.holdings.updates[(layer, int(header["step"]))] = update  # type: ignore[call-overload]

    def _state(self, message: PeerMessage, state: State, events: list[m.ProtocolEvent]) -> None:
        """Takes a layer's state: of a layer that this member will train ("layer"), or of a copy for it to follow."""
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
    """A value of a round as JSON; a plain vote (finite, no wishes) is empty."""
    if value == m.Vote():
        return b""
    data = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return json.dumps(data, separators=(",", ":"), default=sorted).encode()


def decode(text: bytes) -> m.Value:
    """The value from which `encode` made this text."""
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
