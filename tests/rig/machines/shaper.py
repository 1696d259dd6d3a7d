"""The process that moves every packet between the machines of a chaos run, through the links of `links`.

`main`, in its own process, reads a line of JSON from its standard input: the machines, with the paths of their network
namespaces and their addresses, and the shape of the links. It opens a TUN device in each namespace and in its own,
writes a line when they are open, reads an order in JSON from each further line, answers each with a line, and ends with
its standard input. The machines' TCP is the kernel's, which resends lost packets. Linux.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.rig.machines.links import Links, LinkShape
from tests.rig.machines.tun import open_device

__all__ = ["main"]

_PACKET = 1 << 16
_AT_ONCE = 64
_IPV4 = 4


class _Devices:
    """The devices, and the links between them.

    Args:
        machines: name -> {"namespace": path or None, "addresses": of the machine}.
    """

    def __init__(self, machines: Mapping[str, Mapping[str, Any]], shape: LinkShape, seed: int) -> None:
        self.links = Links(shape, seed)
        self.devices = {name: open_device(about["namespace"]) for name, about in machines.items()}
        addresses = [(address, name) for name, about in machines.items() for address in about["addresses"]]
        self._at = {socket.inet_aton(address): name for address, name in addresses}

    def take(self, source: str) -> None:
        """Read packets that a machine has sent, several at once."""
        device, at, links = self.devices[source], self._at, self.links
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, _PACKET)
            except BlockingIOError:
                return
            target = at.get(packet[16:20]) if packet[0] >> 4 == _IPV4 else None
            if target is not None:
                links.send(now, source, target, packet)

    def give(self) -> float | None:
        """Deliver arrived packets; return the seconds until the next one arrives, None where none is under way."""
        for target, packet in self.links.arrived(time.monotonic()):
            with contextlib.suppress(OSError):  # its queue is full, or it is just beginning or ending: a lost packet
                os.write(self.devices[target], packet)
        due = self.links.next_arrival()
        return None if due is None else max(0.0, due - time.monotonic())

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        match order.get("do"):
            case "disturb":
                self.links.disturb(map(_way, order["ways"]), order["delay"])
            case "heal":
                self.links.heal(map(_way, order["ways"]))
            case "tell":
                return self.links.counts.to_json()
            case _:
                return {"error": f"unknown order {order!r}"}
        return {}


def _way(names: Sequence[str]) -> tuple[str, str]:
    source, target = names
    return source, target


def main() -> int:
    """Move packets until the standard input ends."""
    began = json.loads(sys.stdin.readline())
    try:
        network = _Devices(began["machines"], LinkShape(**began["shape"]), int(began["seed"]))
    except OSError as error:
        _say({"error": f"no TUN device can be opened: {error}"})
        return 1
    _say({})
    poll = select.epoll()
    sources = {device: name for name, device in network.devices.items()}
    for device in sources:
        poll.register(device, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN)
    orders = b""
    while True:
        seconds_to_next = network.give()
        timeout = -1 if seconds_to_next is None else math.ceil(1000 * seconds_to_next) / 1000
        for device, _ in poll.poll(timeout):
            if device in sources:
                network.take(sources[device])
                continue
            read = os.read(device, _PACKET)
            if not read:
                return 0
            *lines, orders = (orders + read).split(b"\n")
            for line in lines:
                _say(network.obey(json.loads(line)))


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
