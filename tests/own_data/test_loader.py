"""Loader processes read what a rank reads itself, to the last bit; they end with their parent and say why they fail."""

from __future__ import annotations

import io
import os
import pickle
import queue
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.own_data import reading
from varuna_capslog.own_data.loader import Loader
from varuna_capslog.own_data.reading import SampleReader

KEYS = {
    "dataset": "tests.own_data.samples:Points",
    "arguments": {"noise": 0.1, "broken": 5, "slow": 9},
    "val": None,
    "val_arguments": {},
    "collate": None,
    "given": None,
}
TASKS = [(0, [1, 2]), (0, [5, 6]), (1, [1, 2]), (0, [7, 3])]


def read(workers: int) -> tuple[list[Any], Loader]:
    loader = Loader(SampleReader(KEYS, 3), KEYS, 3, workers)
    batches = [loader.begin("dataset", epoch, samples) for epoch, samples in TASKS]
    outcomes: list[Any] = []
    for batch in batches:
        try:
            outcomes.append(batch.result())
        except CapslogError as error:
            outcomes.append(str(error))
    return outcomes, loader


class Sour:
    """Batch, as a collate function may return it, that pickles well and raises when it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return spoil, (self.error,)


def spoil(error: BaseException) -> None:
    raise error


class Answers(Loader):
    """A loader whose processes are stand-ins that give these answers."""

    def __init__(self, *answers: Any, status: int = 0) -> None:
        super().__init__(None, {}, 0, 1)  # type: ignore[arg-type]
        self.answers = iter(answers)

    def _started(self) -> Any:
        outgoing = io.BytesIO()
        reading.send(outgoing, next(self.answers))
        process = subprocess.Popen(["sleep", "0"])
        process.stdin, process.stdout = io.BytesIO(), io.BytesIO(outgoing.getvalue())
        return process


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), RecursionError("deep")])
def test_a_batch_that_cannot_be_unpickled_is_named_and_the_next_one_is_read(error: BaseException) -> None:
    """A collate result whose `__setstate__` raises in the rank ended the reading thread; the run waited for ever."""
    loader = Answers((True, Sour(error)), (True, 5))
    batches = [loader.begin("dataset", 0, [number]) for number in range(2)]
    name = type(error).__name__
    with pytest.raises(CapslogError, match=rf"samples \[0\] cannot be unpickled .*{name}.*data.workers=0"):
        batches[0].result(5)
    with pytest.raises(CapslogError, match=r"loader process ended with status 0 .*\[1\]"):
        batches[1].result(5)
    assert loader.begin("dataset", 0, [2]).result(5) == 5
    loader.close()


class BrokenQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    def get(self) -> Any:
        raise LookupError("nobody expected this")


def test_an_end_of_the_reading_thread_ends_every_batch() -> None:
    """Batches that it has not begun and batches requested afterwards fail, too."""
    loader = Answers()
    loader._tasks = BrokenQueue()
    for number in range(3):
        with pytest.raises(CapslogError, match="loader-0 failed with LookupError: nobody expected this"):
            loader.begin("dataset", 0, [number]).result(5)


def children(parent: int) -> list[int]:
    """The processes whose parent is this one."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                pids.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_two_loader_processes_read_the_same_bits_and_end_with_a_parent_that_is_killed() -> None:
    answers, answer = os.pipe()
    parent = os.fork()
    if parent == 0:  # a process that has nothing to do but to be killed
        try:
            outcomes, loader = read(2)
            _busy = [loader.begin("dataset", 0, [9]) for _ in range(2)]  # they sleep when their parent is killed
            data = pickle.dumps((outcomes, children(os.getpid())))
            os.write(answer, struct.pack("<Q", len(data)) + data)
            signal.pause()
        finally:
            os._exit(1)
    os.close(answer)
    with os.fdopen(answers, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        outcomes, workers = pickle.loads(stream.read(length))
    expected, _ = read(0)
    assert len(workers) == 2
    assert all(is_running(worker) for worker in workers)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ends = time.monotonic() + 30
    while any(is_running(worker) for worker in workers) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not any(is_running(worker) for worker in workers)
    for outcome, wanted in zip(outcomes, expected, strict=True):
        if isinstance(wanted, str):
            assert outcome == wanted
            assert "sample 5 of the data set cannot be read (OSError: point-5.png is cut short)" in wanted
        else:
            assert outcome.keys() == wanted.keys()
            assert all(torch.equal(outcome[name], wanted[name]) for name in wanted)
    assert not torch.equal(expected[0]["input"], expected[2]["input"]), "each epoch has its own random numbers"
