"""Addresses: parses those of stores, and finds the address under which other machines reach this one.

For a machine's own name, a name server or /etc/hosts often gives the loopback, which no other machine can use. So the
address of the network interface towards the store is taken. A host finds it once, for all its workers.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

from varuna_capslog.base.errors import CapslogError

__all__ = [
    "SCHEME",
    "address_towards",
    "check_gloo_interfaces",
    "interface_of",
    "listen",
    "network_variables",
    "parse_address",
]

SCHEME = "etcd://"

_SIOCGIFADDR = 0x8915
_BACKLOG = 1024


def network_variables(store: str) -> dict[str, str]:
    """Return CAPSLOG_ADDRESS (where members listen for each other) and GLOO_SOCKET_IFNAME (for training data).

    CAPSLOG_ADDRESS is left out over the loopback, GLOO_SOCKET_IFNAME where it is set already. Without an interface gloo
    would resolve the machine's name whenever a generation opens. store: the store's address, as other machines use it.
    """
    address = os.environ.get("CAPSLOG_ADDRESS") or address_towards(store)
    if address is None:
        return {}
    variables = {} if ipaddress.ip_address(address).is_loopback else {"CAPSLOG_ADDRESS": address}
    interface = interface_of(address)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def check_gloo_interfaces(environment: Mapping[str, str]) -> None:
    """Check that gloo finds the interfaces in GLOO_SOCKET_IFNAME (names with commas between); else raise CapslogError.

    Gloo does not know the prefixes of NCCL_SOCKET_IFNAME ("=", "^"), and ignores a value of one character.
    """
    named, interfaces = environment.get("GLOO_SOCKET_IFNAME", ""), sorted(name for _, name in socket.if_nameindex())
    missing = [name for name in named.split(",") if name and name not in interfaces] if len(named) > 1 else []
    if missing:
        raise CapslogError(
            f"GLOO_SOCKET_IFNAME={named} names {missing[0]!r}, which is no network interface of this machine "
            f"({', '.join(interfaces)}), so that the ranks cannot meet; change or unset it"
        )


def address_towards(store: str) -> str | None:
    """Return the IPv4 address of this machine's interface towards a store; None where no network leads there."""
    host = parse_address(store)[0][0][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return None


def parse_address(address: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return endpoints and prefix of `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`, or of `host:port` with an empty prefix.

    Raises CapslogError for any other form.
    """
    etcd = "://" in address
    places, _, prefix = address.removeprefix(SCHEME).partition("/") if etcd else (address, "", "")
    endpoints = []
    for place in places.split(",") if etcd else [places]:
        host, _, port = place.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            form = f"{SCHEME}HOST:PORT[,HOST:PORT...]/PREFIX" if etcd else "host:port"
            raise CapslogError(f"store address {address!r} is not {form}")
        endpoints.append((host, int(port)))
    if etcd and not prefix.strip("/"):
        raise CapslogError(f"store address {address!r} names no prefix, under which the run's keys are kept")
    return tuple(endpoints), prefix.strip("/")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None where the system names none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening IPv4 socket at an address of this machine. For a name (not localhost) that resolves to the
    loopback it listens at all addresses: /etc/hosts often gives the loopback for a machine's own name, and no other
    machine reaches that. Raises CapslogError if the address is not this machine's, or the port is taken or invalid.
    """
    try:
        address = socket.gethostbyname(host)
        is_name = host != "localhost" and not host.startswith("127.")
        at = "0.0.0.0" if is_name and ipaddress.ip_address(address).is_loopback else address
        return socket.create_server((at, port), backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise CapslogError(f"{host} is not an address of this machine; give one of its own, or its name") from error
        why = getattr(error, "strerror", None) or error
        raise CapslogError(f"nothing can listen at {host}:{port}: {why}; choose another port") from error
