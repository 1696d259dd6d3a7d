"""Reads samples in the rank itself, or in loader processes beside it that read ahead. A sample is the same in every
process, since its random numbers have a seed of their own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, python_command, startable
from varuna_capslog.own_data.reading import SampleReader, receive, send

__all__ = ["Batch", "Loader"]

_LAST_SECONDS = 5.0
"""Longest wait for a loader process to end after its last answer."""

_Task = tuple[tuple[str, int, list[int]], "Future[Any]"]


class Batch(Protocol):
    """Batch that is being read, or will be."""

    def result(self) -> Any:
        """Return the batch, when it is there. Raises CapslogError where it cannot be read."""


class _Later:
    """Batch that is read at its first use."""

    def __init__(self, reader: SampleReader, split: str, epoch: int, samples: Sequence[int]) -> None:
        self._reader, self._task = reader, (split, epoch, samples)
        self._batch: Any = None
        self._read = False

    def result(self) -> Any:
        if not self._read:
            self._batch, self._read = self._reader.read(*self._task), True
        return self._batch


class Loader:
    """Reader of one workload's batches in this process.

    Args:
        reader: for the batches that this process reads itself.
        keys, seed: as for `SampleReader`, in the loader processes.
        workers: loader processes; they start with the first batch and end with this process. 0: none.
    """

    def __init__(self, reader: SampleReader, keys: Mapping[str, Any], seed: int, workers: int) -> None:
        self._reader, self._greeting, self._workers = reader, (dict(keys), seed), workers
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[OwnedThread] = []
        self._failure: CapslogError | None = None

    def begin(self, split: str, epoch: int, samples: Sequence[int]) -> Batch:
        """Begin to read a batch."""
        if not self._workers:
            return _Later(self._reader, split, epoch, samples)
        if not self._threads:
            # A thread that lives as long as its process: Linux ends a child with the thread that started it.
            self._threads = [
                OwnedThread(f"loader-{number}", self._serve, self._fail) for number in range(self._workers)
            ]
            for thread in self._threads:
                thread.start()
        batch: Future[Any] = Future()
        self._tasks.put(((split, epoch, list(samples)), batch))
        if self._failure is not None:
            self._fail(self._failure)
        return batch

    def close(self) -> None:
        """End the loader processes; batches that they have not begun are not read."""
        for _ in self._threads:
            self._tasks.put(None)
        self._threads = []

    def _fail(self, error: CapslogError) -> None:
        self._failure = error
        with contextlib.suppress(queue.Empty):
            while True:
                queued = self._tasks.get_nowait()
                if queued is not None and queued[1].set_running_or_notify_cancel():
                    queued[1].set_exception(error)

    def _serve(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        while (queued := self._tasks.get()) is not None:
            task, batch = queued
            if not batch.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                send(process.stdin, task)  # type: ignore[arg-type]
                good, answer = receive(process.stdout)  # type: ignore[arg-type]
            except (EOFError, OSError):
                assert process is not None
                batch.set_exception(_ended(process, task[2]))
                process = None
            except CapslogError as error:
                batch.set_exception(error)
            except BaseException as error:  # unpickling runs code of the user's
                batch.set_exception(_unreadable(task[2], error))
            else:
                if good:
                    batch.set_result(answer)
                else:
                    batch.set_exception(CapslogError(answer))
        if process is not None:
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        command = python_command("varuna_capslog.own_data.worker", str(os.getpid()))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with startable("a loader process"):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        send(process.stdin, (*self._greeting, [path or os.getcwd() for path in sys.path]))  # type: ignore[arg-type]
        return process


def _unreadable(samples: Sequence[int], error: BaseException) -> CapslogError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return CapslogError(
        f"the batch of the samples {list(samples)} cannot be unpickled as its loader process sent it ({reason}); let "
        "the collate function return tensors and plain values, or set data.workers=0"
    )


def _ended(process: subprocess.Popen[bytes], samples: Sequence[int]) -> CapslogError:
    try:
        how = f"ended with status {process.wait(_LAST_SECONDS)}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        how = "closed its pipes and was killed"
    return CapslogError(
        f"a loader process {how} while it should read the samples {list(samples)}; what it wrote stands in the "
        "worker's log (a negative status is a signal; 9 is often a lack of memory: lower data.workers or data.prefetch)"
    )
