"""Checks of a config before anything is built: names, the optimizer, data and weights.

`prepare.prepare_run` and `readiness` call them, so that `capslog train` and `capslog check` find the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of
from varuna_capslog.base.supervisor import usable
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.network import check_gloo_interfaces
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.planning.registry import planner_named
from varuna_capslog.start import ENGINES
from varuna_capslog.training.constants import check_samples

if TYPE_CHECKING:
    from varuna_capslog.model.workload import Workload

__all__ = ["check_names", "check_optimizer", "data_findings", "disk_findings"]


def check_names(config: Config) -> None:
    """Raises CapslogError where the config names a planner, memory model or engine that is unknown, or the environment
    a network interface; needs no torch.
    """
    check_gloo_interfaces(os.environ)
    planner_named(config.pipeline.planner)
    fields.refuse_unknown([config.pipeline.memory], [AUTO, *MEMORY_MODELS], "memory model")
    ENGINES[config.engine].check()


def check_optimizer(config: Config) -> None:
    """Raises CapslogError where the config's optimizer cannot step a part of the parameters by itself."""
    from varuna_capslog.engine.recipe import Recipe  # imports torch, which planning from a profile does without

    Recipe.of_config(config.train).check_optimizer()


def data_findings(config: Config, workload: Workload) -> list[RunFinding]:
    """Return findings about data and weights: notes, and problems that would stop the run or spoil its training."""

    def enough() -> None:
        facts = workload.data_facts()
        if "number of samples" in facts:
            check_samples(facts["number of samples"], config.train.minibatch_size)

    return list(findings_of(enough, workload.check))


def disk_findings(config: Config, checkpoint_bytes: int | None) -> Iterator[RunFinding]:
    """Check that the run's folder can be written, and that its disk has room for the checkpoints that are kept there.

    checkpoint_bytes: approximate size of a checkpoint; None: not known.
    """
    wanted = config.run_dir.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if os.path.lexists(path))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is no folder"
        raise CapslogError(f"run_dir={config.run_dir}: {folder} {why}; choose another run_dir")
    if checkpoint_bytes is None:
        return
    with usable(folder):
        free = shutil.disk_usage(folder).free
        before = sum(file.stat().st_size for file in (wanted / "checkpoints").glob("step-*/*"))
    count, size = _kept_checkpoints(config), format_bytes(checkpoint_bytes)
    if checkpoint_bytes * count - before > free:
        raise CapslogError(
            f"run_dir={config.run_dir} is to hold {count} checkpoint(s) of about {size}, but only {format_bytes(free)} "
            "are free there; free space, choose another run_dir, or set train.checkpoint_keep lower"
        )
    yield RunFinding(
        f"{count} checkpoint(s) of about {size} are there at once, and {format_bytes(free)} are free", "fact"
    )


def _kept_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints at once: those kept, the best one, and the one being written."""
    train = config.train
    most = train.checkpoint_keep + 1 + (train.evaluate_every is not None)
    if train.max_steps is None or train.evaluate_every:
        return most
    return min(most, 1 if train.checkpoint_every is None else 1 + (train.max_steps - 1) // train.checkpoint_every)
