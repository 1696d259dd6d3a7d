"""Network namespaces from inside: entering one, and devices whose packets this process reads and writes. Linux."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from varuna_capslog.base.processes import OwnedThread

__all__ = ["DEVICE", "join", "open_device"]

DEVICE = "eth0"
"""The name of every machine's interface, and of the interface of the process that runs them."""

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def join(path: str) -> None:
    """Puts the calling thread, and all that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, encoding="ascii") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


def open_device(namespace: str | None) -> int:
    """Open a TUN device in a namespace (None: the caller's own); return a non-blocking descriptor. Raises OSError."""
    outcomes: list[int | OSError] = []

    def opened() -> None:  # in a thread of its own, since a thread that has entered a namespace stays there
        try:
            if namespace is not None:
                join(namespace)
            device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            outcomes.append(device)
        except OSError as error:
            outcomes.append(error)

    thread = OwnedThread("tun", opened, lambda error: outcomes.append(OSError(str(error))))
    thread.start()
    thread.join()
    if isinstance(outcomes[0], OSError):
        raise outcomes[0]
    return outcomes[0]
