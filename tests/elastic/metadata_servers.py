"""Stand-ins for the metadata servers of AWS, Google Cloud and Azure, on a port of this machine.

They follow the protocols in every point that a listener could get wrong: required tokens and headers, 404 before there
is a notice, requests that hang until a value changes, a document whose incarnation grows, an approval that starts an
event. A person or a test sets the announcements; `stop` and `start` simulate an outage; `say_instead` gives invalid
answers.
"""

from __future__ import annotations

import email.utils
import hashlib
import itertools
import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["FakeAws", "FakeAzure", "FakeGcp", "MetadataServer", "Reply", "Request"]


@dataclass(frozen=True)
class Request:
    """HTTP request. Header names are in lower case; query parameters are decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: str


@dataclass(frozen=True)
class Reply:
    """HTTP answer; a Date is added."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataServer:
    """HTTP server on 127.0.0.1 with a thread per request. A context manager; `url` is its address.

    Args:
        wall: seconds since 1970 as the server sees them; its Date follows.
        host, port: where it listens; port 0 picks a free one, which it keeps from then on.
    """

    def __init__(self, wall: Callable[[], float] = time.time, host: str = "127.0.0.1", port: int = 0) -> None:
        self.wall = wall
        self.host = host
        self.port = port
        self.requests: list[Request] = []
        self.changed = threading.Condition()  # guards all that is announced
        self._instead: list[Reply] = []
        self._always: Reply | None = None
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def answer(self, request: Request) -> Reply:
        """Return the cloud's regular answer."""
        raise NotImplementedError

    def say_instead(self, *replies: Reply, always: bool = False) -> None:
        """Answer the next requests with these replies, or all with the first; without replies answer as usual again."""
        with self.changed:
            self._always = replies[0] if always else None
            self._instead = [] if always else list(replies)

    def start(self) -> None:
        """Serve; the port must be free."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def _serve(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                request = Request(
                    self.command,
                    parts.path,
                    dict(urllib.parse.parse_qsl(parts.query)),
                    {name.lower(): value for name, value in self.headers.items()},
                    self.rfile.read(length).decode(),
                )
                self._reply(owner._respond(request))

            do_GET = do_PUT = do_POST = _serve

            def _reply(self, reply: Reply) -> None:
                body = reply.body.encode()
                self.send_response_only(reply.status)
                headers = {"Date": email.utils.formatdate(owner.wall(), usegmt=True), **reply.headers}
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away while its request hung

        self._server = Server((self.host, self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Vanish: hanging requests are dropped, new ones refused. Announcements are kept for the next `start`."""
        if self._server is None or self._thread is None:
            return
        server, thread = self._server, self._thread
        self._server = self._thread = None
        server.shutdown()
        server.server_close()
        with self.changed:
            self.changed.notify_all()
        thread.join(5.0)

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _respond(self, request: Request) -> Reply:
        with self.changed:
            self.requests.append(request)
            if self._always is not None:
                return self._always
            if self._instead:
                return self._instead.pop(0)
        return self.answer(request)

    def _hang(self, until: Callable[[], bool], seconds: float) -> None:
        """Wait, holding `changed`, until `until` is true or the time is over; drop the request if the server stops."""
        server = self._server
        self.changed.wait_for(lambda: until() or self._server is not server, seconds)
        if self._server is not server:
            raise ConnectionAbortedError("the server has stopped")


class FakeAws(MetadataServer):
    """The instance metadata service of EC2, version 2 only (`HttpTokens: required`)."""

    def __init__(self, wall: Callable[[], float] = time.time, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(wall, host, port)
        self._tokens: dict[str, float] = {}
        self._action: str | None = None
        self._rebalance: str | None = None

    def interrupt(self, action: str = "terminate", seconds: float = 120.0) -> None:
        """Announce that the instance ends in `seconds`."""
        with self.changed:
            self._action = json.dumps({"action": action, "time": _iso(self.wall() + seconds)})

    def recommend_rebalance(self) -> None:
        """Announce that the instance is at risk."""
        with self.changed:
            self._rebalance = json.dumps({"noticeTime": _iso(self.wall())})

    def forget_tokens(self) -> None:
        """Invalidate all tokens."""
        with self.changed:
            self._tokens.clear()

    def answer(self, request: Request) -> Reply:
        with self.changed:
            if request.path == "/latest/api/token":
                return self._token(request)
            expires = self._tokens.get(request.headers.get("x-aws-ec2-metadata-token", ""))
            if expires is None or self.wall() >= expires:
                return Reply(401, "Unauthorized")
            if request.method != "GET":
                return Reply(405)
            announced = {
                "/latest/meta-data/spot/instance-action": self._action,
                "/latest/meta-data/events/recommendations/rebalance": self._rebalance,
            }.get(request.path)
            return Reply(404, "Not Found") if announced is None else Reply(200, announced)

    def _token(self, request: Request) -> Reply:
        if request.method != "PUT":
            return Reply(405)
        if "x-forwarded-for" in request.headers:
            return Reply(403)
        text = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if not text.isdigit() or not 1 <= int(text) <= 21600:
            return Reply(400, "Bad Request")
        token = secrets.token_urlsafe(32)
        self._tokens[token] = self.wall() + int(text)
        return Reply(200, token, {"X-aws-ec2-metadata-token-ttl-seconds": text})


class FakeGcp(MetadataServer):
    """The metadata server of Compute Engine; requests may hang (`wait_for_change`, `last_etag`, `timeout_sec`)."""

    def __init__(self, wall: Callable[[], float] = time.time, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(wall, host, port)
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def set(self, key: str, value: str) -> None:
        """Change `preempted` or `maintenance-event`; hanging requests are answered at once."""
        with self.changed:
            self._values[key] = value
            self.changed.notify_all()

    def preempt(self) -> None:
        """Announce the preemption."""
        self.set("preempted", "TRUE")

    def answer(self, request: Request) -> Reply:
        flavor = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return Reply(403, "missing Metadata-Flavor", flavor)
        if request.path == "/computeMetadata/v1/":
            return Reply(200, "instance/\nproject/\n", flavor)
        key = request.path.removeprefix("/computeMetadata/v1/instance/")
        with self.changed:
            if request.method != "GET" or key not in self._values:
                return Reply(404, "", flavor)
            if request.query.get("wait_for_change", "").lower() == "true":
                known_etag = request.query.get("last_etag") or _etag(self._values[key])
                seconds = float(request.query.get("timeout_sec", 3600.0))
                self._hang(lambda: _etag(self._values[key]) != known_etag, seconds)
            value = self._values[key]
            return Reply(200, value, {**flavor, "ETag": _etag(value), "Content-Type": "application/text"})


class FakeAzure(MetadataServer):
    """The instance metadata service of Azure: the machine's name, and Scheduled Events 2020-07-01.

    Args:
        machine: its name.
        turn_on_seconds: from the first request to the first event that is told (in Azure up to two minutes).
    """

    def __init__(
        self,
        machine: str = "vm_0",
        turn_on_seconds: float = 0.0,
        wall: Callable[[], float] = time.time,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(wall, host, port)
        self.machine = machine
        self.turn_on_seconds = turn_on_seconds
        self.approved: list[str] = []
        self._first_asked: float | None = None
        self._incarnation = 1
        self._events: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def schedule(
        self, kind: str = "Preempt", seconds: float = 30.0, machines: Sequence[str] | None = None, id: str | None = None
    ) -> str:
        """Announce an event that begins in `seconds`; return its id."""
        with self.changed:
            name = id or f"E{next(self._numbers):07d}"
            self._events[name] = {
                "EventId": name,
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [self.machine] if machines is None else list(machines),
                "EventStatus": "Scheduled",
                "NotBefore": email.utils.formatdate(self.wall() + seconds, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
            self._incarnation += 1
            return name

    def begin(self, name: str) -> None:
        """Start the event: its status changes and its time is removed."""
        with self.changed:
            self._events[name].update(EventStatus="Started", NotBefore="")
            self._incarnation += 1

    def end(self, name: str) -> None:
        """Remove an event that is over or withdrawn from the document."""
        with self.changed:
            del self._events[name]
            self._incarnation += 1

    def answer(self, request: Request) -> Reply:
        if request.headers.get("metadata") != "true" or "x-forwarded-for" in request.headers:
            return Reply(400, json.dumps({"error": "Bad request. Required metadata header not specified"}))
        if "api-version" not in request.query:
            return Reply(400, json.dumps({"error": "Bad request. api-version was not specified"}))
        if request.path.startswith("/metadata/instance/compute"):
            if request.path.endswith("/name"):
                return Reply(200, self.machine)
            return Reply(200, json.dumps({"name": self.machine, "azEnvironment": "AzurePublicCloud"}))
        if request.path != "/metadata/scheduledevents":
            return Reply(404)
        with self.changed:
            if request.method == "POST":
                return self._approve(request.body)
            now = self.wall()
            if self._first_asked is None:
                self._first_asked = now
            on = now - self._first_asked >= self.turn_on_seconds
            events = list(self._events.values()) if on else []
            document = {"DocumentIncarnation": self._incarnation if on else 1, "Events": events}
            return Reply(200, json.dumps(document), {"Content-Type": "application/json"})

    def _approve(self, body: str) -> Reply:
        try:
            names = [request["EventId"] for request in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return Reply(400, json.dumps({"error": "Bad request"}))
        if any(name not in self._events for name in names):
            return Reply(400, json.dumps({"error": "Bad request. No such event"}))
        for name in names:
            self.approved.append(name)
            self.begin(name)
        return Reply(200)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]
