"""Calls the caller's functions of `capslog.train`, in the caller's process, with the entries of the run's files.

The files are read while the workers train, so any function is allowed, and a slow function delays no step.
"""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import last_step

__all__ = ["STOP", "Callback", "Callbacks", "Stop"]


class Stop(enum.Enum):
    """Type of `STOP`."""

    STOP = "stop"


STOP = Stop.STOP
"""Value that a callback returns to end its run."""

Callback = Callable[[dict[str, Any]], Stop | None]


class Callbacks:
    """Callbacks of one run, used as a context around the run. Entries of earlier runs in the folder are skipped.

    Leaving the context calls the callbacks for the last entries, and raises an error of a callback.
    """

    def __init__(self, run_dir: Path, functions: Mapping[str, Callback | None]) -> None:
        """functions: `on_step`, `on_evaluation`, `on_checkpoint`. Raises CapslogError if one is not callable."""
        self._run_dir, self._functions = run_dir, {name: call for name, call in functions.items() if call is not None}
        for name, call in self._functions.items():
            if not callable(call):
                raise CapslogError(f"{name}={call!r} cannot be called; give a function of one argument, a dict")
        self._stops = False
        self._error: BaseException | None = None

    def __enter__(self) -> Callbacks:
        self._tails = {
            name: files.Tail(self._run_dir / file)
            for name, file in (("on_step", "metrics.jsonl"), ("on_evaluation", "evaluations.jsonl"))
        }
        self._checkpoints = dict(self._written())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.look()
        if self._error is not None:
            step = last_step(self._run_dir)
            after = "" if step is None else f" after step {step}"
            _note(self._error, f"the run in {self._run_dir} has ended{after}; the same call continues it")
            raise self._error

    def look(self) -> bool:
        """Call the functions for new entries; return True once a function has returned `STOP` or has failed."""
        if not self._functions:
            return False
        with _interruptible(self._functions.clear):
            for name, call in tuple(self._functions.items()):
                for row in self._new(name):
                    if self._error is None:
                        self._call(name, call, row)
        return self._stops

    def _call(self, name: str, call: Callback, row: dict[str, Any]) -> None:
        try:
            answer = call(row)
            if answer is not None and answer is not STOP:
                raise CapslogError(f"{name} returned {answer!r}; return capslog.STOP to end the run, or nothing")
        except Exception as error:
            _note(error, f"raised by {name} for step {row.get('step')}")
            self._error, answer = error, STOP
        self._stops = self._stops or answer is STOP

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        if name != "on_checkpoint":
            yield from self._tails[name].new()
            return
        before, self._checkpoints = self._checkpoints, dict(self._written())
        for folder, written in sorted(self._checkpoints.items()):
            if before.get(folder) != written:
                with contextlib.suppress(CapslogError):  # pruned in the meantime
                    manifest = files.read_json(folder / "manifest.json")
                    entries = {key: manifest.get(key) for key in ("step", "generation", "time")}
                    yield {**entries, "path": str(folder)}

    def _written(self) -> Iterator[tuple[Path, int]]:
        """Yield (folder, time of writing in ns) of each checkpoint."""
        for manifest in (self._run_dir / "checkpoints").glob("step-*/manifest.json"):
            with contextlib.suppress(OSError):
                yield manifest.parent, manifest.stat().st_mtime_ns


def _note(error: BaseException, line: str) -> None:
    """Add a line below an exception's traceback, on Pythons that can (3.11)."""
    if hasattr(error, "add_note"):
        error.add_note(line)


@contextlib.contextmanager
def _interruptible(forget: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C interrupt the caller's function; then call `forget`, and the former handler, which stops the run."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # outside the main thread, where no signal is heard
        yield
        return
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        forget()
    if interrupted and callable(before):
        before(signal.SIGINT, None)
