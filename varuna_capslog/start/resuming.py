"""Finds where a run continues, before its workers start. torch is imported only where there is something to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.membership.generation import Stamp
    from varuna_capslog.training.checkpoint import Checkpoint

__all__ = ["newest_checkpoint", "newest_states", "take_held"]


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
