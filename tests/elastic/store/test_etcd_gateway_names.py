"""A slow name server: asked once, and never again by a call that is waited for."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.secret import SECRET
from tests.waiting import wait_until
from varuna_capslog.elastic.store.etcd_gateway import Etcd, Names, Signatures

NAME = "etcd.example.invalid"


class NameServer:
    """Stand-in for the system's resolver; knows one name."""

    def __init__(self) -> None:
        self.address, self.seconds = "127.0.0.1", 0.0
        self.asked: list[str] = []
        self._ask = socket.getaddrinfo

    def __call__(self, host: str, *given: object, **named: object) -> object:
        if host != NAME:
            return self._ask(host, *given, **named)  # type: ignore[arg-type]
        self.asked.append(threading.current_thread().name)
        time.sleep(self.seconds)
        return self._ask(self.address, *given, **named)  # type: ignore[arg-type]


class Gateway(http.server.BaseHTTPRequestHandler):
    """Gateway of etcd that answers every call and closes the connection."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"kvs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    return server


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_calls_of_etcd_do_not_wait_for_a_slow_name_server(name_server: NameServer, port: int) -> None:
    etcd = Etcd("x", [(NAME, port)], 5.0, Signatures(SECRET, "x"))
    assert etcd.get("k") is None
    assert len(name_server.asked) == 1
    name_server.seconds = 60.0
    for client in (etcd, etcd, etcd.another()):  # every call on a connection of its own
        assert client.get("k") is None
    assert len(name_server.asked) == 1


def test_an_address_that_leads_nowhere_is_asked_for_again_beside_the_calls(name_server: NameServer, port: int) -> None:
    """The endpoint has moved: the call that notices it keeps the known address, later calls use the new one."""
    names = Names()
    name_server.address = "127.0.0.9"  # nobody listens there
    etcd = Etcd("x", [(NAME, port)], 20.0, Signatures(SECRET, "x"), names)
    assert names.addresses(NAME) == ("127.0.0.9",)
    name_server.address, name_server.seconds = "127.0.0.1", 0.3
    assert etcd.get("k") is None, "within its bound it finds the new address"
    wait_until(lambda: names.addresses(NAME) == ("127.0.0.1",))
    assert set(name_server.asked[1:]) == {"store-names"}
