"""What workers import, in the order in which it is imported ahead of them. Nothing is imported here."""

from __future__ import annotations

from varuna_capslog.base.fork_server import PRELOADED

__all__ = ["SCRIPT_MODULES", "TRAINING_MODULES"]

SCRIPT_MODULES = (
    *PRELOADED,
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
)
"""Of a script's run."""

TRAINING_MODULES = (*SCRIPT_MODULES, "torch.utils.tensorboard", "rich.progress")
"""Of a run that a config describes."""
