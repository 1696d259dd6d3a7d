"""Worker processes that stay for a whole test session, so that a hundred multi-rank cases cost one start-up.

Each case runs a module-level function on `world_size` of the workers, connected by a `Communicator` of its own.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.forks import prepared_context, share_shapes

__all__ = ["WorkerPool"]


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from varuna_capslog.engine.communicator import connect

    torch.set_num_threads(1)
    share_shapes()
    while True:
        case = pipe.recv()
        if case is None:
            return
        function, rank, world_size, port, generation, timeout, arguments = case
        communicator = None
        try:
            communicator = connect(rank, world_size, "127.0.0.1", port, generation, timeout)
            try:
                pipe.send(("ok", function(communicator, *arguments)))
            finally:
                communicator.close()
        except BaseException as error:
            kind = "unconnected" if communicator is None else "error"
            pipe.send((kind, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class WorkerPool:
    """At most 8 processes on 127.0.0.1; started when first needed, stopped by `close`."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = prepared_context()
        self._workers: list[tuple[Any, Connection]] = []
        self._generation = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        timeout: float = 60.0,
        patience: float = 120.0,
    ) -> list[Any]:
        """`function(communicator, *arguments)` on every rank; results by rank. Raises RuntimeError with a rank's
        traceback.
        """
        assert 1 <= world_size <= 8
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        self._generation += 1
        for rank in range(world_size):
            self._workers[rank][1].send(
                (function, rank, world_size, self._store.port, self._generation, timeout, arguments)
            )
        results, errors, kinds = [], [], set()
        for rank in range(world_size):
            if not self._workers[rank][1].poll(patience):
                self.close()
                raise RuntimeError(f"rank {rank} of {world_size} gave no answer within {patience:g} s: {errors}")
            kind, value = self._workers[rank][1].recv()
            results.append(value)
            kinds.add(kind)
            if kind != "ok":
                errors.append(f"rank {rank}: {value}")
        if "unconnected" in kinds:  # such a process counts its groups differently from now on
            self.close()
        if errors:
            raise RuntimeError("\n".join(errors))
        return results

    def close(self) -> None:
        """Stops the workers."""
        for process, pipe in self._workers:
            if process.is_alive():
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process, _ in self._workers:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._workers.clear()
