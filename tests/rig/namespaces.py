"""Every machine of a chaos run in a network namespace of its own; a process moves the packets between them.

Uses the kernel's own TCP instead of the relay. Every namespace has a TUN device, and `machines/shaper` carries packets
between them with a delay, a bandwidth and losses. A way that is cut drops its packets; neither side is notified. Needs
`unshare`, `nsenter`, `ip` and `/dev/net/tun`, and root or user namespaces. The machine's own network is not touched,
since everything happens in a namespace that `enter` begins. Linux.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tests.rig.machines import shaper
from tests.rig.machines.links import LinkShape
from tests.rig.machines.tun import DEVICE
from tests.rig.relay import Way
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import die_with_parent, python_command

__all__ = ["Namespaces", "enter", "how_to_enter"]

_INSIDE = "CAPSLOG_CHAOS_NAMESPACE"
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
    """Return the command prefix that starts a program in its own network namespace. Raises CapslogError."""
    lacking = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if lacking:
        raise CapslogError(f"--network namespaces needs {', '.join(lacking)}, not found on PATH; use --network relay")
    for words in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    raise CapslogError(
        "this machine allows no network namespaces (they need root, or user namespaces); use --network relay"
    )


class Namespaces:
    """The machines' namespaces, each connected to the others, and to this process's, by links of one shape.

    Args:
        names: of the machines.
        router: the name by which ways mean this process.
        seed: of the packets that get lost.

    Raises:
        CapslogError: this machine does not allow them.
    """

    def __init__(self, names: Sequence[str], router: str, shape: LinkShape | None = None, seed: int = 0) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._shaper: subprocess.Popen[str] | None = None
        try:
            _ip("link", "set", "lo", "up")
            for name in names:
                self._begin(name)
            ours = [self.gateway(name) for name in names]
            machines = {router: {"namespace": None, "addresses": ours}} | {
                name: {"namespace": self.path(name), "addresses": [self.address(name)]} for name in names
            }
            self._shaper = subprocess.Popen(
                python_command(shaper.__name__),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent(),
            )
            self._ask({"machines": machines, "shape": asdict(shape or LinkShape()), "seed": seed})
            _connect([], *ours)
            for name in names:
                inside = ["nsenter", "--target", str(self._holders[name].pid), "--net"]
                _connect(inside, self.address(name))
                _run(*inside, "ip", "link", "set", "lo", "up")
                _run(*inside, "ip", "route", "add", "default", "dev", DEVICE)
        except (OSError, CapslogError) as error:
            self.close()
            raise CapslogError(f"no network of namespaces can be made: {error}; use --network relay") from error

    def _begin(self, name: str) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_parent())
        self._holders[name] = holder
        until, ours = time.monotonic() + _READY_SECONDS, os.readlink("/proc/self/ns/net")
        while os.readlink(self.path(name)) == ours:
            if holder.poll() is not None or time.monotonic() > until:
                raise CapslogError("a machine's namespace did not begin")
            time.sleep(0.005)

    def path(self, name: str) -> str:
        """For `machines/tun.join`."""
        return f"/proc/{self._holders[name].pid}/ns/net"

    def address(self, name: str) -> str:
        """A machine's own."""
        return f"10.77.{self._numbers[name]}.2"

    def gateway(self, name: str) -> str:
        """Address at which a machine reaches this process."""
        return f"10.77.{self._numbers[name]}.1"

    def disturb(self, ways: Iterable[Way], delay: float | None = None) -> None:
        """Cuts these ways (None), or makes all that takes them later by `delay` seconds."""
        self._ask({"do": "disturb", "ways": sorted(ways), "delay": delay})

    def heal(self, ways: Iterable[Way]) -> None:
        """Takes back all disturbances of these ways."""
        self._ask({"do": "heal", "ways": sorted(ways)})

    def counts(self) -> dict[str, int]:
        """Return the packet counts so far; see `links.Counts`."""
        return self._ask({"do": "tell"})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._shaper is not None
        assert self._shaper.stdin is not None
        assert self._shaper.stdout is not None
        self._shaper.stdin.write(json.dumps(order) + "\n")
        self._shaper.stdin.flush()
        line = self._shaper.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process that moves the packets has ended"}
        if "error" in answer:
            raise CapslogError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends them; the devices go with them."""
        for process in (self._shaper, *self._holders.values()):
            if process is not None:
                process.kill()
                process.wait()


def _connect(inside: Sequence[str], *addresses: str) -> None:
    """Gives a device its addresses."""
    for address in addresses:
        _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", DEVICE)
    _run(*inside, "ip", "link", "set", DEVICE, "up", "txqueuelen", "2000")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise CapslogError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
