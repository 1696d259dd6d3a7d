"""Notices of clouds, from their metadata servers."""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import json
import logging
import math
import socket
import threading
import time
import urllib.parse
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timezone
from typing import Any, ClassVar
from urllib.parse import quote

from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice, PollingListener, Round, Unavailable

__all__ = ["LINK_LOCAL", "Answer", "AwsListener", "AzureListener", "GcpListener", "HttpOpener", "MetadataListener"]


# -- HTTP requests to a cloud's metadata server: with time limits, without proxies and redirections.
#
# The listeners of the three clouds are `MetadataListener`s; they use an `HttpOpener`, which tests replace.


LINK_LOCAL = "http://169.254.169.254"
"""Address where all three clouds serve metadata; a number, so that no name has to be resolved."""

ASK_SECONDS = 2.0
"""Seconds for an answer. A metadata server is as near as the machine itself: one that takes longer is not there."""

LARGEST_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP response of any status. Header names are in lower case."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpOpener:
    """Sends requests with http.client, which uses neither proxies nor redirections. One connection per request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False

    def __call__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, timeout: float = ASK_SECONDS
    ) -> Answer:
        """Send one request and return the answer. Raises `Unavailable` where none comes within `timeout` seconds."""
        parts = urllib.parse.urlsplit(url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        # A request that may hang has a long timeout, which an absent host must not cost.
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
        """Break off all requests under way; later ones raise `Unavailable`."""
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
    """Base class of the clouds' listeners. endpoint: of the metadata server. opener: sends the requests."""

    _: KW_ONLY
    endpoint: str = LINK_LOCAL
    opener: HttpOpener = field(default_factory=HttpOpener)

    @staticmethod
    @abstractmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        """True where the metadata server at `endpoint` is this cloud's. Raises `Unavailable`."""

    def interrupt(self) -> None:
        self.opener.cut()

    def deadline_of(
        self, answer: Answer, when: str, lead: float, prefix: str = "", at_most: float = math.inf
    ) -> Deadline:
        """Return the deadline for an announced time; a time in the past means now.

        The remaining seconds count from the server's own Date header, if the answer has one: this host's clock or time
        zone may be wrong.

        Args:
            when: the announced time, in either form that `_utc` reads; `prefix` is put before it in the log.
            lead: remaining seconds where `when` cannot be read: the notice is at most half a second old.
            at_most: most seconds that the source ever gives.
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
    """Read the whole body. Raises OSError where it is not complete at `until`, or too large."""
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
    """Return the JSON object in an answer. Raises `Unavailable` where it holds none."""
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{name} answered no JSON: {answer.body[:60]!r}") from error
    if not isinstance(value, dict):
        raise Unavailable(f"{name} answered no JSON object: {answer.body[:60]!r}")
    return value


def _utc(text: str) -> float:
    """Return seconds since 1970 of "Mon, 19 Sep 2016 18:29:47 GMT" or ISO 8601. Raises ValueError or OverflowError."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


# -- Notices of AWS: the interruption of a spot instance and the rebalance recommendation, through IMDSv2.
#
# `PUT /latest/api/token` gives a session token. `spot/instance-action` answers 404 until two minutes before an
# interruption (hibernation: until it begins), `events/recommendations/rebalance` until the instance is at risk. Both
# are "best effort". Sources: EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance
# recommendations". The guide advises to ask every 5 s; we ask every half second.


TOKEN_SECONDS = 21600  # the longest lifetime that the server grants
TOKEN = "/latest/api/token"
LIFE = "X-aws-ec2-metadata-token-ttl-seconds"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(eq=False)
class AwsListener(MetadataListener):
    """Listener of EC2's metadata service. lead: most seconds from notice to interruption."""

    source: ClassVar[str] = "aws"

    lead: ClassVar[float] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = threading.Lock()  # of the token
        self._token = ""
        self._renew_at = 0.0

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("PUT", endpoint + TOKEN, {LIFE: "60"}, timeout=timeout)
        return answer.status == 200 and bool(answer.body.strip())

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask_action, self.ask_rebalance)  # in two threads: failures of one must not slow the other

    def ask_action(self) -> Round:
        """Ask once if the instance will be interrupted."""
        answer = self._get(ACTION)
        if answer is None:
            return Round((), self.interval)
        value = json_object(answer, ACTION)
        action, when = value.get("action"), str(value.get("time", ""))
        if not isinstance(action, str) or not action:
            raise Unavailable(f"{ACTION} named no action: {answer.body[:60]!r}")
        kind, deadline = Kind.LEAVE, self.deadline_of(answer, when, self.lead, f"{action} at ", self.lead)
        if action == "hibernate":  # begins together with its notice
            kind, deadline = Kind.NOW, Deadline(self.clock.monotonic(), "hibernation gives no time")
        notice = Notice(kind, self.source, f"{action}@{when}", (self.host,), deadline, detail=f"spot {action}")
        return Round((notice,), self.interval)

    def ask_rebalance(self) -> Round:
        """Ask once if the instance is at risk."""
        answer = self._get(REBALANCE)
        if answer is None:
            return Round((), self.interval)
        when = str(json_object(answer, REBALANCE).get("noticeTime", ""))
        name = f"rebalance@{when}"
        notice = Notice(Kind.HINT, self.source, name, (self.host,), detail="rebalance recommendation")
        return Round((notice,), self.interval)

    def _get(self, path: str) -> Answer | None:
        """Return the answer; None for status 404, no notice. Replaces a refused token once."""
        for _attempt in range(2):
            token = self._fresh_token()
            answer = self.opener("GET", self.endpoint + path, {"X-aws-ec2-metadata-token": token})
            if answer.status == 401:
                with self._lock:
                    if self._token == token:  # else the other thread has replaced it already
                        self._token = ""
                continue
            if answer.status == 404:
                return None
            if answer.status != 200:
                raise Unavailable(f"{path} answered {answer.status}")
            return answer
        raise Unavailable(f"{path} refuses a token that was just given (401)")

    def _fresh_token(self) -> str:
        """Return the token; fetch a new one where there is none or half its lifetime is over."""
        with self._lock:
            if not self._token or self.clock.monotonic() >= self._renew_at:
                answer = self.opener("PUT", self.endpoint + TOKEN, {LIFE: str(TOKEN_SECONDS)})
                token = answer.body.strip()
                if answer.status != 200 or not (token and token.isascii() and token.isprintable()):
                    raise Unavailable(f"{TOKEN} gave no token ({answer.status}); a container needs a hop limit of 2")
                self._token = token
                self._renew_at = self.clock.monotonic() + TOKEN_SECONDS / 2
            return self._token


# -- Notices of Azure: Scheduled Events, and their acknowledgement.
#
# The first request turns the service on for the machine, and its answer may take two minutes, so the listener is
# started with the job. After a day without requests the service is off again. The document's incarnation grows with
# every change. An event names all machines that it concerns; machines of one scale set may see each other's events.
# Sending "StartRequests" approves an event for *all* its machines and may start it at once, so only `host_left` does.
# Source: Azure documentation, "Scheduled Events for Linux VMs", API version 2020-07-01.


_log = logging.getLogger(__name__)

COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
FIRST_ANSWER_SECONDS = 130.0
ACKNOWLEDGE_TRIES = 3

KINDS = {
    "Preempt": Kind.LEAVE,
    "Terminate": Kind.LEAVE,
    "Reboot": Kind.LEAVE,
    "Redeploy": Kind.LEAVE,
    "Freeze": Kind.HINT,  # the machine stands still for some seconds and keeps its memory
}


@dataclass(eq=False)
class AzureListener(MetadataListener):
    """Listener of Azure's instance metadata service.

    Attributes:
        machine: this machine's name in Azure; default: asked from the service. Until it is known, events count as
            hints: they may be for another machine.
        lead: least seconds before a preemption, used where its time is missing or cannot be read.
    """

    source: ClassVar[str] = "azure"

    machine: str | None = None
    lead: ClassVar[float] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = threading.Lock()  # for `_pending`, which host_left reads in another thread
        self._pending: dict[str, tuple[str, ...]] = {}  # not yet begun: event id -> machines
        self._incarnation: object = None
        self._answered = False

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("GET", endpoint + COMPUTE, HEADERS, timeout=timeout)
        return answer.status == 200 and json_object(answer, "compute") is not None

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask,)

    def ask(self) -> Round:
        """Ask once for the document of events; return its notices if it has changed."""
        timeout = 2.0 if self._answered else FIRST_ANSWER_SECONDS
        answer = self.opener("GET", self.endpoint + EVENTS, HEADERS, timeout=timeout)
        if answer.status != 200:
            raise Unavailable(f"scheduled events answered {answer.status}: {answer.body[:80]!r}")
        document = json_object(answer, "scheduled events")
        events = document.get("Events")
        if not isinstance(events, list):
            raise Unavailable("scheduled events answered a document without a list of Events")
        self._answered = True
        if self.machine is None:
            self.machine = self._own_name()
        incarnation = (document.get("DocumentIncarnation"), self.machine)
        if incarnation == self._incarnation:
            return Round((), self.interval)
        notices, pending = [], {}
        for event in events:
            try:
                notice = self._notice(event, answer)
            except (KeyError, TypeError, AttributeError):
                _log.warning("azure: an event that cannot be read is passed over: %.200r", event)
                continue
            if notice is None:
                continue
            notices.append(notice)
            if notice.kind is Kind.LEAVE and self.machine is not None:
                pending[notice.id] = notice.resources
        with self._lock:
            for gone in self._pending.keys() - {notice.id for notice in notices}:
                _log.warning("azure: event %s was withdrawn or is over", gone)
            self._pending = pending
        self._incarnation = incarnation
        return Round(tuple(notices), self.interval)

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Approve the events that were announced for this machine, whose ranks have all left.

        An event that concerns further machines is approved only if all of them are in `resources_left`. Takes at most
        a few seconds; an event that could not be approved begins at its scheduled time.
        """
        with self._lock:
            pending = dict(self._pending)
        left_machines = {self.machine, *resources_left}
        ready = []
        for event, machines in pending.items():
            if waiting := [name for name in machines if name not in left_machines]:
                _log.warning("azure: event %s is not approved: %s may still have ranks", event, ", ".join(waiting))
            else:
                ready.append(event)
        return tuple(event for event in ready if self._approve(event))

    def _approve(self, event: str) -> bool:
        body = json.dumps({"StartRequests": [{"EventId": event}]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        why: object = ""
        for _attempt in range(ACKNOWLEDGE_TRIES):
            try:
                answer = self.opener("POST", self.endpoint + EVENTS, headers, body)
            except Unavailable as error:
                why = error
                continue
            if answer.status == 200:
                with self._lock:
                    self._pending.pop(event, None)
                return True
            why = f"it answered {answer.status}"
        _log.warning("azure: event %s could not be approved and begins at its own time: %s", event, why)
        return False

    def _own_name(self) -> str | None:
        try:
            answer = self.opener("GET", self.endpoint + NAME, HEADERS)
        except Unavailable:
            return None
        return answer.body.strip() or None if answer.status == 200 else None

    def _notice(self, event: Mapping[str, Any], answer: Answer) -> Notice | None:
        """Return the notice of an event; None if it is for other machines or of an unknown type."""
        name, kind = str(event["EventId"]), KINDS.get(event["EventType"])
        if not isinstance(event["Resources"], list):
            raise TypeError("Resources is no list")
        machines = tuple(str(machine) for machine in event["Resources"])
        for_us = self.machine is None or self.machine in machines
        if kind is None or not for_us or event["EventStatus"] not in ("Scheduled", "Started"):
            return None
        begun = event["EventStatus"] == "Started"
        if kind is Kind.LEAVE and begun:
            kind = Kind.NOW
        detail = f"{event['EventType']} {str(event['EventStatus']).lower()}"
        if self.machine is None:
            kind, detail = Kind.HINT, f"{detail} for {', '.join(machines)}; this machine's name is not known yet"
        deadline = Deadline(self.clock.monotonic(), "it has begun")
        if not begun:
            deadline = self.deadline_of(answer, str(event.get("NotBefore") or ""), self.lead)
        return Notice(kind, self.source, name, (self.host,), deadline, machines, detail)


# -- Notices of Google Cloud: preemption and host maintenance, by requests that hang until the value changes.
#
# `instance/preempted` turns from FALSE to TRUE; the machine is switched off up to 30 s later (120 s where it was
# created with that preemption notice). `instance/maintenance-event` turns from NONE 60 s ahead (machines with GPUs:
# longer), and only for machines that query it, as our listener does. A server in maintenance answers 503. Sources:
# Compute Engine documentation, "Spot VMs", "Query metadata server for maintenance event notices", "wait_for_change".


ROOT = "/computeMetadata/v1/"
INSTANCE = ROOT + "instance/"
FLAVOR = {"Metadata-Flavor": "Google"}


MAINTENANCE_SECONDS = 60.0
"""Seconds from the announcement of a maintenance to its beginning."""


@dataclass(slots=True)
class _Key:
    """Watched value of the server, used by one thread. idle: value without a notice. lead: seconds to the deadline."""

    name: str
    idle: str
    kinds: dict[str, Kind]
    lead: float
    value: str = ""
    etag: str = ""  # empty: ask without waiting
    episode: int = 0
    heard_at: float | None = None


@dataclass(eq=False)
class GcpListener(MetadataListener):
    """Listener of Compute Engine's metadata server; one thread each for preemption and maintenance.

    Attributes:
        preemption_seconds: from TRUE to the switch-off.
        hold: most seconds that a request hangs; so long it may take to notice a server that has vanished.
    """

    source: ClassVar[str] = "gcp"

    preemption_seconds: float = 30.0
    hold: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        maintenance = {"TERMINATE_ON_HOST_MAINTENANCE": Kind.LEAVE, "MIGRATE_ON_HOST_MAINTENANCE": Kind.HINT}
        self._keys = (
            _Key("preempted", "FALSE", {"TRUE": Kind.LEAVE}, self.preemption_seconds),
            _Key("maintenance-event", "NONE", maintenance, MAINTENANCE_SECONDS),
        )

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("GET", endpoint + ROOT, FLAVOR, timeout=timeout)
        return answer.status == 200 and _is_google(answer)

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return tuple(functools.partial(self.ask, key) for key in self._keys)

    def ask(self, key: _Key) -> Round:
        """Ask for one value: the first time and after a failure for the present one, else for the next change."""
        waits = bool(key.etag)
        query = f"?wait_for_change=true&timeout_sec={self.hold:.0f}&last_etag={quote(key.etag)}" if waits else ""
        sent = self.clock.monotonic()
        try:
            answer = self.opener("GET", self.endpoint + INSTANCE + key.name + query, FLAVOR, timeout=self.hold + 2.0)
            value = self._value(key, answer)
        except Unavailable:
            key.etag = ""
            raise
        now = self.clock.monotonic()
        changed = value != key.value
        notices = self._notices(key, value, now, waits) if changed else ()
        key.value, key.heard_at = value, now
        key.etag = answer.headers.get("etag", "")
        hung = waits and now - sent >= min(1.0, self.hold / 2)
        # A server that answers waiting requests at once is asked at most twice a second.
        pause = 0.0 if changed or hung or (key.etag and not waits) else self.interval
        return Round(notices, pause)

    def _value(self, key: _Key, answer: Answer) -> str:
        if answer.status != 200:
            raise Unavailable(f"{key.name} answered {answer.status}")
        if not _is_google(answer):
            raise Unavailable(f"{key.name} was answered by something else than Google's metadata server")
        value = answer.body.strip()
        if value != key.idle and value not in key.kinds and value != key.value:
            _log.warning("gcp: %s has a value that is not known, %r; it is passed over", key.name, value[:60])
        return value

    def _notices(self, key: _Key, value: str, now: float, waited: bool) -> tuple[Notice, ...]:
        if value == key.idle:
            key.episode += 1  # the next value begins another episode
        kind = key.kinds.get(value)
        if kind is None:
            return ()
        if waited or key.heard_at is None:
            deadline = Deadline(now + key.lead, f"{key.lead:g} s from when it was read")
        else:  # it may have changed at any time since the last answer
            deadline = Deadline(max(now, key.heard_at + key.lead), f"{key.lead:g} s from the last answer before it")
        name = f"{key.name}-{key.episode}-{value}"
        return (Notice(kind, self.source, name, (self.host,), deadline, detail=f"{key.name} {value}"),)


def _is_google(answer: Answer) -> bool:
    return answer.headers.get("metadata-flavor") == "Google"
