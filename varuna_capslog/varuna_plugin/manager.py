"""`python -m varuna_capslog.varuna_plugin.manager`: Varuna's `run_varuna` on one machine, with a morph server of ours.

`run_varuna` reads the list of machines, writes the job's arguments and starts a launcher for each line `127.0.0.1`. Its
commands are replaced while it runs here:

    python -m varuna.launcher       `varuna_plugin.launch`
    python -m varuna.morph_server   threads of this process that listen on the same port
    python -m varuna.catch_all      threads that listen on its port; no job is killed after 30 minutes without a message
    sudo pkill -f varuna            no command: only processes that were started here are ended

On the message "morph" the workers get SIGUSR1, the script saves and ends, and the job starts again with the machines
that are then in the list (`run_varuna --resume`). On "preempt" the job saves and ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import runpy
import signal
import socketserver
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, free_port, heard_signals, logged
from varuna_capslog.varuna_plugin.install import Patches, find_varuna, silent
from varuna_capslog.varuna_plugin.launch import split_arguments, watch

__all__ = ["main"]

HEARTBEAT_PORT, MORPH_PORT = 5000, 4200
"""Ports to which Varuna's programs send their messages."""
JOB_FOLDER = "varuna_job"
"""Folder, in the current folder, of the job's arguments, in place of /tmp/varuna, which all jobs of a host share."""
_MESSAGE_BYTES = 1024
_MESSAGE_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as `python -m varuna.run_varuna` with these arguments would, until the script has ended.

    Additional options: those of `varuna_plugin.launch`. Returns 0 when all workers have ended with 0 after the last
    "morph"; else the status that `varuna_plugin.launch` returns; 2 for a wrong command line.
    """
    varuna_arguments, ours = split_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return _manage(varuna_arguments, ours)
    except CapslogError as error:
        sys.stderr.write(f"manager: {error}\n")
        return error.exit_status


def _manage(arguments: list[str], ours: Namespace) -> int:
    """Run the job, again after each "morph", and return its status."""
    find_varuna()
    options = [f"--{name}={setting}" for name, setting in vars(ours).items() if setting is not None]
    address, morphs = _address(arguments), threading.Event()

    def hear(message: str) -> None:
        if "preempt" in message or "morph" in message:
            if "preempt" not in message:
                morphs.set()
            os.kill(os.getpid(), signal.SIGUSR1)  # `watch` passes it on to the workers

    arguments = ["--manager_ip", address, *arguments]
    with contextlib.ExitStack() as context:
        context.enter_context(_listening(address, MORPH_PORT, hear))
        context.enter_context(_listening(address, HEARTBEAT_PORT, lambda message: None))
        context.enter_context(heard_signals((signal.SIGUSR1,), lambda number: None))  # ignored between two starts
        while True:
            morphs.clear()
            status = watch(functools.partial(_run_varuna, arguments, options), _machine)
            if not morphs.is_set() or status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                return status
            sys.stderr.write("manager: the job goes on with the machines that the list names now\n")
            arguments = ["--resume", *(word for word in arguments if word != "--resume")]


def _machine(number: int) -> str:
    return f"machine {number} (ssh_logs/ssh_err_{number})"


def _address(arguments: Sequence[str]) -> str:
    """Return the manager's address: --manager_ip, or 127.0.0.1."""
    for before, word in itertools.pairwise(arguments):
        if before == "--manager_ip":
            return word
    return "127.0.0.1"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True


@contextlib.contextmanager
def _listening(address: str, port: int, hear: Callable[[str], None]) -> Iterator[None]:
    """Answer Varuna's messages, in threads. hear: called with each message. Raises CapslogError for a taken port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(_MESSAGE_SECONDS)
            try:
                message = str(self.request.recv(_MESSAGE_BYTES), "ascii", "replace")
            except OSError:  # no message came, or the sender has gone
                return
            if "is_running?" in message:
                self.request.sendall(b"yes")
            hear(message)

    try:
        server = _Server((address, port), Handler)
    except (OSError, OverflowError) as error:
        raise CapslogError(
            f"{address}:{port}, where Varuna's programs send messages, cannot be taken ({error}); end the run "
            "that has it"
        ) from error
    with server:
        OwnedThread("messages of Varuna", server.serve_forever, logged).start()
        try:
            yield
        finally:
            server.shutdown()


def _run_varuna(arguments: Sequence[str], options: Sequence[str], launchers: list[subprocess.Popen[bytes]]) -> None:
    """Run Varuna's `run_varuna`, and add the launchers that it starts to `launchers`. options: of our launcher."""
    port, popen = free_port(), subprocess.Popen

    def system(command: str) -> int:
        if "varuna.morph" in command or "varuna.catch" in command:
            return 0  # our threads listen already
        raise CapslogError(f"run_varuna wants to run {command!r}, which is not expected; report this")

    def start(command: list[str], **keywords: Any) -> subprocess.Popen[bytes]:
        if "varuna.launcher" not in command:
            raise CapslogError(
                f"the list of machines names {command[1]!r}, but only this machine can be used; name 127.0.0.1, once "
                "for each --gpus_per_node workers"
            )
        behind = command[command.index("varuna.launcher") + 1 :]
        ours = ["-m", "varuna_capslog.varuna_plugin.launch", *options, "--master_port", str(port)]
        launchers.append(popen([command[0], "-u", *ours, *behind], **keywords))
        return launchers[-1]

    with silent():
        from varuna import utils
    patches, before = Patches(), sys.argv
    patches.replace(os, "system", system)
    patches.replace(subprocess, "Popen", start)
    patches.replace(utils, "VARUNA_TEMP_FOLDER", os.path.abspath(JOB_FOLDER))
    sys.argv = ["run_varuna", *arguments]
    try:
        runpy.run_module("varuna.run_varuna", run_name="__main__")
    except (AssertionError, OSError) as error:
        raise CapslogError(f"run_varuna: {error}") from error
    except SystemExit as end:
        if end.code:  # argparse has printed the mistake on the command line
            raise CapslogError("run_varuna did not start") from end
    finally:
        patches.undo()
        sys.argv = before
    if not launchers:
        raise CapslogError("the list of machines is empty; write a line 127.0.0.1 for each --gpus_per_node workers")


if __name__ == "__main__":
    sys.exit(main())
