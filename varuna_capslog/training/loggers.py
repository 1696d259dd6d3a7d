"""Loggers for the numbers of a run, besides its own files: TensorBoard, Weights & Biases, or a function of the user's.

A logger gets the same as the files of the writing rank: after a step the numbers of its line in metrics.jsonl, after
an evaluation the scores. A logger that fails is reported once and gets no more, and the training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.functions import imported

__all__ = ["Logger", "Loggers", "check_loggers"]


class Logger(Protocol):
    """A receiver of numbers."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Takes numbers by name, such as "train/loss" or "val/AP", that belong to a step."""

    def close(self) -> None:
        """Writes out the numbers that it still holds."""


class TensorBoard:
    """Event files in the run's `tensorboard/`; those of steps after `base`, of a run that broke off, are hidden."""

    def __init__(self, run_dir: Path, base: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=base + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases in the run's `wandb/`; offline, unless the variable WANDB_MODE says otherwise."""

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
        self._function: Callable[[Mapping[str, float], int], object] = imported(name, f"train.loggers: {name!r}")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._function(numbers, step)

    def close(self) -> None:
        """Nothing is held."""


_KNOWN: Mapping[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def check_loggers(names: Sequence[str]) -> None:
    """Raises CapslogError where a logger's package or function is not there; without TensorBoard a run goes on."""
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
    """All loggers of a run, on the rank that writes.

    Args:
        base: the step after which this rank begins to write.
        say: takes a sentence for people.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, base: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Logger] = {}
        for name in names:
            try:
                self._open[name] = Callback(name) if ":" in name else _KNOWN[name](run_dir, base)
            except ImportError:
                continue  # TensorBoard is an extra; `check_loggers` has asked for the others
            except Exception as error:
                self._failed(name, error)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Gives the numbers to each logger; see `Logger.log`."""
        for name, logger in list(self._open.items()):
            try:
                logger.log(numbers, step)
            except Exception as error:
                del self._open[name]
                self._failed(name, error)

    def close(self) -> None:
        """Closes each logger; see `Logger.close`."""
        for name, logger in self._open.items():
            try:
                logger.close()
            except Exception as error:
                self._failed(name, error)
        self._open = {}

    def _failed(self, name: str, error: Exception) -> None:
        self._say(f"the logger {name} failed and gets no more of this run ({type(error).__name__}: {error})")
