"""Messages of other members, this member's reports of its own memory, and the reasons for a generation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna_capslog.elastic.member.effects import Effects
from varuna_capslog.elastic.member.inbox import PeerMessage
from varuna_capslog.elastic.member.parts import Incoming, decode, encode, reasons
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Phase, Roles, State
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training.layer_state import digest

AT, BEFORE = Stamp(5, 1), Stamp(4, 1)
WEIGHT, EARLIER = {"weight": torch.arange(3.0)}, {"weight": torch.ones(3)}
STATE = State(
    "m0",
    "h0",
    phase=Phase.INSTALL,
    record=Generation(2, ("m0", "m1")),
    at=AT,
    base=AT,
    roles=Roles(missing=frozenset({1})),
)


@pytest.fixture
def parts() -> Any:
    notes: list[tuple[str, dict[str, Any]]] = []
    taken: list[tuple[int, Stamp]] = []
    caught_up: list[int] = []
    return SimpleNamespace(
        me="m0",
        notes=notes,
        taken=taken,
        sent=[],
        work=SimpleNamespace(note=lambda kind, **details: notes.append((kind, details))),
        holdings=SimpleNamespace(
            take=lambda layer, stamp, state: taken.append((layer, stamp)),
            digest_at=lambda layer, stamp: digest(WEIGHT if stamp == AT else EARLIER),
            has_digest=lambda layer, stamp: (layer, stamp) == (0, BEFORE),
            stands_at=lambda layer, held: BEFORE,
            catch_up=caught_up.extend,
        ),
        caught_up=caught_up,
        probe=lambda point: None,
    )


def layer(told: str, number: int = 1) -> PeerMessage:
    header = {"generation": 2, "layer": number, "stamp": list(AT), "digest": told}
    return PeerMessage("m1", "layer", header, WEIGHT)


def sorted_out(parts: Any, state: State, *messages: PeerMessage) -> list[m.ProtocolEvent]:
    incoming = Incoming(parts)
    for message in messages:
        incoming.add(message)
    return incoming.sort(state)


def test_a_layer_that_is_not_what_was_sent_is_not_taken_and_the_protocol_hears_of_it(parts: Any) -> None:
    assert sorted_out(parts, STATE, layer("0" * 8)) == [m.Damaged(2, 1)]
    assert parts.taken == []
    assert parts.notes == [("damaged", {"layers": [1], "sender": "m1", "generation": 2})]


def test_a_layer_that_is_what_was_sent_is_taken_once_it_is_wanted(parts: Any) -> None:
    good = digest(WEIGHT).hex()
    assert sorted_out(parts, STATE, layer(good), layer(good, number=0)) == [m.Received(2, 1)]
    assert parts.taken == [(1, AT)]
    incoming = Incoming(parts)
    incoming.add(layer(good))
    assert incoming.sort(replace(STATE, phase=Phase.GATHER)) == [], "the decision is not made yet"
    assert incoming.sort(STATE) == [m.Received(2, 1)]


def test_values_of_the_first_round_go_to_the_protocol_whatever_the_phase(parts: Any) -> None:
    value = m.Contribution(frozenset({(0, AT)}), "h1", proofs=frozenset({m.Proof(0, AT, True, "ab")}))
    text = encode(value).decode()
    messages = [PeerMessage("m1", "value", {"generation": number, "value": text}, {}) for number in (1, 2, 3)]
    assert sorted_out(parts, STATE, *messages) == [m.Heard(2, 0, "m1", value), m.Heard(3, 0, "m1", value)]


def test_a_member_proves_the_layers_that_were_copied_ahead_and_hears_its_own_value(parts: Any) -> None:
    held = frozenset((number, stamp) for number in range(4) for stamp in (BEFORE, AT))
    state = replace(STATE, phase=Phase.GATHER, held=held, roles=Roles(frozenset({0, 1}), shadows=frozenset({2})))
    parts.peers = SimpleNamespace(send=lambda target, kind, **header: parts.sent.append((target, kind, header)))
    training = SimpleNamespace(sent_ahead=frozenset({0, 1}), coming_own=frozenset({2}))
    loop = SimpleNamespace(state=state)
    effects = Effects(parts, SimpleNamespace(), training, loop)  # type: ignore[arg-type]
    (heard,) = effects.carry_out(m.Cast(2, 0, m.Contribution(held, "h0")))
    now, earlier = digest(WEIGHT).hex(), digest(EARLIER).hex()
    proofs = {m.Proof(1, AT, True, now), m.Proof(1, BEFORE, True, earlier), m.Proof(2, BEFORE, False, earlier)}
    proofs.add(m.Proof(0, BEFORE, True, earlier))  # its digest was begun ahead, at the boundary of the copies
    assert heard == m.Heard(2, 0, "m0", m.Contribution(held, "h0", proofs=frozenset(proofs)))
    ((target, kind, header),) = parts.sent
    assert (target, kind) == ("m1", "value")
    assert isinstance(heard, m.Heard)
    assert decode(header["value"].encode()) == heard.value
    assert parts.caught_up == [2]


# -- values of a round survive their journey -------------------------------------------------------------------------

names = st.text(min_size=1, max_size=8)
changes = st.frozensets(st.tuples(st.sampled_from(["leave", "join"]), names), max_size=4)
stamps = st.builds(Stamp, st.integers(0, 10**9), st.integers(0, 10**6))
votes = st.builds(m.Vote, st.booleans(), changes, changes, st.booleans(), changes, st.booleans())
contributions = st.builds(
    m.Contribution,
    st.frozensets(st.tuples(st.integers(0, 100), stamps), max_size=6),
    names,
    st.integers(0, 1 << 45),
    stamps,
    st.tuples(st.integers(0, 9), stamps),
    st.frozensets(st.builds(m.Proof, st.integers(0, 100), stamps, st.booleans(), names), max_size=4),
)


@given(st.one_of(votes, contributions))
def test_values_arrive_as_they_left(value: m.Value) -> None:
    assert decode(encode(value)) == value


def test_a_plain_vote_needs_no_ballot() -> None:
    assert encode(m.Vote()) == b""


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"held": []}'])
def test_what_is_no_value_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(text)


def test_a_generation_says_why_it_began() -> None:
    trained = ["m0", "m1"]
    assert reasons(["m0", "m1"], [], []) == ("2 members begin",)
    assert reasons(["m0", "m2"], trained, ["m1"]) == ("m1 lost", "m2 joined")
    assert reasons(["m0"], trained, []) == ("m1 left",)
    assert reasons(trained, trained, [], "m0 is slow") == ("m0 is slow",)
    assert reasons(trained, trained, []) == ("the same members, since the generation before was interrupted",)
