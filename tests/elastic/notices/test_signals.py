"""Signals as a source: their meaning under each launcher, in this process and in forked ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.elastic.notices.support import WALL, Inbox, SetClock
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices import signals
from varuna_capslog.elastic.notices.interface import Kind


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) == handler
        signal.signal(number, handler)


def test_sigterm_is_leave_now_and_sigusr1_is_leave() -> None:
    inbox, clock = Inbox(), SetClock()
    listener = signals.SignalListener(signals.plain(15.0), "pod-4", clock)
    listener.start(inbox)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        leave = inbox.next()
        clock.advance(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        now = inbox.next()
    finally:
        listener.stop()
    assert (leave.kind, leave.detail, leave.hosts) == (Kind.LEAVE, "SIGUSR1", ("pod-4",))
    assert (now.kind, now.detail) == (Kind.NOW, "SIGTERM")
    assert now.deadline is not None
    assert now.deadline.at == 1001.0 + 15.0
    assert leave.id != now.id


def test_a_terminal_that_closes_is_leave_now_unless_nohup_spares_the_run() -> None:
    """A run ended by a closed ssh session lost all steps since its last checkpoint (ultralytics/ultralytics#918)."""
    before = signal.getsignal(signal.SIGHUP)
    for spared in (False, True):
        inbox = Inbox()
        signal.signal(signal.SIGHUP, signal.SIG_IGN if spared else signal.SIG_DFL)
        listener = signals.SignalListener(signals.signal_meanings({"SLURM_JOB_ID": "7"} if spared else {}))
        listener.start(inbox)
        try:
            if spared:
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            else:
                os.kill(os.getpid(), signal.SIGHUP)
                assert inbox.next().kind == Kind.NOW
        finally:
            listener.stop()
            signal.signal(signal.SIGHUP, before)


def test_a_handler_that_was_there_is_called_too_and_comes_back() -> None:
    called: list[int] = []

    def theirs(number: int, _: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        inbox = Inbox()
        listener = signals.SignalListener(signals.plain())
        listener.start(inbox)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inbox.next().detail == "SIGUSR1"
        listener.stop()
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_cannot_start_it() -> None:
    raised: list[Exception] = []

    def start() -> None:
        try:
            signals.SignalListener(signals.plain()).start(Inbox())
        except CapslogError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


CHILD = """
import os, signal, sys, threading, time
from varuna_capslog.elastic.notices.signals import SignalListener, plain
heard = []
listener = SignalListener(plain())
listener.start(heard.append)
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), len(heard))
else:
    thread = threading.Thread(target=listener.stop)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


def test_a_forked_child_ends_as_if_there_were_no_handler() -> None:
    """A data loader's worker that swallowed SIGTERM would hang its parent."""
    done = subprocess.run([sys.executable, "-c", CHILD, "fork"], capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == [str(int(signal.SIGTERM)), "0"], done.stderr


def test_once_stopped_from_another_thread_a_signal_does_what_it_did_before() -> None:
    """Another thread cannot remove the handler; it must not swallow the signal that ends the process."""
    done = subprocess.run([sys.executable, "-c", CHILD, "stop"], capture_output=True, text=True, timeout=180)
    assert done.returncode == -signal.SIGTERM, done.stderr


@pytest.mark.parametrize(
    ("environ", "number", "left"),
    [
        ({}, signal.SIGTERM, 30.0),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, signal.SIGTERM, 15.0),
        ({"SLURM_JOB_ID": "7"}, signal.SIGTERM, 30.0),
        ({"SLURM_JOB_ID": "7"}, signal.SIGUSR1, 60.0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(WALL) + 45)}, signal.SIGUSR1, 45.0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(WALL) + 9999)}, signal.SIGUSR1, 60.0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(WALL) - 5)}, signal.SIGTERM, 0.0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "UNLIMITED"}, signal.SIGUSR1, 60.0),
    ],
)
def test_the_budget_by_launcher(environ: dict[str, str], number: signal.Signals, left: float) -> None:
    inbox, clock = Inbox(), SetClock()
    listener = signals.SignalListener(signals.signal_meanings(environ), clock=clock)
    listener.start(inbox)
    try:
        os.kill(os.getpid(), number)
        notice = inbox.next()
    finally:
        listener.stop()
    assert notice.deadline is not None
    assert notice.deadline.remaining(1000.0) == left
