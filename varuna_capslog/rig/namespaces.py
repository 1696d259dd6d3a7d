"""Every machine of a chaos run in a network namespace of its own; this process's namespace is the router between them.

Real interfaces and the kernel's own TCP instead of the relay. A way that is cut is a rule of the router that drops what
comes that way, without a word to either side. Needs `unshare` and `ip`, and root or user namespaces; the machine's own
network is not touched, since all of it happens in a namespace that `enter` begins. Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import die_with_parent
from varuna_capslog.rig.relay import Way

__all__ = ["Namespaces", "enter", "how_to_enter", "join"]

_INSIDE = "CAPSLOG_CHAOS_NAMESPACE"
_CLONE_NEWNET = 0x40000000
_READY_SECONDS = 5.0


def enter() -> None:
    """Begins this program anew, with the same command line, in a network of its own, unless it is in one already.

    Raises:
        CapslogError: this machine does not allow it.
    """
    if _INSIDE in os.environ:
        return
    command = [*how_to_enter(), sys.executable, *sys.orig_argv[1:]]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


def how_to_enter() -> list[str]:
    """What begins a program in a network of its own. Raises CapslogError."""
    lacking = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if lacking:
        raise CapslogError(f"--network namespaces needs {', '.join(lacking)}, not found on PATH; use --network relay")
    for words in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    raise CapslogError(
        "this machine allows no network namespaces (they need root, or user namespaces); use --network relay"
    )


def join(path: str) -> None:
    """Puts the calling thread, and all that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, encoding="ascii") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


class Namespaces:
    """The machines' namespaces, each connected to the router by a pair of interfaces.

    Args:
        names: of the machines.
        router: the name by which ways mean this process.
    """

    def __init__(self, names: Sequence[str], router: str) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._router = router
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            _ip("link", "set", "lo", "up")
            with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as file:
                file.write("1")
            # what comes in for the router itself must pass the rules that cut ways, too
            _ip("rule", "add", "pref", "200", "lookup", "local")
            _ip("rule", "del", "pref", "0")
            for name in names:
                self._connect(name)
        except (OSError, CapslogError) as error:
            self.close()
            raise CapslogError(f"no network of namespaces can be made: {error}; use --network relay") from error

    def _connect(self, name: str) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_parent())
        self._holders[name] = holder
        until, ours = time.monotonic() + _READY_SECONDS, os.readlink("/proc/self/ns/net")
        while os.readlink(self.path(name)) == ours:
            if holder.poll() is not None or time.monotonic() > until:
                raise CapslogError("a machine's namespace did not begin")
            time.sleep(0.005)
        inside = ["nsenter", "--target", str(holder.pid), "--net", "ip"]
        interface = self._interface(name)
        _ip("link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _ip("addr", "add", f"{self.gateway(name)}/24", "dev", interface)
        _ip("link", "set", interface, "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", self.gateway(name))

    def _interface(self, name: str) -> str:
        return f"m{self._numbers[name]}"

    def path(self, name: str) -> str:
        """For `join`."""
        return f"/proc/{self._holders[name].pid}/ns/net"

    def address(self, name: str) -> str:
        """A machine's own."""
        return f"10.77.{self._numbers[name]}.2"

    def gateway(self, name: str) -> str:
        """By which a machine reaches this process."""
        return f"10.77.{self._numbers[name]}.1"

    def disturb(self, ways: Iterable[Way]) -> None:
        """Cuts these ways."""
        for way in sorted(ways):
            _ip("rule", "add", "pref", "100", *self._rule(way))

    def heal(self, ways: Iterable[Way]) -> None:
        """Opens them again."""
        for way in sorted(ways):
            with contextlib.suppress(CapslogError):  # it was open
                _ip("rule", "del", "pref", "100", *self._rule(way))

    def _rule(self, way: Way) -> list[str]:
        source, target = way
        interface = "lo" if source == self._router else self._interface(source)
        address = self.gateway(source) if target == self._router else self.address(target)
        return ["iif", interface, "to", address, "blackhole"]

    def close(self) -> None:
        """Ends them; the interfaces go with them."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise CapslogError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
