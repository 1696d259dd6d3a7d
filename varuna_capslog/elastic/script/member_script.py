"""A user's script run by a member's process.

The process runs the script inside a `MemberScript`, which `elastic.script.train` or `varuna_plugin.run_elastic` finds
with `current_script` when the script calls it. Another run in the same process has its own.
"""

from __future__ import annotations

import contextvars
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.training.worker_process import StopWish

__all__ = ["MemberScript", "current_script"]

_CURRENT: contextvars.ContextVar[MemberScript | None] = contextvars.ContextVar("member_script", default=None)


@dataclass
class MemberScript:
    """The script of one member.

    Attributes:
        settings: the config's section `elastic`; a script of Varuna's brings its own.
        status: how this member's part in the run has ended; None until then.
    """

    run_dir: Path
    wish: StopWish
    settings: Elastic
    status: int | None = None

    def run(self, path: str, arguments: Sequence[str], folder: str) -> int | str | None:
        """Runs the script as the program of this process; returns what it ended itself with (None: nothing).

        Args:
            arguments: the script's own.
            folder: where its imports are looked for first.
        """
        sys.argv = [path, *arguments]
        sys.path.insert(0, folder)
        token = _CURRENT.set(self)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return end.code
        finally:
            _CURRENT.reset(token)
        return None


def current_script() -> MemberScript | None:
    """The script that this call comes from; None in a process that is no member's.

    Raises:
        CapslogError: called in another thread than the one that runs the script.
    """
    found = _CURRENT.get()
    if found is None and "CAPSLOG_MEMBER" in os.environ and threading.current_thread() is not threading.main_thread():
        raise CapslogError(
            "a member of a run trains in the thread that runs its script; this call came from the thread "
            f"{threading.current_thread().name!r}: make it in the main thread"
        )
    return found
