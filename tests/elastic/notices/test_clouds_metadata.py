"""Detection of the cloud in bounded time; outages of any source; and the HTTP below."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import pytest

from tests.elastic.metadata_servers import FakeAws, FakeAzure, FakeGcp, MetadataServer, Reply
from tests.elastic.notices.support import Inbox
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.clouds import AwsListener, AzureListener, GcpListener, HttpOpener
from varuna_capslog.elastic.notices.gather import Gathering, auto_sources, detect_cloud
from varuna_capslog.elastic.notices.interface import Kind, Listener, PollingListener, Round, Unavailable, backoff


@pytest.mark.parametrize(("server", "name"), [(FakeAws, "aws"), (FakeGcp, "gcp"), (FakeAzure, "azure")])
def test_the_cloud_that_answers(server: type[MetadataServer], name: str) -> None:
    with server() as fake:
        assert detect_cloud(20.0, fake.url) == name
        sources = [source.source for source in auto_sources("a", timeout=20.0, environ={}, endpoint=fake.url)]
    assert sources == ["program", "signal", name]


def test_something_else_that_answers_is_no_cloud() -> None:
    class Portal(MetadataServer):
        def answer(self, request: object) -> Reply:
            return Reply(200, "<html>please log in</html>") if request.method == "GET" else Reply(405)  # type: ignore

    with Portal() as fake:
        assert detect_cloud(20.0, fake.url) is None


def test_a_port_that_is_closed() -> None:
    with FakeAws() as fake:
        pass
    assert detect_cloud(20.0, fake.url) is None


def test_an_address_that_swallows_everything_costs_the_time_limit_only() -> None:
    """A firewall that drops packets never answers. The probes must not be waited for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = threading.Event()
        clouds: list[str | None] = ["unset"]

        def detect() -> None:
            clouds[0] = detect_cloud(0.2, f"http://127.0.0.1:{silent.getsockname()[1]}")
            ended.set()

        threading.Thread(target=detect, daemon=True).start()
        assert ended.wait(20.0)
    assert clouds == [None]


@pytest.mark.parametrize(
    ("server", "make"),
    [
        (FakeAws, lambda url: AwsListener("a", interval=0.01, endpoint=url)),
        (FakeGcp, lambda url: GcpListener("a", endpoint=url)),
        (FakeAzure, lambda url: AzureListener("a", interval=0.01, endpoint=url)),
    ],
)
def test_the_server_is_not_there_then_comes_and_announces(
    server: type[MetadataServer], make: type[PollingListener], caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line for the loss and a line for the return, without a traceback; the notice arrives."""
    with server() as fake:
        pass  # its port is known now, and closed
    inbox = Inbox()
    listener = make(fake.url)
    with caplog.at_level(logging.WARNING):
        listener.start(inbox)
        threads = len(listener._threads)
        while len(caplog.records) < threads:
            time.sleep(0.01)
        fake.start()
        try:
            announce = {"FakeAws": "interrupt", "FakeGcp": "preempt", "FakeAzure": "schedule"}[server.__name__]
            getattr(fake, announce)()
            assert inbox.next().kind is Kind.LEAVE
        finally:
            listener.stop()
            fake.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("not heard for now" in line for line in lines) == threads
    assert sum("heard again" in line for line in lines) <= threads
    assert all("\n" not in line and record.exc_info is None for line, record in zip(lines, caplog.records, strict=True))


def test_an_outage_is_one_line_however_long_it_is(caplog: pytest.LogCaptureFixture) -> None:
    questions = threading.Semaphore(0)

    class Away(PollingListener):
        source = "away"

        def rounds(self) -> tuple[Callable[[], Round], ...]:
            return (self.ask,)

        def ask(self) -> Round:
            questions.release()
            raise Unavailable("nobody is there")

    listener = Away("a", interval=0.0)
    listener.start(Inbox())
    for _ in range(3):
        assert questions.acquire(timeout=20.0)
    listener.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "notices of away are not heard for now: nobody is there"
    ]


def test_pauses_grow_and_stay_below_the_shortest_notice() -> None:
    assert [backoff(failures, 0.5) for failures in (1, 2, 3, 4, 5, 1000)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff(1, 0.0) == 0.1


def test_listeners_are_started_once() -> None:
    with FakeAws() as fake:
        listener = AwsListener(endpoint=fake.url)
        listener.start(Inbox())
        with pytest.raises(CapslogError, match="make a new one"):
            listener.start(Inbox())
        listener.stop()
        with pytest.raises(CapslogError, match="make a new one"):
            listener.start(Inbox())


def test_the_whole_way_from_a_server_to_the_acknowledgement() -> None:
    announced = threading.Event()
    with FakeAzure() as fake:
        sources: list[Listener] = [AzureListener("a", interval=0.01, endpoint=fake.url)]
        with Gathering(sources, lambda announcement: announced.set()) as gathering:
            name = fake.schedule()
            assert announced.wait(20.0)
            assert fake.approved == []
            assert gathering.host_left() == (name,)
        assert fake.approved == [name]


def test_an_answer_that_trickles_is_given_up() -> None:
    """Each piece of the answer arrives within the time limit, the complete answer does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                try:
                    while not ended.wait(0.02):
                        connection.sendall(b"x")
                except OSError:
                    pass

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        try:
            with pytest.raises(Unavailable):
                HttpOpener()("GET", f"http://127.0.0.1:{server.getsockname()[1]}/", {}, timeout=0.2)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("answer", [b"", b"\0\0\0", b"HTTP/1.1 ok\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe"])
def test_what_is_no_http_is_no_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(Unavailable):
            HttpOpener()("GET", f"http://127.0.0.1:{server.getsockname()[1]}/", {}, timeout=20.0)
        thread.join()


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set http_proxy; a proxy would answer for another machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with FakeAws() as fake:
        assert AwsListener(endpoint=fake.url).ask_action().notices == ()
