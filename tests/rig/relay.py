"""A network that can be disturbed without privileges: all connections between hosts go through this process.

`main`, in a process of its own, reads the run's secret from its standard input, prints the port at which it takes
orders from clients that know the secret, one JSON message each, and ends with its standard input. Each listener is
registered under the name of its host, and each client asks for its own port, so the relay knows both ends of every
connection. A cut is a network that loses packets: nothing arrives, not even the end of a connection, and bytes under
way arrive after the healing, as TCP would send them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from varuna_capslog.base.connection import AuthenticatedListener, Connection, dial
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, die_with_parent, logged, python_command
from varuna_capslog.base.secret import Secret

__all__ = ["Line", "Relay", "main"]

_UNUSED_SECONDS = 60.0
"""A port that nobody has asked for so long is closed."""

_CHUNK = 1 << 16
_PURPOSE = "relay"
_MAX_ORDER = 1 << 20
_OPEN_SECONDS = 10.0

Way = tuple[str, str]
"""From one host to another."""


class Line:
    """A connection to the relay, for orders. Thread-safe.

    Args:
        address: host:port that `Relay.address` names.
        secret: that the relay was given.
    """

    def __init__(self, address: str, secret: Secret) -> None:
        host, _, port = address.rpartition(":")
        self._lock = threading.Lock()
        self._connection = dial(host, int(port), secret.key(_PURPOSE), _OPEN_SECONDS)

    def ask(self, **order: Any) -> dict[str, Any]:
        """Gives an order and returns the answer. Raises CapslogError where the relay is gone or refuses it."""
        try:
            with self._lock:
                self._connection.send_message(json.dumps(order).encode())
                answer = self._connection.read_message(_MAX_ORDER)
        except OSError as error:
            raise CapslogError(f"the relay does not answer: {error}") from error
        except EOFError:
            raise CapslogError("the relay has ended") from None
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise CapslogError(f"the relay refuses {order}: {reply['error']}")
        return reply

    def register(self, host: str, address: str) -> None:
        """Says on which host somebody listens at `address`."""
        self.ask(do="register", host=host, address=address)

    def through(self, source: str, address: str, than: int = 0) -> str:
        """Return the address at which a process of host `source` reaches `address`; `address` itself on its own host.

        Args:
            than: a port; the returned port is higher or lower than it as the true one is, in network byte order, so
                that two ends that compare their addresses to decide which of them connects still agree.
        """
        return str(self.ask(do="open", source=source, address=address, than=than)["address"])

    def disturb(self, ways: Iterable[Way], delay: float | None = None) -> None:
        """Cuts these ways (None), or makes all that takes them later by `delay` seconds."""
        self.ask(do="disturb", ways=sorted(ways), delay=delay)

    def heal(self, ways: Iterable[Way]) -> None:
        """Takes back all disturbances of these ways."""
        self.ask(do="heal", ways=sorted(ways))

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


class Relay:
    """Handle of the relay's process, which ends with the process that started it.

    Args:
        secret: that clients must know to give orders.
    """

    def __init__(self, secret: Secret) -> None:
        self._process = subprocess.Popen(
            python_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(secret.hand_over() + b"\n")
        self._process.stdin.flush()
        port = self._process.stdout.readline().strip()
        if not port:
            raise CapslogError("the relay did not start; see above")
        self.address = f"127.0.0.1:{int(port)}"

    def close(self) -> None:
        """Ends it, and all connections through it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- the relay's own process -------------------------------------------------------------------------------------------


class _Network:
    """State of the network: hosts of the listeners, disturbed ways, and the ports that were given out."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}
        self._open: dict[Way, asyncio.Event] = {}
        self._delays: dict[Way, float] = {}
        self._given: dict[tuple[str, str, int], tuple[int, asyncio.Server]] = {}
        self._used: dict[tuple[str, str, int], float] = {}

    def gate(self, way: Way) -> asyncio.Event:
        """Set while the way is open."""
        if way not in self._open:
            self._open[way] = asyncio.Event()
            self._open[way].set()
        return self._open[way]

    def delay(self, way: Way) -> float:
        return self._delays.get(way, 0.0)

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.get("do"):
            case "register":
                self._hosts[str(order["address"])] = str(order["host"])
                return {}
            case "open":
                return {"address": await self._through(str(order["source"]), str(order["address"]), int(order["than"]))}
            case "disturb":
                for way in map(tuple, order["ways"]):
                    if order["delay"] is None:
                        self.gate(way).clear()
                    else:
                        self._delays[way] = float(order["delay"])
                return {}
            case "heal":
                for way in map(tuple, order["ways"]):
                    self.gate(way).set()
                    self._delays.pop(way, None)
                return {}
        return {"error": "unknown order"}

    async def _through(self, source: str, address: str, than: int) -> str:
        target = self._hosts.get(address)
        if target is None or target == source:
            return address
        key = (source, address, than)
        self._used[key] = time.monotonic()
        if key not in self._given:

            async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._carry(source, target, address, reader, writer)

            server = await _listen(accepted, than, int(address.rpartition(":")[2]))
            self._given[key] = (server.sockets[0].getsockname()[1], server)
        return f"127.0.0.1:{self._given[key][0]}"

    async def tidy(self) -> None:
        """Close ports that are no longer needed; connections made through them go on."""
        while True:
            await asyncio.sleep(_UNUSED_SECONDS / 4)
            now = time.monotonic()
            for key in [key for key, used in self._used.items() if now - used > _UNUSED_SECONDS]:
                if self._hosts.get(key[1]) != "store":  # opened once, used all the time
                    del self._used[key]
                    self._given.pop(key)[1].close()

    async def _carry(
        self, source: str, target: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            await self.gate((source, target)).wait()
            host, _, port = address.rpartition(":")
            back, there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                self._pump((source, target), reader, there), self._pump((target, source), back, writer)
            )
        except OSError:
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction of a connection until it ends; then close the connection."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

        async def read() -> None:
            while True:
                try:
                    chunk = await reader.read(_CHUNK)
                except OSError:
                    chunk = b""
                await waiting.put((time.monotonic() + self.delay(way), chunk))
                if not chunk:
                    return

        reading = asyncio.create_task(read())
        try:
            while True:
                due, chunk = await waiting.get()
                if due > time.monotonic():
                    await asyncio.sleep(due - time.monotonic())
                await self.gate(way).wait()
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass  # the other end is gone; this end learns it from its own direction
        finally:
            reading.cancel()
            # A process that ends closes its connections in both directions.
            writer.close()


async def _listen(
    accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], than: int, true: int
) -> asyncio.Server:
    """On a port that is on the same side of `than` as the true one, as sockets write them: the lower byte first."""
    if not than:
        return await asyncio.start_server(accepted, "127.0.0.1", 0)
    higher = _swapped(true) > _swapped(than)
    for _ in range(10_000):
        port = random.randint(1024, (1 << 16) - 1)
        if port != than and (_swapped(port) > _swapped(than)) == higher:
            with contextlib.suppress(OSError):  # taken
                return await asyncio.start_server(accepted, "127.0.0.1", port)
    raise OSError(f"no port on the same side of {than} as {true} is free")


def _swapped(port: int) -> int:
    return socket.htons(port)


async def _serve(secret: Secret) -> None:
    network, loop = _Network(), asyncio.get_running_loop()

    def take_orders(connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                try:
                    order = json.loads(connection.read_message(_MAX_ORDER))
                    answer = asyncio.run_coroutine_threadsafe(network.obey(order), loop).result()
                except (KeyError, ValueError, TypeError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                connection.send_message(json.dumps(answer).encode())
        connection.close()

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    AuthenticatedListener(
        listener,
        secret.key(_PURPOSE),
        lambda connection: OwnedThread("relay", take_orders, logged, connection).start(),
        logged,
    )
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    tidying = asyncio.create_task(network.tidy())
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    tidying.cancel()


def main() -> int:
    """The relay: serves until its standard input ends."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Secret(sys.stdin.buffer.readline().decode())))
    return 0
