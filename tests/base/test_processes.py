"""Signals: those that a worker survives, those that still end its children, and the effect of nohup and a closing
terminal. How often garbage is collected.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable

import pytest

from varuna_capslog.base.processes import (
    JOB_SIGNALS,
    collecting_rarely,
    ends_forks_as_usual,
    heard_signals,
    outlives,
    signal_group,
)


def in_a_fork(check: Callable[[], object]) -> None:
    """Run a check in a process whose signals may be changed; fail with its traceback."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert not text, text


def end_of_fork(number: int) -> int:
    """Return the end of a sleeping fork of this process by a signal: minus its number, or 7 if it sleeps on."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b".")
            time.sleep(2.0)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(7)
    os.read(reading, 1)  # it is a separate process by now, however busy the machine is
    for end in (reading, writing):
        os.close(end)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_worker_outlives_ends_its_children() -> None:
    """Workers ignored SIGTERM, and so did their children: `terminate` waited for as long as the child slept, and `with
    multiprocessing.Pool(1)` in a data set never returned (pytorch/pytorch#15950, huggingface/datasets#6089).
    """

    def check() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
        outlives((*JOB_SIGNALS, signal.SIGINT))
        ends_forks_as_usual()
        for number in (*JOB_SIGNALS, signal.SIGINT):
            os.kill(os.getpid(), number)
            with subprocess.Popen(["sleep", "5"]) as child:
                child.send_signal(number)
                assert child.wait() == -number
            assert end_of_fork(number) == (130 if number == signal.SIGINT else -number)

    in_a_fork(check)


def test_under_nohup_a_hangup_stays_ignored() -> None:
    """A run under nohup continues when the terminal closes, and so do the processes that its data set starts."""

    def check() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        outlives(JOB_SIGNALS)
        ends_forks_as_usual()
        with heard_signals((signal.SIGHUP,), lambda number: pytest.fail("it was heard")):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with subprocess.Popen(["sleep", "0.2"]) as child:
            child.send_signal(signal.SIGHUP)
            assert child.wait() == 0

    in_a_fork(check)


def test_ctrl_c_asks_the_worker_and_not_the_processes_of_its_data_set() -> None:
    """The worker may need them to read the rest of the step that it finishes before it stops."""

    def check() -> None:
        signals: list[int] = []
        os.setpgid(0, 0)
        with heard_signals((signal.SIGINT,), signals.append), subprocess.Popen(["sleep", "0.2"]) as child:
            signal_group(os.getpid(), signal.SIGINT)
            assert child.wait() == 0
        assert signals == [signal.SIGINT]

    in_a_fork(check)


def test_garbage_is_collected_rarely_within_and_as_before_behind() -> None:
    before = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
