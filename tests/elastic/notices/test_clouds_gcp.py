"""The listener of Google Cloud against a server whose questions hang."""

from __future__ import annotations

import pytest

from tests.elastic.metadata_servers import FakeGcp
from tests.elastic.notices.support import Inbox, Script, SetClock
from varuna_capslog.elastic.notices.clouds import Answer, GcpListener, HttpOpener
from varuna_capslog.elastic.notices.interface import Kind, Unavailable


def google(value: str, etag: str = "e") -> Answer:
    return Answer(200, value, {"metadata-flavor": "Google", "etag": etag})


def test_a_preemption_ends_the_question_that_hangs() -> None:
    inbox = Inbox()
    with FakeGcp() as server:
        listener = GcpListener("node-1", endpoint=server.url, hold=600.0)
        listener.start(inbox)
        try:
            while sum("wait_for_change" in request.query for request in list(server.requests)) < 2:
                pass_time(server)
            server.preempt()  # both questions hang for ten minutes: only the change can end them
            notice = inbox.next()
        finally:
            listener.stop()
    assert (notice.kind, notice.source, notice.hosts) == (Kind.LEAVE, "gcp", ("node-1",))
    assert notice.detail == "preempted TRUE"
    assert all(request.headers["metadata-flavor"] == "Google" for request in server.requests)
    waiting = [request.query for request in server.requests if request.query]
    assert all(query["last_etag"] and query["timeout_sec"] == "600" for query in waiting)


def pass_time(server: FakeGcp) -> None:
    with server.changed:
        server.changed.wait(0.01)


def test_stop_ends_questions_that_hang() -> None:
    with FakeGcp() as server:
        listener = GcpListener(endpoint=server.url, hold=600.0)
        listener.start(Inbox())
        while sum("wait_for_change" in request.query for request in list(server.requests)) < 2:
            pass_time(server)
        listener.stop()
        assert not any(thread.is_alive() for thread in listener._threads)


def test_what_is_announced_between_two_questions_is_not_missed() -> None:
    """The etag of the last answer makes the next question return at once."""
    with FakeGcp() as server:
        listener = GcpListener(endpoint=server.url, hold=600.0)
        key = listener._keys[0]
        assert listener.ask(key).notices == ()
        server.preempt()
        (notice,) = listener.ask(key).notices
    assert notice.kind is Kind.LEAVE


@pytest.mark.parametrize(
    ("value", "kind"), [("TERMINATE_ON_HOST_MAINTENANCE", Kind.LEAVE), ("MIGRATE_ON_HOST_MAINTENANCE", Kind.HINT)]
)
def test_maintenance(value: str, kind: Kind) -> None:
    opener = Script(google("NONE"), google(value, "f"), google("NONE", "g"), google(value, "h"))
    listener = GcpListener(opener=opener, clock=SetClock())
    key = listener._keys[1]
    rounds = [listener.ask(key).notices for _ in range(4)]
    assert [len(notices) for notices in rounds] == [0, 1, 0, 1]
    first, second = rounds[1][0], rounds[3][0]
    assert first.kind is kind
    assert first.deadline is not None
    assert first.deadline.remaining(1000.0) == 60.0
    assert first.id != second.id  # the next maintenance is a new event


def test_the_deadline_counts_from_the_last_answer_before_an_outage() -> None:
    """The server was away for 12 s. The value may have changed at any time of it, so only 18 of 30 s are certain."""
    clock = SetClock()
    listener = GcpListener(opener=Script(google("FALSE"), None, google("TRUE", "f")), clock=clock)
    key = listener._keys[0]
    listener.ask(key)
    clock.advance(10)
    with pytest.raises(Unavailable):
        listener.ask(key)
    clock.advance(2)
    (notice,) = listener.ask(key).notices
    assert notice.deadline is not None
    assert notice.deadline.remaining(clock.monotonic()) == 18.0


def test_the_deadline_counts_from_the_answer_of_a_question_that_hung() -> None:
    clock = SetClock()
    listener = GcpListener(opener=Script(google("FALSE"), google("TRUE", "f")), clock=clock, preemption_seconds=120.0)
    key = listener._keys[0]
    listener.ask(key)
    clock.advance(10)
    (notice,) = listener.ask(key).notices
    assert notice.deadline is not None
    assert notice.deadline.remaining(clock.monotonic()) == 120.0


def test_after_a_failure_the_next_question_does_not_wait() -> None:
    opener = Script(google("FALSE", "one"), None, google("FALSE", "two"))
    listener = GcpListener(opener=opener)
    key = listener._keys[0]
    listener.ask(key)
    with pytest.raises(Unavailable):
        listener.ask(key)
    listener.ask(key)
    assert ["wait_for_change" in url for _, url, _, _ in opener.asked] == [False, True, False]


def test_a_server_that_does_not_hang_is_not_asked_without_pause() -> None:
    listener = GcpListener(opener=Script(*[google("FALSE")] * 3))
    assert [listener.ask(listener._keys[0]).pause for _ in range(3)] == [0.0, 0.5, 0.5]


def test_the_server_dies_and_returns() -> None:
    inbox = Inbox()
    with FakeGcp() as server:
        listener = GcpListener(endpoint=server.url, hold=600.0)
        listener.start(inbox)
        try:
            while sum("wait_for_change" in request.query for request in list(server.requests)) < 2:
                pass_time(server)
            server.stop()
            server.preempt()
            server.start()
            notice = inbox.next()
        finally:
            listener.stop()
    assert notice.kind is Kind.LEAVE
    assert notice.deadline is not None
    assert "last answer before" in notice.deadline.based_on


@pytest.mark.parametrize(
    "answer",
    [
        Answer(503, "", {"metadata-flavor": "Google"}),
        Answer(404, "", {"metadata-flavor": "Google"}),
        Answer(200, "TRUE"),  # a captive portal, a proxy: not Google's server
    ],
)
def test_other_answers_are_no_notice(answer: Answer) -> None:
    listener = GcpListener(opener=Script(google("FALSE"), answer))
    listener.ask(listener._keys[0])
    with pytest.raises(Unavailable):
        listener.ask(listener._keys[0])


def test_an_unknown_value_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    listener = GcpListener(opener=Script(google("NONE"), google("WHATEVER", "f"), google("WHATEVER", "f")))
    assert [listener.ask(listener._keys[1]).notices for _ in range(3)] == [(), (), ()]
    assert [record.getMessage() for record in caplog.records if "WHATEVER" in record.getMessage()] == [
        "gcp: maintenance-event has a value that is not known, 'WHATEVER'; it is passed over"
    ]


def test_the_fake_demands_what_the_service_demands() -> None:
    ask, path = HttpOpener(), "/computeMetadata/v1/instance/preempted"
    flavor = {"Metadata-Flavor": "Google"}
    with FakeGcp() as server:
        assert ask("GET", server.url + path, {}).status == 403
        assert ask("GET", server.url + path, {**flavor, "X-Forwarded-For": "10.0.0.1"}).status == 403
        first = ask("GET", server.url + path, flavor)
        assert (first.status, first.body) == (200, "FALSE")
        query = f"?wait_for_change=true&last_etag={first.headers['etag']}&timeout_sec=0"
        assert ask("GET", server.url + path + query, flavor).body == "FALSE"  # time over: the value as it is
