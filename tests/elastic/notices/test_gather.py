"""From many listeners to one callback: repeated notices, notices close together, and callbacks that fail."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.gather import Announcement, CallbackListener, Gathering, on_notice
from varuna_capslog.elastic.notices.interface import Deadline, Deliver, Kind, Listener, Notice


def notice(kind: Kind, name: str, host: str = "a", at: float | None = None, source: str = "x") -> Notice:
    return Notice(kind, source, name, (host,), None if at is None else Deadline(at, "set"))


class Burst(Listener):
    """Listener that delivers set notices as soon as it is started."""

    source = "burst"

    def __init__(self, *notices: Notice) -> None:
        self.notices = notices
        self.stopped = False

    def start(self, deliver: Deliver) -> None:
        for burst_notice in self.notices:
            deliver(burst_notice)

    def stop(self) -> None:
        self.stopped = True


def gathered(*notices: Notice, window: float = 30.0) -> list[Announcement]:
    """Return the callback's announcements; `stop` ends the window, so nothing depends on its length."""
    announcements: list[Announcement] = []
    Gathering([Burst(*notices)], announcements.append, window).stop()
    return announcements


def test_notices_close_together_are_one_announcement() -> None:
    (announcement,) = gathered(notice(Kind.HINT, "1"), notice(Kind.LEAVE, "2", "b"), notice(Kind.LEAVE, "3"))
    assert [received.id for received in announcement.notices] == ["1", "2", "3"]
    assert announcement.hosts == ("a", "b")
    assert announcement.kind is Kind.LEAVE


def test_the_first_notice_waits_for_the_others_of_its_window() -> None:
    announcements: list[Announcement] = []
    program = CallbackListener("a")
    gathering = Gathering([program], announcements.append, window=3600.0)
    program.announce(id="1")
    time.sleep(0.1)  # the gathering thread has taken the first one
    program.announce(id="2")
    gathering.stop()
    assert [[received.id for received in announcement.notices] for announcement in announcements] == [["1", "2"]]


def test_what_comes_later_is_another_announcement() -> None:
    announcements: queue.Queue[Announcement] = queue.Queue()
    program = CallbackListener("a")
    with Gathering([program], announcements.put, window=0.01):
        program.announce(id="first")
        assert [received.id for received in announcements.get(timeout=60).notices] == ["first"]
        program.announce(id="second")
        assert [received.id for received in announcements.get(timeout=60).notices] == ["second"]


def test_a_repeat_is_told_once_a_stronger_one_again_a_weaker_one_not() -> None:
    (announcement,) = gathered(
        notice(Kind.HINT, "1"),
        notice(Kind.HINT, "1"),
        notice(Kind.LEAVE, "1"),
        notice(Kind.HINT, "1"),
        notice(Kind.LEAVE, "1"),
        notice(Kind.HINT, "1", source="y"),  # another source's name
    )
    assert [(received.source, received.kind) for received in announcement.notices] == [
        ("x", Kind.HINT),
        ("x", Kind.LEAVE),
        ("y", Kind.HINT),
    ]


def test_a_notice_to_leave_now_waits_for_nothing() -> None:
    """Both windows are longer than the test may take."""
    announcements: queue.Queue[Announcement] = queue.Queue()
    program = CallbackListener("a")
    gathering = Gathering([program], announcements.put, window=3600.0)
    try:
        program.announce(Kind.LEAVE, id="1")
        program.announce(Kind.NOW, id="2")
        assert [received.id for received in announcements.get(timeout=60).notices] == ["1", "2"]
        program.announce(Kind.NOW, id="3")
        assert [received.id for received in announcements.get(timeout=60).notices] == ["3"]
    finally:
        gathering.stop()


def test_for_a_host_the_strongest_kind_and_the_earliest_deadline_count() -> None:
    (announcement,) = gathered(
        notice(Kind.HINT, "1", at=5.0), notice(Kind.LEAVE, "2", at=50.0), notice(Kind.LEAVE, "3", at=40.0), window=30.0
    )
    merged = announcement.of("a")
    assert merged is not None
    assert (merged.kind, merged.id) == (Kind.LEAVE, "2")
    assert merged.deadline is not None
    assert merged.deadline.at == 40.0  # a hint's time is no deadline for leaving
    assert announcement.of("b") is None
    (hint,) = gathered(notice(Kind.HINT, "1", at=5.0))
    merged = hint.of("a")
    assert merged is not None
    assert merged.deadline is not None
    assert merged.deadline.at == 5.0


def test_a_callback_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notices: queue.Queue[Notice] = queue.Queue()
    program = CallbackListener("a")

    def fails(_: object) -> None:
        raise RuntimeError("a scheduler's API is down")

    take_back, take_back_too = on_notice(fails), on_notice(notices.put)
    try:
        with Gathering([program], fails, window=0.0):
            program.announce(id="1")
            assert notices.get(timeout=60).id == "1"
            program.announce(id="2")
            assert notices.get(timeout=60).id == "2"
    finally:
        take_back()
        take_back_too()
    assert "RuntimeError: a scheduler's API is down" in caplog.text
    assert "Traceback" not in caplog.text


def test_on_notice_can_be_taken_back() -> None:
    told: list[Notice] = []
    take_back = on_notice(told.append)
    take_back()
    take_back()  # twice does no harm
    gathered(notice(Kind.LEAVE, "1"))
    assert told == []


def test_the_callback_runs_in_a_thread_of_its_own() -> None:
    """A training thread that announces a notice must not execute the change."""
    names: list[str] = []
    program = CallbackListener("a")
    with Gathering([program], lambda _: names.append(threading.current_thread().name)):
        program.announce(Kind.NOW)
    assert names == ["notices"]


def test_announcing_without_a_listener_is_refused() -> None:
    with pytest.raises(CapslogError, match="nobody listens"):
        CallbackListener().announce()


def test_when_one_source_cannot_start_none_is_left_running() -> None:
    class Broken(Burst):
        def start(self, deliver: Deliver) -> None:
            raise CapslogError("no")

    first, never = Burst(), Burst()
    with pytest.raises(CapslogError, match="no"):
        Gathering([first, Broken(), never], lambda _: None)
    assert (first.stopped, never.stopped) == (True, False)
