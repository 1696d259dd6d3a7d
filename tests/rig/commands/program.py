"""The process that `launch/chaos.sh` starts: it ends as `capslog` does, with one sentence and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

from tests.rig.commands import chaos, script
from varuna_capslog import cli

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command `script` with the arguments after that word; without it, `chaos` with all arguments."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["script"]:
        cli.main(arguments[1:], script.app, "launch/chaos.sh script")
    cli.main(arguments, chaos.app, "launch/chaos.sh")
