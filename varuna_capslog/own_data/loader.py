"""A user's data set as a `DataSource`, read by the rank itself or by loader processes that read ahead."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, python_command, startable
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import LateTargets, Minibatch
from varuna_capslog.own_data.reading import SampleReader, receive, send

__all__ = ["Batch", "DatasetSource", "Loader"]


# -- Batches, read by the rank itself or by loader processes


_LAST_SECONDS = 5.0
"""Longest wait for a loader process to end after its last answer."""

_Task = tuple[tuple[str, int, list[int]], "Future[Any]"]


class Batch(Protocol):
    """Batch that is being read, or will be."""

    def result(self) -> Any:
        """Wait for the batch and return it. Raises CapslogError where it cannot be read."""


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
        reader: reads the batches in this process, without loader processes.
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
            # One thread per loader process, which it must outlive: Linux ends a child with the thread that started it.
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


# -- A user's data set as a `DataSource`: microbatches of fixed shapes, read with their targets where needed.
#
# A rank that neither loads inputs nor computes the loss knows only the numbers of a minibatch's samples and the shapes
# of the first batch, which all other batches must have.


_REMEMBERED = 4
"""Microbatches of an evaluation that are kept for its evaluator, on a rank that loads inputs and scores outputs."""


class DatasetSource:
    """Data source of one split.

    Args:
        count: number of samples.
        specs: returns the specs of the model's inputs for a microbatch of this many samples.
        take: returns the model's inputs of a batch.
        ahead: number of microbatches that are read ahead.
    """

    def __init__(
        self,
        split: str,
        count: int,
        specs: Callable[[int], dict[str, TensorSpec]],
        loader: Loader,
        take: Callable[[Any], dict[str, Tensor]],
        ahead: int,
    ) -> None:
        self._split, self._count, self._specs = split, count, specs
        self._loader, self._take, self.ahead = loader, take, ahead
        self._begun: dict[tuple[int, ...], _Read] = {}

    def __len__(self) -> int:
        return self._count

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Return the description of a minibatch; reads nothing."""
        samples = [list(group) for group in groups]
        minibatch = Minibatch(
            inputs=[self._specs(len(group)) for group in samples],
            targets=[],
            normalisers={"microbatches": float(len(samples))},
            sample_ids=samples,
            recipes=[(epoch, group) for group in samples],
        )
        for index in range(len(samples)):
            minibatch.targets.append(LateTargets(functools.partial(self.batch, minibatch, index)))
        return minibatch

    def begin(self, minibatch: Minibatch, microbatch: int) -> _Read:
        """Begin to read a microbatch: its inputs and its batch, for the loss."""
        epoch, samples = minibatch.recipes[microbatch]
        batch = self._loader.begin(self._split, epoch, samples)
        return _Read(batch, self._take, minibatch.inputs[microbatch], samples)

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Return the inputs of a microbatch, and begin to read the next ones. Their batches are kept for `batch`."""
        for index in range(microbatch, min(len(minibatch.inputs), microbatch + 1 + self.ahead)):
            self._reading(minibatch, index)
        return self._reading(minibatch, microbatch).result()[0]

    def batch(self, minibatch: Minibatch, microbatch: int) -> Any:
        """Return the batch of a microbatch, for its evaluator."""
        batch = self._reading(minibatch, microbatch).result()[1]
        self._begun.pop(_key(minibatch, microbatch), None)
        return batch

    def _reading(self, minibatch: Minibatch, microbatch: int) -> _Read:
        key = _key(minibatch, microbatch)
        if key not in self._begun:
            while len(self._begun) >= _REMEMBERED + self.ahead:
                self._begun.pop(next(iter(self._begun)))
            self._begun[key] = self.begin(minibatch, microbatch)
        return self._begun[key]


def _key(minibatch: Minibatch, microbatch: int) -> tuple[int, ...]:
    epoch, samples = minibatch.recipes[microbatch]
    return (epoch, *samples)


class _Read:
    """Inputs and batch of a microbatch that is being read."""

    def __init__(
        self,
        batch: Batch,
        take: Callable[[Any], dict[str, Tensor]],
        specs: Mapping[str, TensorSpec],
        samples: Sequence[int],
    ) -> None:
        self._batch, self._take, self._specs, self._samples = batch, take, specs, samples

    def result(self) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and batch. Raises CapslogError where the batch cannot be read or its inputs' shapes differ."""
        batch = self._batch.result()
        inputs = {name: tensor.contiguous() for name, tensor in self._take(batch).items()}
        for name, spec in self._specs.items():
            tensor = inputs[name]
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise CapslogError(
                    f"the samples {list(self._samples)} give the input {name!r} as {list(tensor.shape)} of "
                    f"{tensor.dtype}, but the first ones gave {list(spec.shape)} of {spec.dtype}; let the data set, or "
                    "a collate function (data.collate), pad or crop all samples to one size"
                )
        return inputs, batch
