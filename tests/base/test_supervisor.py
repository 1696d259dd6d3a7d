"""The supervisor with workers that fail in every way; each worker is a few lines of Python, so no engine is needed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.starters import starter_of
from tests.waiting import alive, wait_until
from varuna_capslog.base import machine_memory
from varuna_capslog.base import supervisor as supervising
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import loss_cause
from varuna_capslog.base.processes import write_unless_there
from varuna_capslog.base.supervisor import Supervisor, WorkerFailed, last_step, new_run, reserve

PRELUDE = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
folder = os.path.join(sys.argv[1], "workers")
def report(**fields):
    with open(f"{folder}/{rank}.error.json", "w") as file:
        json.dump({"rank": rank, "stage": rank, "step": 7, "microbatch": 3, "time": time.time(), **fields}, file)
def hang():
    time.sleep(600)
"""


def supervisor(run_dir: Path, body: str, workers: int = 3, grace_seconds: float = 5.0) -> Supervisor:
    command = [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(body), str(run_dir)]
    return Supervisor(run_dir, starter_of(command), workers, grace_seconds=grace_seconds)


def pids(run_dir: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in sorted((run_dir / "workers").glob("[0-9].json"))]


def failed(run_dir: Path, body: str, **options) -> tuple[WorkerFailed, float]:
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        supervisor(run_dir, body, **options).run()
    seconds = time.monotonic() - began
    assert not any(alive(pid) for pid in pids(run_dir)), "a worker outlived its supervisor"
    return caught.value, seconds


def test_every_worker_gets_its_rank_and_one_rendezvous(tmp_path):
    supervisor(
        tmp_path,
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        with open(f"{folder}/../{rank}.env", "w") as file:
            json.dump([os.environ[name] for name in names] + [os.getpgid(0) == os.getpid()], file)
        """,
    ).run()
    rows = [json.loads((tmp_path / f"{rank}.env").read_text()) for rank in range(3)]
    assert [row[:3] for row in rows] == [[str(rank), str(rank), "3"] for rank in range(3)]
    assert len({(row[3], row[4]) for row in rows}) == 1, "workers were told different meeting points"
    assert all(row[6] for row in rows), "a worker shares the terminal's process group and would get Ctrl-C twice"
    assert len(set(pids(tmp_path))) == 3


def test_rank_zero_speaks_and_the_others_write_logs(tmp_path, capfd):
    supervisor(tmp_path, "print('hello from', rank, flush=True); print('trouble', file=sys.stderr)").run()
    assert capfd.readouterr() == ("hello from 0\n", "")
    assert (tmp_path / "workers/0.log").read_text() == "trouble\n"
    assert "hello from 2" in (tmp_path / "workers/2.log").read_text()


def test_a_killed_worker_is_named_and_its_neighbours_complaints_are_not_the_cause(tmp_path):
    # Rank 0 notices the loss before the supervisor does and writes it: still rank 1 is the cause.
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    error, seconds = failed(
        tmp_path,
        """
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            report(kind="peer", cause="lost rank 1", time=0.5)
            time.sleep(0.6)
            sys.exit(1)
        hang()
        """,
    )
    assert "rank 1 was killed by SIGKILL at step 7" in str(error)
    assert error.failure.rank == 1
    assert error.exit_status == 1
    assert seconds < 5


def test_a_killed_worker_whose_step_nobody_reports_is_placed_after_the_last_metrics_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n{"step": 6}\n')
    body = """
    with open(f"{folder}/{rank}.json.new", "w") as file:
        json.dump({"pid": os.getpid(), "host": "here", "stage": 4}, file)
    os.replace(f"{folder}/{rank}.json.new", f"{folder}/{rank}.json")
    os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else hang()
    """
    error, _ = failed(tmp_path, body)
    assert "rank 2 (stage 4) was killed by SIGKILL after step 6" in str(error)


def test_a_rank_that_the_system_killed_for_memory_is_told_so(tmp_path, monkeypatch):
    """When the OOM killer took a rank, only elastic runs and loaders mentioned memory (ray-project/ray#18890)."""
    counts = itertools.count(5)  # one more at every look
    monkeypatch.setattr(machine_memory, "oom_kills", lambda: next(counts))
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    error, _ = failed(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", workers=1)
    assert str(error).startswith("rank 0 was killed by SIGKILL for lack of memory after step 2")
    assert loss_cause(error.failure) == "memory"


def test_a_damaged_line_of_metrics_is_no_step(tmp_path):
    lines = ({"step": 7}, {"step": None}, {"step": [8]}, {"step": "9"}, {})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_step(tmp_path) == 7


def test_an_error_file_gives_the_sentence(tmp_path):
    body = "report(kind='user', cause='bad image a.jpg') or sys.exit(7) if rank == 1 else hang()"
    error, seconds = failed(tmp_path, body)
    assert "rank 1 (stage 1) failed at step 7, microbatch 3: bad image a.jpg" in str(error)
    assert error.exit_status == 2
    assert seconds < 5


@pytest.mark.parametrize(("kind", "status"), [("step_refused", 4), ("interrupted", 130), ("peer", 1), ("defect", 1)])
def test_the_kind_of_error_decides_the_exit_status(tmp_path, kind, status):
    error, _ = failed(tmp_path, f"report(kind={kind!r}, cause='x'); sys.exit(1)", workers=1)
    assert error.exit_status == status


def test_the_earliest_of_two_errors_is_the_cause(tmp_path):
    body = "report(kind='defect', cause='first' if rank else 'second', time=5.0 - rank); sys.exit(1)"
    error, _ = failed(tmp_path, body, workers=2)
    assert error.failure.cause == "first"


def test_a_reported_error_outranks_a_silent_crash(tmp_path):
    body = """
    if rank == 0:
        sys.exit(1)  # crashed over its lost neighbour, without a word, and is seen first
    time.sleep(0.3)
    report(kind="defect", cause="the real one")
    sys.exit(1)
    """
    error, _ = failed(tmp_path, body, workers=2)
    assert error.failure.cause == "the real one"


def test_a_cause_that_comes_late_outranks_the_guess_that_a_rank_hangs(tmp_path, monkeypatch):
    """A rank's own message, written just after its neighbour had stopped waiting, was never read: the user was told
    that it hangs or that pipeline.timeout_seconds must be raised (vllm-project/vllm#7074).
    """
    monkeypatch.setattr(supervising, "SETTLE_SECONDS", 0.1)
    body = """
    if rank == 1:
        report(kind="peer", cause="no answer within 6 s", peer=0)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: report(kind="user", cause="no such interface") or os._exit(2))
    hang()
    """
    error, _ = failed(tmp_path, body, workers=2)
    assert str(error).startswith("rank 0 (stage 0) failed at step 7, microbatch 3: no such interface")


def test_a_worker_that_leaves_no_report_is_quoted_from_its_log(tmp_path):
    error, _ = failed(tmp_path, "import no_such_module_here", workers=1)
    assert "exit status 1: ModuleNotFoundError: No module named 'no_such_module_here'" in str(error)
    assert str(tmp_path / "workers/0.log") in str(error)


def test_a_torn_error_file_is_no_obstacle(tmp_path):
    error, _ = failed(tmp_path, "open(f'{folder}/{rank}.error.json', 'w').write('{\"ca'); sys.exit(9)", workers=1)
    assert "exit status 9" in str(error)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        time.sleep(0.5)
        sys.exit(3)
    hang()
    """
    error, seconds = failed(tmp_path, body, grace_seconds=1.0)
    assert error.failure.rank == 1
    assert 1.0 <= seconds < 10


def test_a_stopped_worker_is_killed(tmp_path):
    body = "os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else time.sleep(0.5) or sys.exit(3)"
    error, _ = failed(tmp_path, body, workers=2, grace_seconds=0.5)
    assert error.failure.rank == 1


def test_the_children_of_a_worker_that_ended_do_not_stay_behind(tmp_path):
    body = """
    child = os.fork()
    if not child:
        hang()
    open(f"{folder}/../child", "w").write(str(child))
    """
    supervisor(tmp_path, body, workers=1).run()
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))


def test_the_pid_never_overwrites_what_a_quick_worker_wrote(tmp_path):
    (tmp_path / "0.json").write_text('{"pid": 5, "stage": 1}')
    write_unless_there(tmp_path / "0.json", {"pid": 5})
    write_unless_there(tmp_path / "1.json", {"pid": 6})
    assert json.loads((tmp_path / "0.json").read_text()) == {"pid": 5, "stage": 1}
    assert json.loads((tmp_path / "1.json").read_text())["pid"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


SUPERVISE = """
import sys
from pathlib import Path
from tests.starters import starter_of
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Supervisor
try:
    workers = starter_of(sys.argv[2:])
    Supervisor(Path(sys.argv[1]), workers, 2, grace_seconds=2.0, say=lambda line: print(line, flush=True)).run()
except CapslogError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def start(run_dir: Path, body: str) -> subprocess.Popen[str]:
    worker = [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(body), str(run_dir)]
    command = [sys.executable, "-c", SUPERVISE, str(run_dir), *worker]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: len(list(run_dir.glob("ready*"))) == 2)
    return process


POLITE = """
stopping = []
signal.signal(signal.SIGINT, lambda *_: stopping.append(1))
open(f"{folder}/../ready{rank}", "w").close()
while not stopping:
    time.sleep(0.02)
time.sleep(0.5)  # the rest of the step
open(f"{folder}/../done{rank}", "w").close()
"""


def test_ctrl_c_lets_the_step_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 11}\n')
    process = start(tmp_path, POLITE)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(list(tmp_path.glob("done*"))) == 2, "a worker was not let finish its step"
    assert output.splitlines()[-1].startswith("interrupted: stopped cleanly after step 11")


def test_sigterm_stops_cleanly_with_its_own_status(tmp_path):
    process = start(tmp_path, POLITE)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert len(list(tmp_path.glob("done*"))) == 2


def test_a_closing_terminal_stops_cleanly_though_it_signals_twice(tmp_path):
    """`kill -HUP`, as at the end of an ssh session, ended the command at once and nothing was saved. Shell, kernel and
    systemd may each send one, beside a SIGTERM (open-mmlab/mmsegmentation#1998, pytorch/pytorch#67538).
    """
    process = start(tmp_path, POLITE)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(0.1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert output.splitlines()[-1].startswith("interrupted: stopped cleanly")
    assert len(list(tmp_path.glob("done*"))) == 2


def test_ctrl_c_before_the_workers_listen_ends_them_too(tmp_path):
    body = """
    signal.signal(signal.SIGINT, signal.SIG_DFL if rank else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/../ready{rank}", "w").close()
    hang()
    """
    process = start(tmp_path, body)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_second_ctrl_c_kills(tmp_path):
    body = """
    signal.signal(signal.SIGINT, lambda *_: open(f"{folder}/../asked{rank}", "w").close())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/../ready{rank}", "w").close()
    hang()
    """
    process = start(tmp_path, body)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("asked*"))) == 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "killed in the middle of a step" in output
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_failure_while_stopping_is_still_a_failure(tmp_path):
    body = """
    stopping = []
    signal.signal(signal.SIGINT, lambda *_: stopping.append(1))
    open(f"{folder}/../ready{rank}", "w").close()
    while not stopping:
        time.sleep(0.02)
    if rank == 1:
        report(kind="defect", cause="disk full")
        sys.exit(1)
    hang()
    """
    process = start(tmp_path, body)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "disk full" in output


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_no_worker_outlives_a_killed_supervisor(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/../ready{rank}", "w").close()
    hang()
    """
    process = start(tmp_path, body)
    workers = pids(tmp_path)
    assert len(workers) == 2
    assert all(alive(pid) for pid in workers)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_two_runs_never_share_a_folder(tmp_path):
    process = start(tmp_path, POLITE)
    try:
        with pytest.raises(CapslogError, match="in use by another run"):
            supervisor(tmp_path, "pass").run()
        assert all(alive(pid) for pid in pids(tmp_path)), "the running workers were disturbed"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_a_second_run_of_the_same_process_is_refused_too(tmp_path):
    """A run's folders were once kept in the module, where any other run of the process could enter them."""
    refused = []

    def second() -> None:
        with pytest.raises(CapslogError, match="in use by another run") as caught, reserve(tmp_path):
            pass
        refused.append(caught.value)

    for count in (1, 2):  # the second time shows that the folder was unlocked, and is locked again
        with reserve(tmp_path):
            with reserve(tmp_path):  # by the run itself, further inside
                pass
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        assert len(refused) == count


def test_a_folder_that_was_reserved_in_another_thread_can_be_freed_here(tmp_path):
    """Under torchrun rank 0 reserves in a thread, while the ranks wait together, and frees it at the end of the run."""
    held = contextlib.ExitStack()
    thread = threading.Thread(target=lambda: held.enter_context(reserve(tmp_path)))
    thread.start()
    thread.join()
    held.close()
    with reserve(tmp_path):
        pass


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path):
    with pytest.raises(CapslogError, match="'/no/such/program' cannot be started: No such file"):
        Supervisor(tmp_path, starter_of(["/no/such/program"]), 2).run()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CapslogError, match="choose another run_dir"):
        supervisor(tmp_path / "run", "pass").run()


def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CapslogError, match="choose another run_dir"):
        supervisor(tmp_path / "run", "pass").run()


def test_a_strangers_folder_leads_nowhere(tmp_path: Path) -> None:
    """With workers/ as a link, a run removed every .json and .log in its target; lock as a link created files there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.json").write_text("{}")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "workers").symlink_to(elsewhere)
    with pytest.raises(CapslogError, match="one/workers is a link"), new_run(tmp_path / "one"):
        pass
    (tmp_path / "two" / "workers").mkdir(parents=True)
    (tmp_path / "two" / "workers" / "lock").symlink_to(elsewhere / "made")
    with pytest.raises(CapslogError, match="two/workers cannot be used: lock is a link"), new_run(tmp_path / "two"):
        pass
    (tmp_path / "two" / "workers" / "0.new").symlink_to(elsewhere / "mine.json")
    write_unless_there(tmp_path / "two" / "workers" / "0.json", {"pid": 1})
    assert [path.name for path in elsewhere.iterdir()] == ["mine.json"]
    assert (elsewhere / "mine.json").read_text() == "{}"
