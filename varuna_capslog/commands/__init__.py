"""The sub-commands of `capslog`: arguments, a call into the library, a table.

`varuna_capslog.cli` collects them. A command decides nothing the library could decide and imports what is slow inside
its body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from varuna_capslog.commands.chaos import chaos
from varuna_capslog.commands.compare import compare
from varuna_capslog.commands.host import host
from varuna_capslog.commands.morph import morph, notice
from varuna_capslog.commands.plan import plan
from varuna_capslog.commands.profile import profile
from varuna_capslog.commands.results import evaluate, predict, report
from varuna_capslog.commands.script import script
from varuna_capslog.commands.simulate import simulate
from varuna_capslog.commands.train import train

__all__ = ["COMMANDS", "SETTINGS"]

COMMANDS: tuple[Callable[..., None], ...] = (
    profile,
    plan,
    compare,
    simulate,
    train,
    host,
    script,
    morph,
    notice,
    evaluate,
    predict,
    report,
    chaos,
)
"""In the order of `capslog --help`, which is that in which a new user needs them."""

SETTINGS: dict[str, dict[str, Any]] = {
    "script": {"allow_interspersed_args": False, "ignore_unknown_options": True},  # what follows FILE is its own
}
"""How a command's arguments are read, where that is not as usual."""
