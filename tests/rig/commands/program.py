"""The process that `launch/chaos.sh` starts: it ends as `capslog` does, with one sentence and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

from tests.rig.commands import chaos, script
from varuna_capslog import cli

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the arguments of this process: those of `script` after that word, those of `chaos` otherwise."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["script"]:
        cli.main(arguments[1:], script.app, "launch/chaos.sh script")
    cli.main(arguments, chaos.app, "launch/chaos.sh")
