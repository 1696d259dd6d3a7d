"""The listener of Azure against a server of Scheduled Events, and its approvals."""

from __future__ import annotations

import json

import pytest

from tests.elastic.metadata_servers import FakeAzure, Reply
from tests.elastic.notices.support import WALL, Inbox, Script, SetClock
from varuna_capslog.elastic.notices.clouds import Answer, AzureListener, HttpOpener
from varuna_capslog.elastic.notices.interface import Kind, Unavailable


def document(*events: object, incarnation: int = 2) -> Answer:
    return Answer(200, json.dumps({"DocumentIncarnation": incarnation, "Events": events}))


def event(**changes: object) -> dict[str, object]:
    return {
        "EventId": "A1",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 18 Sep 2017 08:20:30 GMT",
        **changes,
    }


def test_the_service_is_turned_on_at_the_start_and_the_preemption_is_heard() -> None:
    inbox = Inbox()
    with FakeAzure("vm_7") as server:
        listener = AzureListener("node-7", interval=0.01, endpoint=server.url)
        listener.start(inbox)
        try:
            name = server.schedule("Preempt", 30.0)
            notice = inbox.next()
        finally:
            listener.stop()
    assert (notice.kind, notice.id, notice.hosts, notice.resources) == (Kind.LEAVE, name, ("node-7",), ("vm_7",))
    assert server.requests[0].path == "/metadata/scheduledevents"
    assert server.requests[0].query == {"api-version": "2020-07-01"}
    assert server.approved == []


def test_the_first_answer_may_take_two_minutes_later_ones_not() -> None:
    opener = Script(document(), document())
    listener = AzureListener(machine="vm_0", opener=opener)
    listener.ask()
    listener.ask()
    assert opener.timeouts[0] > 120.0
    assert opener.timeouts[1] == 2.0


def test_an_event_is_told_when_the_incarnation_changes_not_at_every_question() -> None:
    with FakeAzure() as server:
        listener = AzureListener(endpoint=server.url)
        assert listener.ask().notices == ()
        name = server.schedule()
        assert [notice.kind for notice in listener.ask().notices] == [Kind.LEAVE]
        assert listener.ask().notices == ()
        server.begin(name)
        (notice,) = listener.ask().notices
        assert (notice.id, notice.kind) == (name, Kind.NOW)
        assert notice.deadline is not None
        assert notice.deadline.based_on == "it has begun"
        server.end(name)
        assert listener.ask().notices == ()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("Preempt", Kind.LEAVE),
        ("Terminate", Kind.LEAVE),
        ("Reboot", Kind.LEAVE),
        ("Redeploy", Kind.LEAVE),
        ("Freeze", Kind.HINT),
    ],
)
def test_each_type(kind: str, found: Kind) -> None:
    (notice,) = AzureListener(machine="vm_0", opener=Script(document(event(EventType=kind)))).ask().notices
    assert notice.kind is found


@pytest.mark.parametrize(
    ("not_before", "left"),
    [
        ("Mon, 18 Sep 2017 08:20:30 GMT", 30.0),
        ("2017-09-18T08:20:45Z", 45.0),
        ("Mon, 18 Sep 2017 08:35:00 GMT", 900.0),
        ("Mon, 18 Sep 2017 08:00:00 GMT", 0.0),
        ("", 30.0),
        ("tomorrow", 30.0),
        (None, 30.0),
        (17, 30.0),
        ("Mon, 18 Sep 99999999999 08:20:30 GMT", 30.0),
    ],
)
def test_the_deadline(not_before: object, left: float) -> None:
    clock = SetClock(wall=WALL)
    opener = Script(document(event(NotBefore=not_before)))
    (notice,) = AzureListener(machine="vm_0", opener=opener, clock=clock).ask().notices
    assert notice.deadline is not None
    assert notice.deadline.remaining(1000.0) == left


def test_events_of_neighbours_are_not_ours() -> None:
    """Varuna's listener, in contrast, took every event on any host for its own preemption."""
    with FakeAzure("vm_0") as server:
        listener = AzureListener(endpoint=server.url)
        server.schedule("Preempt", machines=["vm_1", "vm_2"])
        assert listener.ask().notices == ()
        assert listener.host_left() == ()
    assert server.approved == []


def test_as_long_as_the_own_name_is_not_known_events_are_hints() -> None:
    opener = Script(document(event()), Answer(500), document(event()), Answer(200, "vm_0"))
    listener = AzureListener(opener=opener)
    assert [notice.kind for notice in listener.ask().notices] == [Kind.HINT]
    assert listener.host_left() == ()  # nor is anything approved
    assert [notice.kind for notice in listener.ask().notices] == [Kind.LEAVE]


def test_an_event_is_approved_only_after_the_last_rank_has_left() -> None:
    with FakeAzure() as server:
        listener = AzureListener(endpoint=server.url)
        name = server.schedule()
        for _ in range(5):
            listener.ask()
        assert not [request for request in server.requests if request.method == "POST"]
        assert listener.host_left() == (name,)
        (post,) = [request for request in server.requests if request.method == "POST"]
        assert json.loads(post.body) == {"StartRequests": [{"EventId": name}]}
        assert post.headers["metadata"] == "true"
        assert listener.host_left() == ()  # once
    assert server.approved == [name]


def test_an_event_of_several_machines_waits_for_all_of_them() -> None:
    """An approval holds for all machines of the event: it would take the others' ranks away."""
    with FakeAzure("vm_0") as server:
        listener = AzureListener(endpoint=server.url)
        name = server.schedule("Reboot", machines=["vm_0", "vm_1"])
        listener.ask()
        assert listener.host_left() == ()
        assert server.approved == []
        assert listener.host_left(["vm_1"]) == (name,)
    assert server.approved == [name]


def test_neither_a_freeze_nor_what_has_begun_is_approved() -> None:
    with FakeAzure() as server:
        listener = AzureListener(endpoint=server.url)
        server.schedule("Freeze")
        server.begin(server.schedule("Preempt"))
        listener.ask()
        assert listener.host_left() == ()
    assert server.approved == []


def test_an_approval_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with FakeAzure() as server:
        listener = AzureListener(endpoint=server.url)
        name = server.schedule()
        listener.ask()
        server.say_instead(Reply(500), Reply(429))
        assert listener.host_left() == (name,)
        second = server.schedule()
        listener.ask()
        server.say_instead(Reply(500), always=True)
        assert listener.host_left() == ()
    assert f"event {second} could not be approved" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, "no json"),
        Reply(200, "[]"),
        Reply(200, '{"DocumentIncarnation": 3}'),
        Reply(200, '{"DocumentIncarnation": 3, "Events": {}}'),
        Reply(400, '{"error": "Bad request"}'),
        Reply(410, ""),
    ],
)
def test_nonsense_is_no_notice(reply: Reply) -> None:
    with FakeAzure() as server:
        listener = AzureListener(endpoint=server.url)
        server.schedule()
        server.say_instead(reply)
        with pytest.raises(Unavailable):
            listener.ask()
        assert len(listener.ask().notices) == 1


@pytest.mark.parametrize(
    "broken", ["text", {}, None, event(Resources=None), event(Resources="vm_0"), event(EventType=["Preempt"])]
)
def test_an_event_that_cannot_be_read_does_not_hide_the_others(broken: object) -> None:
    listener = AzureListener(machine="vm_0", opener=Script(document(broken, event(EventId="good"))))
    assert [notice.id for notice in listener.ask().notices] == ["good"]


@pytest.mark.parametrize("changes", [{"EventType": "Party"}, {"EventStatus": "Canceled"}])
def test_types_and_states_that_are_not_known_are_passed_over(changes: dict[str, object]) -> None:
    assert AzureListener(machine="vm_0", opener=Script(document(event(**changes)))).ask().notices == ()


def test_the_fake_demands_what_the_service_demands() -> None:
    ask, path, header = HttpOpener(), "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}
    with FakeAzure(turn_on_seconds=3600.0) as server:
        server.schedule()
        assert ask("GET", server.url + path, {}).status == 400
        assert ask("GET", server.url + "/metadata/scheduledevents", header).status == 400
        assert json.loads(ask("GET", server.url + path, header).body)["Events"] == []  # still being turned on
        unknown = json.dumps({"StartRequests": [{"EventId": "nobody"}]}).encode()
        assert ask("POST", server.url + path, header, unknown).status == 400
