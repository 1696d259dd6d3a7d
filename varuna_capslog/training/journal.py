"""Writes a run's record for people and programs: metrics.jsonl, events.jsonl, evaluations.jsonl, loggers, terminal.

Every rank passes the same records to its journal; the journal of one rank at a time writes them. JSON Lines files are
append-only, so a crash loses at most the line that is being written.
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.functions import import_function
from varuna_capslog.base.tables import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from varuna_capslog.engine.interface import Verdict
    from varuna_capslog.model.chain import TensorSpec

__all__ = [
    "Journal",
    "RecentSteps",
    "check_loggers",
    "evaluated_steps",
    "goodness",
    "peak_record",
    "score_line",
    "step_bar",
    "step_head",
    "step_numbers",
    "step_record",
]


# -- Loggers for the numbers of a run, besides its own files: TensorBoard, Weights & Biases, or a user's function.
#
# Loggers run on the writing rank and get numbers of the files: after a step those of its line in metrics.jsonl, after
# an evaluation the scores. A logger that fails is reported and closed, and training continues.


class Logger(Protocol):
    """Receiver of numbers."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log a step's numbers by name, such as "train/loss" or "val/AP"."""

    def close(self) -> None:
        """Write buffered numbers."""


class TensorBoard:
    """Event files in the run's `tensorboard/`; events of steps after `base`, of an interrupted run, are hidden."""

    def __init__(self, run_dir: Path, base: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=base + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Run of Weights & Biases in the run's `wandb/`; offline, unless the variable WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, base: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="varuna-capslog", name=run_dir.name, dir=str(run_dir), mode=mode)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Callback:
    """A user's `package.module:function`, called with the numbers by name and their step."""

    def __init__(self, name: str) -> None:
        self._function: Callable[[Mapping[str, float], int], object] = import_function(name, f"train.loggers: {name!r}")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._function(numbers, step)

    def close(self) -> None:
        """Do nothing: no number is buffered."""


_KNOWN: Mapping[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def check_loggers(names: Sequence[str]) -> None:
    """Raise CapslogError where a logger's package or function is missing; TensorBoard may be missing."""
    for name in names:
        if ":" in name:
            Callback(name)
        elif name == "wandb":
            try:
                import wandb  # noqa: F401
            except ImportError as error:
                raise CapslogError(
                    f"train.loggers has wandb, which cannot be imported ({error}); pip install wandb, or leave it out"
                ) from error


class Loggers:
    """All loggers of a run, on the rank that writes from step `base` on. say: shows a sentence to the user."""

    def __init__(self, names: Sequence[str], run_dir: Path, base: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Logger] = {}
        for name in names:
            try:
                self._open[name] = Callback(name) if ":" in name else _KNOWN[name](run_dir, base)
            except ImportError:
                continue  # TensorBoard is optional; `check_loggers` has checked the others
            except Exception as error:
                self._failed(name, error)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Pass the numbers to each logger."""
        for name, logger in list(self._open.items()):
            try:
                logger.log(numbers, step)
            except Exception as error:
                del self._open[name]
                self._failed(name, error)

    def close(self) -> None:
        """Close each logger."""
        for name, logger in self._open.items():
            try:
                logger.close()
            except Exception as error:
                self._failed(name, error)
        self._open = {}

    def _failed(self, name: str, error: Exception) -> None:
        self._say(f"the logger {name} failed and gets no more of this run ({type(error).__name__}: {error})")


# -- the run's record


_KEPT = 3
"""Steps. A lost writer is at most one step behind the others; the other two are reserve."""

_LOGGED = ("loss", "lr", "grad_norm", "loss_scale", "step_seconds", "samples_per_second")
"""Numbers of a step that loggers get, besides the parts of the loss."""

Line = TypeVar("Line")


def step_record(verdict: Verdict, rate: float, seconds: float, epoch: int, minibatch_size: int) -> dict[str, Any]:
    """Entries of a step in metrics.jsonl, except generation, world size and time, which the journal adds."""
    parts = dict(verdict.parts)
    return {
        "step": verdict.step,
        "epoch": epoch,
        "loss": parts.pop("loss"),
        "parts": parts,
        "lr": rate,
        "grad_norm": verdict.grad_norm if math.isfinite(verdict.grad_norm) else None,
        **({} if verdict.loss_scale is None else {"loss_scale": verdict.loss_scale, "skipped": verdict.skipped}),
        "step_seconds": seconds,
        "waited_seconds": max(verdict.waited_seconds, default=0.0),
        "samples_per_second": minibatch_size / seconds,
        **({"busy_seconds": list(verdict.busy_seconds)} if verdict.busy_seconds else {}),
    }


def peak_record(
    peaks: Sequence[int], source: str | None, microbatches: Sequence[Mapping[str, TensorSpec]]
) -> dict[str, Any]:
    """Further entries of metrics.jsonl for a step whose peaks were measured.

    Args:
        peaks: bytes, by stage of the first replica.
        source: how peaks were measured.
        microbatches: input specs of this replica's microbatches. The shapes of the largest (most bytes) become
            `peak_input`, since a peak is valid only for its input sizes.
    """
    record: dict[str, Any] = {"peak_bytes": list(peaks), "peak_source": source}
    if microbatches:
        largest = max(microbatches, key=lambda inputs: sum(spec.num_bytes for spec in inputs.values()))
        record["peak_input"] = {name: list(spec.shape) for name, spec in largest.items()}
    return record


class RecentSteps(Generic[Line]):
    """Record of the last steps that a rank applied, so that no line of the file `metrics` is lost with its writer.

    The writing rank may be lost after all ranks applied a step and before it wrote the line; the next writer takes the
    line from here. `Line` is the type from which the caller writes a line.
    """

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._lines: deque[tuple[int, Line]] = deque(maxlen=_KEPT)

    def add(self, step: int, line: Line) -> None:
        """Keep the content of a step's line; called on every rank, also where another rank writes the line."""
        self._lines.append((step, line))

    def missing(self, last: int) -> list[Line]:
        """Content of the kept lines up to step `last` that the file lacks, the oldest first."""
        if not self._lines or not self._metrics.exists():
            written = []
        else:
            written = [line.get("step") for line in files.last_lines(self._metrics)]
        return [line for step, line in self._lines if step <= last and step not in written]


def step_bar(
    total_steps: int | None, completed: int, max_seconds: float | None = None
) -> tuple[Console, Progress, TaskID]:
    """Progress bar over a run's steps on a terminal: steps, numbers, elapsed and remaining time. Hidden elsewhere.

    max_seconds: time limit of the run, which may shorten the remaining time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class TimeLeft(TextColumn):
        def render(self, task: Task) -> Text:
            limits = [] if task.time_remaining is None else [task.time_remaining]
            if max_seconds is not None and task.elapsed is not None:
                limits.append(max(0.0, max_seconds - task.elapsed))
            return Text(f"{datetime.timedelta(seconds=round(min(limits)))} left" if limits else "")

    console = Console(file=sys.stdout)
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    times = (TimeElapsedColumn(), TextColumn("elapsed"), TimeLeft(""))
    progress = Progress(*columns, *times, console=console, disable=not console.is_terminal)
    return console, progress, progress.add_task("starting", total=total_steps, completed=completed)


def step_head(record: Mapping[str, Any], total_steps: int | None) -> str:
    """Beginning of a step's line: its number and epoch, both counted from 1."""
    last = f" of {total_steps}" if total_steps else ""
    epoch = record.get("epoch")
    return f"step {record['step']}{last}{'' if epoch is None else f', epoch {int(epoch) + 1}'}"


def step_numbers(record: Mapping[str, Any]) -> list[str]:
    """Texts of the numbers that a step has, for the terminal."""
    shown = {"loss": "loss {:.4f}", "grad_norm": "|grad| {:.3g}", "lr": "lr {:.2g}"}
    shown["samples_per_second"] = "{:.1f} samples/s"
    skipped = ["skipped, since its gradients overflow"] if record.get("skipped") else []
    return [*(form.format(record[name]) for name, form in shown.items() if record.get(name) is not None), *skipped]


def score_line(step: int, scores: Mapping[str, Any]) -> str:
    """Line for the terminal with the first six numbers of an evaluation."""
    shown = _numbers_in(scores)[:6]
    early = shown and shown[0][0] == "AP" and not any(value for _, value in shown)
    numbers = "  ".join(f"{name} {value:.3f}" for name, value in shown)
    return f"step {step}: {numbers}{'  (as expected of a detector in its first steps)' if early else ''}"


def _numbers_in(scores: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in scores.items() if isinstance(value, (int, float))]


class Journal:
    """Record of a run on one rank.

    Args:
        total_steps: end of the progress bar; None if only time limits the run.
        log_every: steps between two calls of the loggers.
        loggers: names of the config's `train.loggers`.
        max_seconds: time limit of the run, for the remaining time on the bar.

    Attributes:
        writes: True on the rank that writes; on other ranks the journal only keeps the last steps.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int | None,
        log_every: int,
        loggers: Sequence[str] = (),
        max_seconds: float | None = None,
    ) -> None:
        self._run_dir, self._total_steps, self._log_every, self._names = run_dir, total_steps, log_every, loggers
        self._max_seconds = max_seconds
        self._generation = self._world_size = 0
        # each line with the generation and world size of its step
        self._recent: RecentSteps[tuple[int, int, Mapping[str, Any]]] = RecentSteps(run_dir / "metrics.jsonl")
        self.writes = False

    def begin(self, writes: bool, base: int, generation: int, world_size: int) -> None:
        """Start a generation after step `base`; a rank that begins to write adds missing lines of earlier steps."""
        if not writes:
            self.close()
        elif not self.writes:
            self._open(base)
            for made_by, members, record in self._recent.missing(base):
                self._write(record, made_by, members)
        self._generation, self._world_size = generation, world_size

    def _open(self, base: int) -> None:
        self._bar: tuple[Console, Progress, TaskID] | None = None
        if sys.stdout.isatty():
            self._bar = step_bar(self._total_steps, base, self._max_seconds)
            self._bar[1].start()
        self._printed = 0.0
        self.writes = True
        self._loggers = Loggers(self._names, self._run_dir, base, self.say)

    def step(self, record: Mapping[str, Any]) -> None:
        """Add the line of a step; `record` is a `step_record`, perhaps with a `peak_record`."""
        self._recent.add(int(record["step"]), (self._generation, self._world_size, record))
        if self.writes:
            self._write(record, self._generation, self._world_size)

    def _write(self, record: Mapping[str, Any], generation: int, world_size: int) -> None:
        line = {**record, "time": wall_seconds(), "generation": generation, "world_size": world_size}
        files.append_jsonl(self._run_dir / "metrics.jsonl", line)
        step = int(record["step"])
        text = "  ".join(step_numbers(record))
        if self._bar is not None:
            self._bar[1].update(self._bar[2], completed=step, description=text)
        if step % self._log_every == 0:
            logged = {f"train/{name}": record[name] for name in _LOGGED if record.get(name) is not None}
            self._loggers.log(
                logged | {f"parts/{name}": value for name, value in record.get("parts", {}).items()}, step
            )
        now = time.monotonic()
        if self._bar is None and (now - self._printed > 10 or self._printed == 0.0):
            self._printed = now
            self.say(f"{step_head(record, self._total_steps)}  {text}")

    def scores(self, step: int, scores: Mapping[str, Any]) -> None:
        """Add an evaluation to evaluations.jsonl and the loggers, and show a line on the terminal."""
        if not self.writes:
            return
        files.append_jsonl(
            self._run_dir / "evaluations.jsonl",
            {"step": step, "generation": self._generation, "time": wall_seconds(), "scores": dict(scores)},
        )
        self._loggers.log({f"val/{name}": value for name, value in _numbers_in(scores)}, step)
        self.say(score_line(step, scores))

    def event(self, kind: str, **details: Any) -> None:
        """Add a line to events.jsonl."""
        if self.writes:
            line = {"kind": kind, "time": wall_seconds(), "generation": self._generation, **details}
            files.append_jsonl(self._run_dir / "events.jsonl", line)

    def say(self, text: str) -> None:
        """Write a line on the terminal, above the progress bar where there is one."""
        if not self.writes:
            return
        if self._bar is not None:
            self._bar[0].print(printable(text), highlight=False, markup=False, emoji=False)
        else:
            sys.stdout.write(printable(text) + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Stop the progress bar and close the loggers; this rank writes no more until it begins again."""
        if not self.writes:
            return
        self.writes = False
        if self._bar is not None:
            self._bar[1].stop()
        self._loggers.close()


def evaluated_steps(run_dir: Path) -> list[int]:
    """Return the steps of the evaluations in a run's folder, in the order of the file."""
    path = run_dir / "evaluations.jsonl"
    rows = files.read_jsonl(path) if path.exists() else []
    return [row["step"] for row in rows if isinstance(row.get("step"), int)]


# -- Compares scores: more is better, except for losses, which are recognized by name.


def goodness(name: str, value: float) -> float:
    """Score, or its negative where less is better: for "loss", "perplexity" and names that end in "_loss"."""
    return -value if name in ("loss", "perplexity") or name.endswith("_loss") else value
