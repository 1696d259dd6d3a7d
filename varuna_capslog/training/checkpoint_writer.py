"""Writes the checkpoint of one step together with all ranks, at a boundary or during the following steps.

During the steps, training stops only while the state is copied; a thread of each rank writes the copy. When all ranks
have written, the checkpoint is completed at the next boundary. `loop.Boundaries` calls this module.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.engine.interface import Engine
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.training import checkpoint
from varuna_capslog.training.layer_state import capture
from varuna_capslog.training.manifest import FORMAT
from varuna_capslog.training.stored_layers import manifest_of_layers, to_checkpoint

__all__ = ["CheckpointWriter", "HostCopies"]


_WRITTEN = b"written|"
"""Prefix of ballots from a rank that has written its part. A ballot without it is empty or JSON."""

_Written = tuple[str | None, dict[str, Any]]
"""Reason why a rank could not write, or None; and the manifest's entries of its layers."""


class HostCopies:
    """Host memory for copies of one engine's layers, reused by later checkpoints, since allocating memory takes several
    times as long as the copy (`benchmarks/checkpoint`). Only one checkpoint at a time may use it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def copy(self, layer: int, key: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to the CPU; reuses the last copy of this layer and key if shape and dtype are the same."""
        kept = self._kept.get((layer, key))
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[layer, key] = tensor.detach().to("cpu", copy=True)
            return kept
        return kept.copy_(tensor.detach())


class CheckpointWriter:
    """Writer of one step's checkpoint; every rank makes one at the same boundary.

    Args:
        folder: the run's `checkpoints/`.
        engine: of this rank; each layer is written by its `layout.reporter`.
        extra: further entries of the manifest ("constants", "data", "cuts").
        copies: memory for a copy of the state, made now and written by a thread; None: `complete` writes the state.

    Attributes:
        stall_seconds: time for which training has stopped for this checkpoint so far.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        generation: int,
        engine: Engine,
        extra: Mapping[str, Any],
        copies: HostCopies | None,
    ) -> None:
        self._began = time.monotonic()
        self._folder, self._generation, self._engine, self._extra = folder, generation, engine, extra
        self._partial = folder / f".partial-step-{step:08d}-g{generation}"
        self.step = step
        self._given_up = threading.Event()
        self._writing: Future[_Written] | None = None
        if copies is not None:
            states = [(layer, self._state(layer, copies)) for layer in self._own_layers()]
            pool = ThreadPoolExecutor(1, "checkpoint")
            self._writing = pool.submit(self._write, states)
            pool.shutdown(wait=False)
        self.stall_seconds = time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        """Seconds since this checkpoint was begun."""
        return time.monotonic() - self._began

    def marked(self, ballot: bytes) -> bytes:
        """Ballot, marked if this rank has written its part."""
        return _WRITTEN + ballot if self._writing is not None and self._writing.done() else ballot

    @staticmethod
    def unmarked(ballots: Sequence[bytes]) -> tuple[tuple[bytes, ...], bool]:
        """Return the ballots without the marks of `marked`, and True if all ranks have written."""
        plain = tuple(ballot.removeprefix(_WRITTEN) for ballot in ballots)
        return plain, all(ballot.startswith(_WRITTEN) for ballot in ballots)

    def complete(self, tidy: Callable[[], None] = lambda: None) -> Path:
        """Wait until all ranks have written, and give the checkpoint its final name; all ranks call this together.

        tidy: called on rank 0 after the renaming, before any rank can begin the next checkpoint. Raises DiskFailed on
        every rank when any rank could not write (full disk, no permission); no checkpoint was replaced then.
        """
        began, step, communicator = time.monotonic(), self.step, self._engine.communicator
        written = communicator.gather(communicator.together(self._written))
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(written) if text]
        final = self._folder / f"step-{step:08d}"

        def publish() -> str | None:
            """Write the manifest and rename on rank 0; `together` keeps the other ranks waiting for a slow disk."""
            if communicator.rank:
                return None
            try:
                self._write_manifest({name: entry for _, theirs in written for name, entry in theirs.items()})
                # if this process ends before it removes the replaced checkpoint, `prune` does
                checkpoint.publish(self._partial, final, self._folder / f".partial-replaced-{step:08d}")
                tidy()
            except (OSError, CapslogError) as error:  # writing the manifest raises CapslogError
                return f"{getattr(error, 'strerror', None) or error}"
            return None

        if not problems:
            problem = communicator.together(publish)
            problems = [f"rank 0: {text}" for text in communicator.gather(problem) if text]
        if problems:
            if communicator.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise DiskFailed(
                f"the checkpoint of step {step} could not be written to {self._folder} ({'; '.join(problems)}); the "
                "previous one is untouched: make room and resume"
            )
        self.stall_seconds += time.monotonic() - began
        return final

    def give_up(self) -> None:
        """Stop writing after the current file, without waiting for it; written files stay until `prune`."""
        self._given_up.set()

    def _own_layers(self) -> list[EngineLayer]:
        rank, reporter = self._engine.communicator.rank, self._engine.layout.reporter
        return [layer for layer in self._engine.layers if reporter(layer.index) == rank]

    def _state(self, layer: EngineLayer, copies: HostCopies | None) -> dict[str, Any]:
        engine = self._engine
        live = capture(layer, engine.optimizer, copy=False)
        if copies is None:
            return to_checkpoint(live, engine.chain, layer.index)
        return to_checkpoint(live, engine.chain, layer.index, partial(copies.copy, layer.index))

    def _written(self) -> _Written:
        if self._writing is not None:
            return self._writing.result()
        return self._write((layer, self._state(layer, None)) for layer in self._own_layers())

    def _write(self, states: Iterable[tuple[EngineLayer, dict[str, Any]]]) -> _Written:
        entries: dict[str, Any] = {}
        try:
            files.refuse_link(self._partial)
            self._partial.mkdir(parents=True, exist_ok=True)
            for layer, state in states:
                if self._given_up.is_set():
                    break
                file = f"layer-{layer.index:04d}.pt"
                entries[layer.name] = {"file": file, **checkpoint.write_synced(self._partial / file, state)}
        except OSError as error:
            return f"{error.strerror or error}", entries
        return None, entries

    def _write_manifest(self, entries: Mapping[str, Any]) -> None:
        chain = self._engine.chain
        files.write_json(
            self._partial / "manifest.json",
            {
                "format": FORMAT,
                "model": chain.name,
                "step": self.step,
                "generation": self._generation,
                "time": wall_seconds(),
                **manifest_of_layers(chain),
                **self._extra,
                "layers": {layer.name: entries[layer.name] for layer in chain.layers},
            },
        )
