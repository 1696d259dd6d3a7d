"""What a notice asks for, and what the membership protocol hears of it."""

from __future__ import annotations

import pytest

from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice
from varuna_capslog.elastic.notices.ladder import Rung, protocol_event, rung
from varuna_capslog.membership import messages


@pytest.mark.parametrize(
    ("kind", "left", "move_seconds", "expected"),
    [
        (Kind.HINT, None, 99.0, Rung.SHADOW),
        (Kind.HINT, 0.0, 99.0, Rung.SHADOW),
        (Kind.LEAVE, 120.0, 30.0, Rung.COMMIT),
        (Kind.LEAVE, 30.0, 30.0, Rung.COMMIT),
        (Kind.LEAVE, 15.0, 15.1, Rung.CRASH_PATH),
        (Kind.LEAVE, -5.0, 0.1, Rung.CRASH_PATH),  # passed already
        (Kind.LEAVE, None, 1e9, Rung.COMMIT),  # nobody said until when
        (Kind.NOW, 15.0, 2.0, Rung.LEAVE),
        (Kind.NOW, 15.0, 20.0, Rung.CRASH_PATH),
    ],
)
def test_the_rung(kind: Kind, left: float | None, move_seconds: float, expected: Rung) -> None:
    now = 1000.0
    deadline = None if left is None else Deadline(now + left, "set")
    assert rung(Notice(kind, "x", "1", ("a",), deadline), now, move_seconds) is expected


def test_what_the_protocol_hears() -> None:
    assert protocol_event(Rung.SHADOW, "m1") == messages.Hint(("leave", "m1"))
    assert protocol_event(Rung.COMMIT, "m1") == messages.Wished(("leave", "m1"), urgent=False)
    assert protocol_event(Rung.LEAVE, "m1") == messages.Wished(("leave", "m1"), urgent=True)
    assert protocol_event(Rung.CRASH_PATH, "m1") == messages.Wished(("leave", "m1"), urgent=True, save=True)
    assert protocol_event(Rung.CRASH_PATH, "m1", alone=False) == messages.Wished(("leave", "m1"), urgent=True)


def test_the_protocol_takes_it() -> None:
    """The event is one of the protocol's own: a member that runs casts it in its next vote."""
    from varuna_capslog.membership import protocol
    from varuna_capslog.membership.generation import Generation
    from varuna_capslog.membership.state import Phase, State
    from varuna_capslog.rig.search.places import even_places, make_job

    job = make_job(2, even_places(2, 0))
    state = State("m1", "a", phase=Phase.RUN, record=Generation(1, ("m0", "m1")), round=1)
    event = protocol_event(Rung.LEAVE, "m1")
    after, _ = protocol.step(job, state, event)
    assert after.wishes.changes == {("leave", "m1")}
    assert after.wishes.urgent
