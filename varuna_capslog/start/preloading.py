"""Modules that are imported ahead for workers, in this order. Nothing is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from varuna_capslog.base.fork_server import PRELOADED

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["SCRIPT_MODULES", "training_modules"]

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
