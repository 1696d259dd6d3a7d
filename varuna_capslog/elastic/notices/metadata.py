"""Questions to a cloud's metadata server: plain HTTP with bounded times, never through a proxy, never redirected.

The listeners of the three clouds are `MetadataListener`s and ask through an `HttpOpener`, which tests replace.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import math
import socket
import threading
import time
import urllib.parse
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timezone
from typing import Any

from varuna_capslog.elastic.notices.interface import Deadline, PollingListener, Unavailable

__all__ = ["LINK_LOCAL", "Answer", "HttpOpener", "MetadataListener", "json_object"]

LINK_LOCAL = "http://169.254.169.254"
"""Where all three clouds serve metadata; as a number, so that no name has to be resolved."""

ASK_SECONDS = 2.0
"""A metadata server is on the same machine, in effect: one that takes longer is not there."""

LARGEST_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer of any status. Header names are in lower case."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpOpener:
    """Asks by http.client, which knows neither proxies nor redirections. One connection per question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False

    def __call__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, timeout: float = ASK_SECONDS
    ) -> Answer:
        """Asks one question; raises `Unavailable` where there is no answer within `timeout` seconds."""
        parts = urllib.parse.urlsplit(url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        # A host that is not there must not cost a hanging question's long timeout.
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=min(timeout, ASK_SECONDS))
        until = time.monotonic() + timeout
        try:
            connection.connect()
            sock = connection.sock
            with self._held(sock):
                sock.settimeout(timeout)
                connection.request(method, path, body, dict(headers))
                response = connection.getresponse()
                text = _read(response, sock, until)
            lower_headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, text, lower_headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{method} {url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def cut(self) -> None:
        """End all questions that are under way, and answer none from now on."""
        with self._lock:
            self._cut = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _held(self, sock: socket.socket) -> Any:
        with self._lock:
            if self._cut:
                raise OSError("the listener was stopped")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)


@dataclass(eq=False)
class MetadataListener(PollingListener):
    """Base class of the clouds' listeners.

    Attributes:
        endpoint: where the metadata server is.
        opener: asks it.
    """

    _: KW_ONLY
    endpoint: str = LINK_LOCAL
    opener: HttpOpener = field(default_factory=HttpOpener)

    @staticmethod
    @abstractmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        """True where the metadata server at `endpoint` is this cloud's. Raises `Unavailable`."""

    def interrupt(self) -> None:
        self.opener.cut()

    def announced(
        self, answer: Answer, when: str, lead: float, prefix: str = "", at_most: float = math.inf
    ) -> Deadline:
        """The deadline for an announced time of day.

        It counts from the server's own Date, where the answer has one: this host's wall clock may be wrong, and its
        zone plays no part. A time in the past is a deadline of now.

        Args:
            when: the time of day, in either form that `_utc` reads.
            lead: seconds that are left where `when` cannot be read: half a second ago the notice was not there.
            prefix: put before `when` in the log.
            at_most: seconds that the source never gives more of.
        """
        try:
            at = _utc(when)
        except (ValueError, OverflowError):
            return Deadline(self.clock.monotonic() + lead, f"{lead:g} s from when it was read")
        try:
            now, whose = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp(), "the server's clock"
        except (KeyError, ValueError, TypeError, OverflowError):
            now, whose = self.clock.wall(), "this host's clock"
        remaining = max(0.0, at - now)
        if remaining > at_most:
            based_on = f"{at_most:g} s from when it was read ({prefix}{when} is later)"
        else:
            based_on = f"{remaining:.0f} s left until {prefix}{when} by {whose}"
        return Deadline(self.clock.monotonic() + min(remaining, at_most), based_on)


def _read(response: http.client.HTTPResponse, sock: socket.socket, until: float) -> str:
    """The whole body, by `until`, however slowly it trickles."""
    parts, size = [], 0
    while part := response.read1(65536):
        parts.append(part)
        size += len(part)
        remaining = until - time.monotonic()
        if size > LARGEST_ANSWER or remaining <= 0:
            raise OSError(f"the answer is too large or too slow ({size} bytes so far)")
        if not response.isclosed():
            sock.settimeout(remaining)
    return b"".join(parts).decode("utf-8")  # UnicodeDecodeError is a ValueError


def json_object(answer: Answer, name: str) -> dict[str, Any]:
    """The JSON object in an answer. Raises `Unavailable` for anything else."""
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{name} answered no JSON: {answer.body[:60]!r}") from error
    if not isinstance(value, dict):
        raise Unavailable(f"{name} answered no JSON object: {answer.body[:60]!r}")
    return value


def _utc(text: str) -> float:
    """Seconds since 1970 of "Mon, 19 Sep 2016 18:29:47 GMT", or of the same in ISO 8601.

    Raises ValueError or OverflowError.
    """
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
