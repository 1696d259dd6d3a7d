"""Connections to one TCPStore server, each with the thread that alone uses it.

A call to torch's store waits in C++ and cannot be interrupted. A thread per connection lets the caller give up a call
that hangs. Every call under way has a connection to itself, and one more is kept open. Broken connections are opened
again, but only to the same server: one that was started anew is another store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from varuna_capslog.elastic.store.log import StoreGone

__all__ = ["ANSWER_SECONDS", "CLOSE_SECONDS", "OPEN_SECONDS", "StoreLine", "StoreLines", "first_line"]

Value = TypeVar("Value")
Job = Callable[[dist.TCPStore], Value]

ANSWER_SECONDS = 3.0
"""A store that takes longer to answer is gone."""

OPEN_SECONDS = 12.0
"""For a new connection: torch asks the name server for the name of every peer, and one lost answer costs 5 s."""

BESIDE_SECONDS = 0.3
"""After so long another connection is tried beside one that is being opened: the next question is seldom lost, too."""

CLOSE_SECONDS = 0.5
_MOST_BESIDE = 2


class StoreLines:
    """All connections of one client; for the arguments see `TcpMembershipStore`."""

    def __init__(self, host: str, port: int, identity: str | None, answer_seconds: float | None) -> None:
        self.host, self.port, self.address = host, port, f"{host}:{port}"
        self.answer_seconds = answer_seconds or ANSWER_SECONDS
        self.open_seconds = OPEN_SECONDS
        self.identity = identity or ""
        self.opening: dict[concurrent.futures.Future[str], threading.Thread] = {}
        self._lock = threading.Lock()
        self._idle: list[StoreLine] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._closed = False
        self._spares = threading.Semaphore(1)
        self._give_back(self._open())
        self.want_spare()

    def call(self, job: Job[Value], seconds: float | None = None) -> Value:
        """What `job` gives, on a connection of its own meanwhile; on a fresh one where that turns out broken."""
        bound = self.answer_seconds if seconds is None else seconds
        line = self._take_idle()
        for last in (False, True):
            line = line or self._open()
            try:
                value = line.call(job, bound)
            except (RuntimeError, concurrent.futures.TimeoutError) as error:
                line.close()
                self._drop_idle()
                if last or isinstance(error, concurrent.futures.TimeoutError):
                    raise self._gone(error) from error
                line = None
            else:
                self._give_back(line)
                return value
        raise AssertionError("the last attempt returns or raises")

    def line(self) -> StoreLine:
        """A connection of the caller's own, to be closed by it."""
        return self._take_idle() or self._open()

    def close(self) -> None:
        """Ends all idle connections and waits, for a bounded time, for those that are in use or being opened."""
        with self._lock:
            self._closed = True
            threads = [one for one in self._threads if one is not threading.current_thread()]
        self._drop_idle()
        opening = list(self.opening.values())
        # A thread that is in C++ while Python ends aborts the process. One that waits in the store cannot be woken, but
        # one that asks the name server comes back.
        for some, seconds in ((opening, OPEN_SECONDS / 2), (threads, CLOSE_SECONDS)):
            until = time.monotonic() + seconds
            for thread in some:
                thread.join(max(0.0, until - time.monotonic()))

    def _open(self) -> StoreLine:
        """A connection to the store that is known. A network that breaks it while it is made has two more chances."""
        for last in (False, False, True):
            try:
                return self._dial()
            except (RuntimeError, concurrent.futures.TimeoutError) as error:
                if last or isinstance(error, concurrent.futures.TimeoutError):
                    raise self._gone(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _dial(self) -> StoreLine:
        """Raises RuntimeError (torch's) where the connection breaks while it is made."""
        if self._closed:
            raise StoreGone(f"this client of the store at {self.address} was closed")
        try:
            # TCPStore would try again and again where no server listens.
            socket.create_connection((self.host, self.port), self.answer_seconds).close()
        except OSError as error:
            raise StoreGone(f"the store at {self.address} is gone: {error.strerror or error}") from error
        line, identity = self._first_to_answer(max(self.open_seconds, self.answer_seconds))
        with self._lock:
            self.identity = self.identity or identity
        if identity != self.identity:
            line.close()
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")
        return line

    def _first_to_answer(self, seconds: float) -> tuple[StoreLine, str]:
        """A new connection and what the server calls itself. One that takes long gets another beside it."""
        until = time.monotonic() + seconds
        lines: dict[concurrent.futures.Future[str], StoreLine] = {}
        try:
            while True:
                line = StoreLine(self.host, self.port, seconds)
                lines[question := line.send(_identity)] = line
                with self._lock:
                    self._threads.add(line.thread)
                    self.opening[question] = line.thread
                question.add_done_callback(lambda answered: self.opening.pop(answered, None))
                wait = until - time.monotonic()
                if len(lines) < _MOST_BESIDE:
                    wait = min(wait, BESIDE_SECONDS)
                done = concurrent.futures.wait(lines, max(0.0, wait), concurrent.futures.FIRST_COMPLETED).done
                if done:
                    identity = (answer := done.pop()).result()
                    return lines.pop(answer), identity
                if time.monotonic() >= until:
                    raise concurrent.futures.TimeoutError
        finally:
            for other in lines.values():
                other.close()

    def _take_idle(self) -> StoreLine | None:
        with self._lock:
            line = self._idle.pop() if self._idle else None
            short = not self._idle
        if short:
            self.want_spare()
        return line

    def want_spare(self) -> None:
        """Opens one more connection in the background, so that an urgent call finds one."""

        def open_it() -> None:
            try:
                with contextlib.suppress(StoreGone):  # the call that needs it will say so
                    self._give_back(self._open())
            finally:
                self._spares.release()

        if self._spares.acquire(blocking=False):
            threading.Thread(target=open_it, name="store-spare", daemon=True).start()

    def _give_back(self, line: StoreLine) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def _drop_idle(self) -> None:
        with self._lock:
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def _gone(self, error: BaseException) -> StoreGone:
        silent = isinstance(error, concurrent.futures.TimeoutError)
        why = f"no answer within {self.answer_seconds:g} s" if silent else first_line(error)
        return StoreGone(f"the store at {self.address} is gone: {why}")


class StoreLine:
    """One connection and the thread that alone uses it, so that a caller can give up a call that hangs in C++."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        arguments = (self._jobs, host, port, seconds)
        self.thread = threading.Thread(target=_serve, args=arguments, name="store-line", daemon=True)
        self.thread.start()

    def call(self, job: Job[Value], seconds: float) -> Value:
        """Raises RuntimeError (torch's) or TimeoutError; after either the line is of no use any more."""
        return self.send(job).result(seconds)

    def send(self, job: Job[Value]) -> concurrent.futures.Future[Value]:
        """Queues a call; its result comes through the future."""
        answer: concurrent.futures.Future[Value] = concurrent.futures.Future()
        self._jobs.put((job, answer))
        return answer

    def close(self) -> None:
        """The connection ends with the call that is under way."""
        self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Any], host: str, port: int, seconds: float) -> None:
    """The thread of a line: opens the connection at the first call, then answers one call after the other."""
    client: dist.TCPStore | None = None
    timeout = datetime.timedelta(seconds=seconds)
    while (task := jobs.get()) is not None:
        job, answer = task
        try:
            if client is None:
                client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            answer.set_result(job(client))
        except Exception as error:
            answer.set_exception(error)


def _identity(client: dist.TCPStore) -> str:
    return client.get("identity").decode()


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's, whose other lines are C++ stacks."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
