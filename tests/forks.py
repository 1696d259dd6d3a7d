"""Test processes, forked from one that has imported torch and the package; each would spend seconds on these imports.

A forked process is like a started one: it has its own session, and the variables, folder and descriptors it is given.
Some tests start theirs as users do (`test_cli.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from varuna_capslog.base import fork_server

_IMPORTED_ONCE = [
    "tests.engine.warm",
    "tests.engine.detr",
    "scipy.optimize",
    "varuna_capslog.training.run",
    "varuna_capslog.start.prepare",
    "varuna_capslog.elastic.member.pipeline_work",
    "varuna_capslog.cli",
    "torch.export._trace",
    "torch.utils.tensorboard",  # skipped where tensorboard is not installed
    "transformers.models.rt_detr.modeling_rt_detr",  # skipped where transformers is not installed
    "tests.frozen",
]


def prepared_context() -> Any:
    """Return the `multiprocessing` context whose processes are forks of one that has imported the slow modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


_WAY_THERE = ("_forkserver_address", "_forkserver_authkey")  # the key since Python 3.14


def server_for_all() -> dict[str, Any]:
    """Return the fork server's address for pytest's other processes; a server for each would cost it five seconds."""
    prepared_context()
    forkserver.ensure_running()
    attributes = vars(forkserver._forkserver)
    return {name: attributes[name] for name in _WAY_THERE if name in attributes}


def take_server(way: Mapping[str, Any]) -> None:
    """Have this process fork from another process's server from now on, without watching for the server's end."""
    if _WAY_THERE[0] not in way:
        return  # a Python that keeps it elsewhere: each process has a server of its own
    server = forkserver._forkserver
    vars(server).update(way, _forkserver_alive_fd=os.open(os.devnull, os.O_RDONLY))
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running


class Fork:
    """Counterpart of `subprocess.Popen` for a fork that calls "module:function" and exits with the returned status.

    Args:
        function: called with `arguments`.
        environment: all variables of the fork.
        descriptors: descriptors of this process that the fork inherits, by their number in the fork.
        stdin, stdout: this process's ends of pipes to the fork, for callers that expect a `Popen`.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any],
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        folder: str | os.PathLike[str] = ".",
        stdin: BinaryIO | None = None,
        stdout: BinaryIO | None = None,
    ) -> None:
        connections = {number: Connection(os.dup(source)) for number, source in descriptors.items()}
        self._process = prepared_context().Process(
            target=_act, args=(function, arguments, dict(environment), connections, os.path.abspath(folder))
        )
        self._process.start()
        for copy in connections.values():
            copy.close()
        self.pid: int = self._process.pid
        self._looking = threading.Lock()
        self.stdin, self.stdout = stdin, stdout

    def poll(self) -> int | None:
        with self._looking:  # the status can be read once
            code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_command(
    arguments: Sequence[str], environment: Mapping[str, str], output: int, errors: int, folder: str | os.PathLike[str]
) -> Fork:
    """`capslog ARGUMENTS...`, whose fork server is a fork of it."""
    with open(os.devnull, "rb") as nothing:
        descriptors = {0: nothing.fileno(), 1: output, 2: errors}
        return Fork(f"{__name__}:_command", (list(arguments),), environment, descriptors, folder)


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Fork servers of commands that run in this process are forks themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "subprocess", _with_popen(_fork_server_of))
        yield


def _fork_server_of(command: Sequence[str], **options: Any) -> Fork:
    """options: keyword arguments that `ForkServer` passes to `subprocess.Popen`."""
    (orders, order), (reports, report) = os.pipe(), os.pipe()
    descriptors = {
        0: orders,
        1: report,
        2: options["stderr"].fileno(),
        **{descriptor: descriptor for descriptor in options["pass_fds"]},
    }
    pipes = open(order, "wb"), open(reports, "rb")  # noqa: SIM115
    fork = Fork(f"{__name__}:_server", (list(command[3:]),), options["env"], descriptors, ".", *pipes)
    os.close(orders)
    os.close(report)
    return fork


def _with_popen(start: Callable[..., Any]) -> Any:
    return types.SimpleNamespace(**(vars(subprocess) | {"Popen": start}))


_PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: link.send(bytes([number])))
text = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(link, [len(text).to_bytes(8, "big")], [0, 1, 2])
link.sendall(text)
status = int.from_bytes(link.recv(4) or bytes([1]), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Programs:
    """Programs `python` and `capslog` for shells: what they run is a fork with their words, variables, folder, standard
    input and outputs. They pass signals on to it, and their end is its end; it is in a session of its own.

    Attributes:
        folder: of the programs, for PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address := str(folder / "socket"))
        self._listening.listen(32)
        for name in ("python", "capslog"):
            (folder / name).write_text(_PROGRAM.format(python=sys.executable, address=address), encoding="utf-8")
            (folder / name).chmod(0o755)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Start no more programs."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=self._run, args=self._listening.accept()[:1], daemon=True).start()

    def _run(self, link: socket.socket) -> None:
        with link:
            length, descriptors, _, _ = socket.recv_fds(link, 8, 3)
            text = link.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
            words, environment, folder = json.loads(text)
            fork = Fork(f"{__name__}:_program", (words,), environment, dict(enumerate(descriptors)), folder)
            for descriptor in descriptors:
                os.close(descriptor)
            while (status := fork.poll()) is None:
                if link in wait([link, fork._process.sentinel]):
                    number = link.recv(1) or bytes([signal.SIGKILL])  # its connection ends where the program is killed
                    # srun sends a signal to all processes of a task
                    for pid in _session_of(fork.pid) if "SLURM_PROCID" in environment else [fork.pid]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number[0])
            with contextlib.suppress(OSError):
                link.sendall(status.to_bytes(4, "big", signed=True))


def _session_of(leader: int) -> list[int]:
    sessions = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                sessions[int(name)] = os.getsid(int(name))
    return [pid for pid, session in sessions.items() if session == leader]


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """Folder of the programs of `Programs`."""
    with tempfile.TemporaryDirectory(prefix="capslog-programs-") as folder:  # a socket's path has 107 bytes at most
        started = Programs(Path(folder))
        yield started.folder
        started.close()


# -- in the fork


def _act(
    function: str,
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    connections: dict[int, Connection],
    folder: str,
) -> None:
    os.setsid()
    fork_server.renew_threads()
    # first copy all above the highest target number, so that none is overwritten
    copies = {
        number: fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, max(connections) + 1)
        for number, connection in connections.items()
    }
    for connection in connections.values():
        connection.close()
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    module, _, name = function.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(*arguments))


def _server(arguments: list[str]) -> int:
    share_shapes()
    return fork_server.main(arguments)


def share_shapes() -> None:
    """Take what the process that all are forked from has traced, in the engines of this process and of its forks."""
    from tests.engine.shapes import SharedShapes
    from varuna_capslog.elastic.member import pipeline_work
    from varuna_capslog.engine import pipeline

    pipeline.ShapeTable = pipeline_work.ShapeTable = SharedShapes  # type: ignore[misc]


def _command(arguments: list[str]) -> int:
    from varuna_capslog import cli

    _start_forks()
    return cli._run(arguments)


def _start_forks() -> None:
    """Let fork servers of this process be forks of it."""
    share_shapes()
    start = fork_server._started_as_fork if fork_server.may_fork() else subprocess.Popen
    fork_server.subprocess = _with_popen(start)


def _program(words: list[str]) -> int:
    """Act as the program `capslog`, or as `python` with a file, `-m MODULE` or `-` for standard input."""
    if os.path.basename(words[0]) == "capslog":
        return _command(words[1:])
    _start_forks()
    words = words[2:] if words[1] == "-u" else words[1:]
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif words[0] == "-":
        exec(sys.stdin.read(), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0
