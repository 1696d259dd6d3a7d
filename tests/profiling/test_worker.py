"""Processes of a profile: the error when one of them ends, and the terminal's state after it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from varuna_capslog.engine.communicator import PeerLost
from varuna_capslog.profiling import worker
from varuna_capslog.profiling.worker import cause_of_loss, next_task, pass_on, report

LOST = PeerLost("rank 1 was waiting for rank 0: connection lost", 0)

ABANDONED = """
from tests.profiling.workloads import Abandoned
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload

if __name__ == "__main__":
    try:
        profile_workload(Abandoned(), RunConditions(microbatch_size=2))
    except CapslogError as error:
        print(error)
"""


def test_the_loss_of_a_neighbour_is_one_sentence_without_a_traceback(tmp_path: Path, programs: Path) -> None:
    """A worker that lost its neighbour read the neighbour's pipe for the reason. The pipe of an ended process is
    readable and empty: the EOFError was printed with the errors before it, and the command said only that the worker's
    process ended with status 1.
    """
    script = tmp_path / "abandoned.py"
    script.write_text(ABANDONED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([programs / "python", script], env=environment, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.startswith("the run of "), done.stderr
    assert "lonely" in done.stdout.split(" failed: ")[0]
    assert "the process that plays its neighbours was killed by SIGKILL" in done.stdout
    assert "free memory" in done.stdout


def test_a_worker_that_cannot_watch_its_client_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would go on measuring without anybody to read the results."""
    client = multiprocessing.get_context("fork").Process(target=_watches_in_vain)
    client.start()
    client.join(20)
    assert client.exitcode == 1


def _watches_in_vain() -> None:
    multiprocessing.connection.wait = lambda sentinels: {}["nobody expected this"]
    worker.follow_client()
    time.sleep(60)


def _ends(pipe: Connection, message: tuple[str, str] | None, status: int) -> None:
    if message is not None:
        report(pipe, *message)
    os._exit(status)


def _stays(pipe: Connection, message: tuple[str, str] | None, status: int) -> None:
    time.sleep(60)


def started(
    body: object = _ends, message: tuple[str, str] | None = None, status: int = 0
) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=body, args=(theirs, message, status), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_a_neighbour_that_failed_is_the_cause() -> None:
    neighbours = [started(message=("lost", "it was gone")), started(message=("failed", "RuntimeError: no memory"))]
    assert cause_of_loss(LOST, neighbours) == "RuntimeError: no memory"


def test_both_views_are_told_where_each_side_lost_the_other() -> None:
    told = cause_of_loss(LOST, [started(message=("lost", "rank 0 was sending to rank 1: no buffer space"))])
    assert told == f"{LOST}; its neighbour says: rank 0 was sending to rank 1: no buffer space"


@pytest.mark.parametrize(("status", "end"), [(3, "ended with status 3"), (0, "ended with status 0")])
def test_a_neighbour_that_ended_without_a_word_is_told_by_its_end(status: int, end: str) -> None:
    told = cause_of_loss(LOST, [started(status=status)])
    assert told == f"{LOST}; the process that plays its neighbours {end} and gave no reason"


def test_a_neighbour_that_still_runs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_GRACE_SECONDS", 0.2)
    process, pipe = started(_stays)
    assert cause_of_loss(LOST, [(process, pipe)]) == str(LOST)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_messages_to_a_process_that_has_ended_are_no_errors() -> None:
    process, pipe = started()
    process.join()
    report(pipe, "failed", "too late")
    assert next_task(pipe) is None


def test_a_run_is_not_begun_without_the_stages_around_it() -> None:
    process, pipe = started()
    process.join()
    with pytest.raises(PeerLost, match="the process that plays the stages around the run has ended"):
        pass_on((None, None), [pipe])  # type: ignore[arg-type]
