"""No thread of the library ends unnoticed, and no wait is without a limit or a living owner."""

from __future__ import annotations

import ast
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import nodes_of
from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.base.processes import OwnedThread

ROOT = Path(__file__).parents[2]
FOREIGN = {"Thread", "Timer", "start_new_thread", "start_joinable_thread"}
BLOCKING = {"wait", "get", "join", "result", "acquire", "exception", "communicate", "select", "accept"}
"""Methods that wait without a limit where they are called without an argument."""
ALWAYS_BLOCKING = {"recv", "recv_bytes", "recv_into", "waitpid", "waitid"}

WAITS = {
    # the thread that reads the fork server's reports tells everybody of its end, whatever the cause
    "base/fork_server.py ForkServer.call": "`ForkServer._hear`, which tells of the fork server's end as well",
    "base/fork_server.py ForkServer.close": "killed before",
    "base/fork_server.py ForkServer._end": "killed before",
    "base/fork_server.py _ServerFork.wait": "WNOHANG",
    "base/fork_server.py main": "killed before",
    "base/fork_server.py _orders": "the host: its end closes the pipe, and kills this process",
    "base/processes.py reaped": "WNOHANG",
    "base/supervisor.py Forks.__call__": "the thread fork-server tells of the fork, or `gone`",
    "base/supervisor.py _Forked.wait": "the thread fork-server tells of the end, or `gone`",
    "base/supervisor.py Supervisor._failures": "has ended",
    "base/supervisor.py Supervisor._kill": "killed before",
    "base/supervisor.py reserve": "a ContextVar, no wait",
    # connections: the end of the other process ends them, and `until` bounds the wait for an answer
    "base/connection.py Connection._exactly": "`until`, or the process at the other end",
    "base/connection.py _received": "has a timeout",
    "base/connection.py AuthenticatedListener.close": "woken before; its thread waits for nothing else",
    "base/connection.py AuthenticatedListener._accept": "does not block",
    "base/connection.py AuthenticatedListener._hear": "does not block",
    "elastic/host/terminal.py Terminal.__exit__": "its end is set before; it reads files",
    "elastic/member/process_groups.py ProcessGroups.has_met": "is done",
    "elastic/member/process_groups.py ProcessGroups.take": "is done",
    "elastic/member/process_groups.py _throw_away": "is done",
    "elastic/member/holdings.py Holdings.digest_at": "its pool's future takes what is raised; it computes",
    "elastic/member/inbox.py _Outgoing._run": "the member, whose `close` puts None",
    "elastic/notices/signals.py SignalListener._run": "the listener, whose `stop` puts None",
    "elastic/script.py current_script": "a ContextVar, no wait",
    "own_data/workload.py DatasetWorkload._first": "the thread's event is set before",
    # torch's groups have timeouts; pair groups, which have none, are aborted by `Progress`
    "engine/communicator.py Pending.wait": "the group's timeout, or `Progress`",
    "engine/communicator.py Communicator.receive": "begins only",
    "engine/communicator.py Communicator._add_up": "the group's timeout",
    "engine/communicator.py Communicator.gather": "the group's timeout",
    "engine/communicator.py Communicator.together": "is done",
    "engine/communicator.py Communicator.exchange": "`Pending.wait`",
    "engine/communicator.py _end": "begins only",
    "engine/executor.py _Transfers.receive": "`Pending.wait`",
    "engine/executor.py _Transfers._release": "`Pending.wait`",
    "engine/offload.py OffloadedCall.taking_what_is_saved.unpack": "no wait",
    "engine/pair_groups.py PairGroups.wait": "is done",
    "engine/pair_groups.py PairGroups._meet": "`Progress`",
    "engine/stage.py Stage._run_again": "no wait",
    # loader processes: the thread answers every batch, and ends all of them where it fails itself
    "own_data/loader.py Loader._serve": "the loader, whose `close` puts None; the process is killed before",
    "own_data/loader.py _ended": "killed before",
    "own_data/loader.py DatasetSource.load": "`Loader._serve` answers",
    "own_data/loader.py DatasetSource.batch": "`Loader._serve` answers",
    "own_data/loader.py _Read.result": "`Loader._serve` answers",
    # profiling: the end of a process closes its pipe, and no worker outlives its client
    "profiling/worker.py WorkerGroup.__exit__": "killed before",
    "profiling/worker.py WorkerGroup.finished": "the workers, whose end closes a pipe",
    "profiling/worker.py next_task": "the client, whose end closes the pipe",
    "profiling/worker.py _last_message": "there is something to read",
    "varuna_plugin/manager.py _listening.Handler.handle": "has a timeout",
    "profiling/worker.py follow_client.follow": "the client, whose end is waited for",
    "training/feed.py Feed._take": "a pool whose future takes what is raised, or a batch of `Loader`",
    "training/checkpoint_writer.py CheckpointWriter._written": "its pool's future takes what is raised; it writes",
    "varuna_plugin/executor.py grads_receiver": "the configured timeout",
    "varuna_plugin/install.py forward_only": "a queue that raises after Varuna's timeout",
    "varuna_plugin/launch.py _end": "killed before",
}
"""Function -> who ends its wait."""


def test_what_a_target_raises_is_told_to_the_owner_in_one_sentence(capsys) -> None:
    """Python prints a thread's traceback to stderr, nothing for a SystemExit, and whoever waits for it continues."""
    heard: list[CapslogError] = []

    def fail(error: BaseException) -> None:
        raise error

    full = DiskFailed("no space is left")
    for error in (KeyError("no such member"), SystemExit(3), full):
        thread = OwnedThread("ears", fail, heard.append, error)
        thread.start()
        thread.join(5)
    assert "the thread ears failed with KeyError: 'no such member'; this is a defect" in str(heard[0])
    assert "SystemExit: 3" in str(heard[1])
    assert heard[2] is full
    assert capsys.readouterr().err == ""


def test_where_there_are_no_more_threads_the_limit_is_named(monkeypatch) -> None:
    """A container's limit of processes: "RuntimeError: can't start new thread"."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CapslogError, match=r"thread ears cannot be started: can't start new thread; raise .*ulimit -u"):
        OwnedThread("ears", print, print).start()


def texts() -> Iterator[tuple[str, str]]:
    for package in ("varuna_capslog", "detr_pipeline"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT / package)), path.read_text(encoding="utf-8")


def foreign_threads(path: str, text: str) -> list[str]:
    """Return the lines where a thread is created from, or derived from, a class of `threading`."""
    nodes = nodes_of(text)
    used = [node.func for node in nodes if isinstance(node, ast.Call)]
    used += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    named = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    lines = [node.lineno for node in used if isinstance(node, ast.Attribute) and node.attr in FOREIGN]
    return [f"{path}:{line}" for line in [*lines, *(alias.lineno for alias in named if alias.name in FOREIGN)]]


def waits(text: str) -> dict[str, list[str]]:
    """Return the calls without a limit, by the function that makes them."""
    calls = defaultdict(list)

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and blocks(child, child.func):
                calls[".".join(scope)].append(ast.unparse(child))
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            visit(child, (*scope, child.name) if named else scope)  # type: ignore[attr-defined]

    visit(nodes_of(text)[0], ())
    return calls


def blocks(call: ast.Call, called: ast.Attribute) -> bool:
    count = len(call.args) + sum(keyword.arg == "timeout" for keyword in call.keywords)
    if called.attr in ALWAYS_BLOCKING:
        return True
    if called.attr == "wait" and ast.unparse(called.value).endswith("connection"):
        return count < 2
    return (called.attr in BLOCKING and not count) or (called.attr, count) in (("wait_for", 1), ("select", 3))


def test_every_thread_has_an_owner() -> None:
    """About thirty places started threads whose end nobody noticed."""
    assert [line for path, text in texts() if path != "base/processes.py" for line in foreign_threads(path, text)] == []
    for text in ("threading.Thread(target=f)", "from threading import Thread", "class A(threading.Thread): pass"):
        assert foreign_threads("", text) == [":1"]


def test_every_wait_has_a_limit_or_a_living_owner() -> None:
    """A new wait without a limit names in `WAITS` the thread or process that ends it, also after a failure of that
    one.
    """
    places = {f"{path} {place}": calls for path, text in texts() for place, calls in waits(text).items()}
    assert {place: calls for place, calls in places.items() if place not in WAITS} == {}
    assert set(WAITS) <= set(places), "these places wait no more"
    for text in ("a.wait()", "a.get()", "a.wait_for(f)", "select.select(a, b, c)", "connection.wait(a)", "a.recv(5)"):
        assert waits(text) == {"": [text]}
    for text in ("a.wait(5)", "a.get(timeout=5)", "a.wait_for(f, 5)", "'a'.join(b)", "connection.wait(a, 5)"):
        assert waits(text) == {}
