"""A file as a source: its fields, files that are half written, and files that are written again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.elastic.notices.support import WALL, Inbox, SetClock
from varuna_capslog.elastic.notices.interface import Kind, Notice, Round
from varuna_capslog.elastic.notices.signals import FileListener


def listener(path: Path, clock: SetClock | None = None) -> FileListener:
    return FileListener(path, "node-2", clock=clock or SetClock())


def write(path: Path, text: str, at: float = WALL) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


def one(notices: tuple[Notice, ...]) -> Notice:
    assert len(notices) == 1
    return notices[0]


def test_an_empty_file_asks_this_host_to_leave(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    file = listener(path)
    assert file.ask().notices == ()
    write(path, "")
    notice = one(file.ask().notices)
    assert (notice.kind, notice.hosts) == (Kind.LEAVE, ("node-2",))
    assert notice.deadline is not None
    assert notice.deadline.remaining(1000.0) == 30.0
    assert file.ask().notices == ()  # told once


def test_all_it_may_say(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    content = {"kind": "now", "seconds": 12, "hosts": ["node-5", "node-6"], "id": "drain-7", "detail": "kernel update"}
    write(path, json.dumps(content), WALL - 5.0)  # written five seconds ago
    notice = one(listener(path).ask().notices)
    assert (notice.kind, notice.id, notice.detail) == (Kind.NOW, "drain-7", "kernel update")
    assert notice.hosts == ("node-5", "node-6")
    assert notice.deadline is not None
    assert notice.deadline.remaining(1000.0) == 7.0


def test_a_question_that_fails_unexpectedly_is_asked_again(tmp_path: Path, monkeypatch, caplog) -> None:
    """Regression: the thread of the source died, and its later notices were missed."""
    file, inbox = FileListener(tmp_path / "leave", "node-2", interval=0.01), Inbox()
    ask, failures = file.ask, [KeyError("no such field"), RuntimeError("odd")]
    monkeypatch.setattr(file, "ask", lambda: _raised(failures.pop()) if failures else ask())
    (tmp_path / "leave").touch()
    file.start(inbox)
    assert inbox.next().kind is Kind.LEAVE
    assert "notices of file are not heard for now: odd" in caplog.text
    file.stop()


def test_a_source_that_ends_is_named(tmp_path: Path, caplog) -> None:
    file = FileListener(tmp_path / "leave", "node-2", interval=0.01)
    (tmp_path / "leave").touch()
    file.start(lambda notice: _raised(LookupError("nobody expected this")))
    file._threads[0].join(5)
    assert "the thread notices-file-0 failed with LookupError: nobody expected this" in caplog.text
    file.stop()


def _raised(error: Exception) -> Round:
    raise error


def test_a_file_from_the_future_counts_as_written_now(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    write(path, "", WALL + 3600.0)
    notice = one(listener(path).ask().notices)
    assert notice.deadline is not None
    assert notice.deadline.remaining(1000.0) == 30.0


def test_another_text_is_another_notice_and_so_is_a_file_that_came_back(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    file = listener(path)
    write(path, '{"kind": "hint"}')
    first = one(file.ask().notices)
    write(path, '{"kind": "leave"}', WALL + 1.0)
    second = one(file.ask().notices)
    assert first.id != second.id
    path.unlink()
    assert file.ask().notices == ()
    write(path, '{"kind": "leave"}', WALL + 2.0)
    assert one(file.ask().notices).id not in (first.id, second.id)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"kind": "leave", "seco', "no JSON"),
        ("[]", "one JSON object"),
        ('{"kind": "go"}', "'go'"),
        ('{"kind": ["leave"]}', "'leave'"),
        ('{"second": 3}', "did you mean 'seconds'"),
        ('{"seconds": -1}', "seconds"),
        ('{"seconds": NaN}', "seconds"),
        ('{"seconds": Infinity}', "seconds"),
        ('{"hosts": "node-1"}', "hosts"),
        ('{"hosts": [7]}', "hosts"),
        ('{"id": ""}', "id"),
    ],
)
def test_what_it_may_not_say_is_refused_in_one_line(
    text: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "leave"
    file = listener(path)
    write(path, text)
    for _ in range(3):
        assert file.ask().notices == ()
    assert len(caplog.records) == 1
    assert named in caplog.text
    assert "Traceback" not in caplog.text
    write(path, "{}", WALL + 1.0)  # mended
    assert one(file.ask().notices).kind is Kind.LEAVE


def test_in_a_thread(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    inbox = Inbox()
    file = FileListener(path, "node-2", interval=0.01)
    file.start(inbox)
    try:
        path.write_text('{"kind": "hint"}')
        # An empty file may be seen first: it was opened before it was written.
        while inbox.next().kind is not Kind.HINT:
            pass
    finally:
        file.stop()


def test_a_file_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "leave"
    path.mkdir()
    file = FileListener(path, interval=0.01)
    file.start(Inbox())
    while not caplog.records:
        file._stopped.wait(0.01)
    file.stop()
    assert len(caplog.records) == 1
    assert "leave is refused: " in caplog.text
    assert "Is a directory" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge"])
def test_a_file_that_is_put_where_none_was_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Regression: a pipe in a run's notices/ blocked the listener for ever; a file put there later was missed."""
    path = tmp_path / "leave"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b" " * (1 << 17))
    file = listener(path)
    for _ in range(2):
        assert file.ask().notices == ()
    assert len(caplog.records) == 1
    write(tmp_path / "later", "{}")
    if kind == "folder":
        path.rmdir()
    (tmp_path / "later").replace(path)
    assert one(file.ask().notices).kind is Kind.LEAVE
