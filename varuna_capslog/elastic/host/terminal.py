"""Terminal output of an elastic run: one progress bar, one line per change, read only from the run's own files.

The host's process draws, since the worker that writes the journal may leave.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.base.tables import printable
from varuna_capslog.base.units import format_bytes
from varuna_capslog.training.journal import score_line, step_bar, step_head, step_numbers

__all__ = ["Terminal", "describe"]

_LOOK_SECONDS = 0.2
_LINE_SECONDS = 10.0
_SAME_PACE = 0.005
"""Relative change of the planned step time below which the change is not shown."""

_DAMAGED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors from a line of another form, which is skipped."""


class Terminal:
    """Draws a run while the `with` block lasts, without the lines that its files already have.

    total_steps: end of the bar until an event gives it; None: unknown. host: name of this process's host, whose losses
    the host itself prints; None: the machine's name. max_seconds: limit of the run, for the remaining time on the bar.
    """

    def __init__(
        self, run_dir: Path, total_steps: int | None, host: str | None = None, max_seconds: float | None = None
    ) -> None:
        self._console, self._progress, self._task = step_bar(total_steps, 0, max_seconds)
        self._live = self._console.is_terminal
        self._metrics, self._events = files.Tail(run_dir / "metrics.jsonl"), files.Tail(run_dir / "events.jsonl")
        self._evaluations = files.Tail(run_dir / "evaluations.jsonl")
        self._total = total_steps
        self._end = threading.Event()
        self._thread = OwnedThread("terminal", self._run, logged)
        self._quiet_until = 0.0
        self._unsaid: dict[str, Any] | None = None
        self._host = host or socket.gethostname()
        self._said = {""}
        self._reasons: list[str] = []
        self._generation: int | None = None

    def __enter__(self) -> Terminal:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look(last=True)
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._said.add(line)
        self._console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=not self._live)

    def _run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            self._look()

    def _look(self, last: bool = False) -> None:
        for event in self._events.new():
            with contextlib.suppress(*_DAMAGED):
                self._take_beginning(event)
                line = describe(event)
                if line and self._is_new(event, line):
                    self.say(line)
        with contextlib.suppress(*_DAMAGED):
            self._step(last)
        for evaluation in self._evaluations.new():
            with contextlib.suppress(*_DAMAGED):
                self.say(score_line(evaluation["step"], evaluation["scores"]))

    def _take_beginning(self, event: Mapping[str, Any]) -> None:
        """Read the last step from the event that begins a generation, and explain skipped generations."""
        if event.get("kind") not in ("start", "resume", "morph") or "why" not in event:
            return
        if isinstance(total := event.get("last_step"), int):
            self._total = total
            self._progress.update(self._task, total=total)
        number, before = int(event["generation"]), self._generation
        self._generation = number
        if before is not None and number > before + 1:
            skipped = (
                f"generation {number - 1}" if number == before + 2 else f"generations {before + 1} to {number - 1}"
            )
            self.say(f"{skipped} did not begin, since the members changed again before")

    def _is_new(self, event: Mapping[str, Any], line: str) -> bool:
        """True where the line must be printed. Every member writes the reason of a pause, which is printed once."""
        if event.get("kind") == "lost" and event.get("host") == self._host:
            return False
        if event.get("kind") not in ("persisted", "waiting"):
            if "members" in event:
                self._reasons = []  # the run trains again, so the next pause has reasons of its own
            return line not in self._said
        why = str(event.get("why"))
        is_known = any(reason.endswith(why) for reason in self._reasons)
        self._reasons.append(why)
        return not is_known

    def _step(self, last: bool) -> None:
        """Update the bar, or print a line every ten seconds and at the end."""
        record = next(reversed(list(self._metrics.new())), self._unsaid)
        if record is None:
            return
        text = "  ".join([*step_numbers(record), _members(record["world_size"])])
        self._progress.update(self._task, completed=int(record["step"]), description=text)
        now = time.monotonic()
        self._unsaid = record
        if not self._live and (now >= self._quiet_until or last or record["step"] == self._total):
            self._unsaid, self._quiet_until = None, now + _LINE_SECONDS
            self.say(f"{step_head(record, self._total)}  {text}")


def describe(event: Mapping[str, Any]) -> str | None:
    """Sentence on an event: members, reasons, new cuts, pause, moved bytes; None for an event that is not shown."""
    kind = event.get("kind")
    head = f"generation {event.get('generation')}"
    if kind in ("start", "resume", "morph") and "why" in event:
        after = f" after step {event.get('step')}" if kind == "resume" else ""
        text = f"{head}: {'; '.join(event['why'])}{after}"
        text += f"; {_shape(event)}" if "cuts" in event else ""
        if kind == "morph":
            pause = event.get("pause_seconds")
            text += "" if pause is None else f", paused {1000 * pause:.0f} ms"
            text += f", moved {format_bytes(int(event.get('moved_bytes', 0)))}"
            text += _pace(event)
            if (motion := event.get("motion", {})).get("chosen") == "small motion":
                text += f"; small motion, since {motion.get('why')}"
        return text
    if kind == "notice":
        return _notice(event)
    if kind == "memory":
        member, step = event.get("member"), event.get("step")
        if event.get("cause"):
            return f"{member} could not make step {step}, which is made again: {event['cause']}"
        lacked = format_bytes(int(event.get("lacking_bytes", 0)))
        return f"{member} lacked {lacked} in step {step}: the step is made again with less there"
    if kind == "rebalance":
        gain = float(event.get("planned_gain", 1.0))
        return f"{event.get('why')}; by the plans a step takes {gain:.2f} times as long without them"
    if kind == "lost" or (kind == "stop" and "why" in event):
        return str(event.get("why"))
    if kind == "waiting":
        return f"{head} waits: {event.get('why')}"
    if kind == "persisted":
        return f"all that is held was written to disk: {event.get('why')}"
    return None


def _shape(event: Mapping[str, Any]) -> str:
    replicas, idle = event.get("replicas", 1), event.get("idle", 0)
    ways = event.get("ways", [event["cuts"]])
    consecutive = all(isinstance(first, int) for way in ways for first in way)
    text = ("cuts " if consecutive else "stages of layers ") + " + ".join(map(str, ways))
    text += f" in {replicas} replicas" if replicas > 1 else ""
    return text + (f", {_members(idle)} for copies only" if idle else "")


def _pace(event: Mapping[str, Any]) -> str:
    """Words on the planned step time beside the one before, and on recomputed and offloaded layers."""
    ratio = float(event.get("planned_step_ratio", 1.0))
    if abs(ratio - 1) < _SAME_PACE:
        return ""
    treated = ((event.get("recomputed_layers"), "recomputed"), (event.get("offloaded_layers"), "offloaded"))
    layers = " and ".join(f"{count} {treatment}" for count, treatment in treated if count)
    text = f"; goes on {'slower' if ratio > 1 else 'faster'}: a planned step is {ratio:.2f} times the one before"
    return text + (f", layers {layers}" if layers else "")


def _members(count: int) -> str:
    return f"{count} member{'' if count == 1 else 's'}"


def _notice(event: Mapping[str, Any]) -> str:
    deadline = event.get("deadline")
    when = "at once" if event.get("urgent") else "soon" if deadline is None else f"within {deadline:.0f} s"
    return f"notice ({event.get('source')}): {event.get('member')} is to leave {when}"
