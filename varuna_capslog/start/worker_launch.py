"""What the start of workers needs to know: which modules are imported ahead for them, and where their run continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from varuna_capslog.base.fork_server import PRELOADED

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.membership.generation import Stamp
    from varuna_capslog.training.checkpoint import Checkpoint

__all__ = ["SCRIPT_MODULES", "newest_checkpoint", "newest_states", "take_held", "training_modules"]


# -- Modules that are imported ahead for workers, in this order. Nothing is imported here.


SCRIPT_MODULES = (
    *PRELOADED,
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
)
"""Modules of a script's run."""


def training_modules(config: Config) -> tuple[str, ...]:
    """Return the modules of a run that a config describes."""
    loggers = ["torch.utils.tensorboard"] if "tensorboard" in config.train.loggers else []
    return *SCRIPT_MODULES, *loggers, "rich.progress", config.workload.partition(":")[0]


# -- Finds where a run continues, before its workers start. torch is imported only where there is something to read.


def take_held(run_dir: Path) -> None:
    """Make a checkpoint of the state that members left in `held/`, if it is newer than the last; see `held_state`."""
    if (run_dir / "held").exists():
        from varuna_capslog.elastic.member.held_state import recover

        recover(run_dir)


def newest_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint of a run (None if there is none), and those that were passed over."""
    if not (run_dir / "checkpoints").exists():
        return None, []
    from varuna_capslog.training.checkpoint import latest_checkpoint

    return latest_checkpoint(run_dir / "checkpoints")


def newest_states(run_dir: Path) -> list[tuple[Stamp, Path]]:
    """Return the boundaries of a script's run that lie on disk, the newest last, by their files' generations."""
    if not (run_dir / "checkpoints").exists():
        return []
    from varuna_capslog.elastic.script import saved_states

    return saved_states(run_dir)
