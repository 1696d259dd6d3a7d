"""The threads of this package: what a thread did not expect ends its owner with a sentence, never in silence.

A thread that dies unseen leaves others waiting for it for ever. So every thread is an `OwnedThread`;
`tests/base/test_threads.py` refuses any other kind.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import PROCESS_LIMIT

__all__ = ["Ends", "OwnedThread", "logged"]

_log = logging.getLogger(__name__)

Ends = Callable[[CapslogError], object]
"""Ends whoever needs the thread, with this sentence; called in the thread."""


def logged(error: CapslogError) -> None:
    """For a thread without which its owner goes on."""
    _log.warning("%s", error)


class OwnedThread(threading.Thread):
    """A daemon thread of one owner.

    Args:
        target: called with `arguments`.
        ends: called with what the target raised, in one sentence.
    """

    def __init__(self, name: str, target: Callable[..., object], ends: Ends, *arguments: object) -> None:
        super().__init__(target=target, name=name, args=arguments, daemon=True)
        self._ends = ends

    def start(self) -> None:
        """Raises CapslogError where the system has no more threads."""
        try:
            super().start()
        except RuntimeError as error:
            raise CapslogError(f"the thread {self.name} cannot be started: {error}; {PROCESS_LIMIT}") from error

    def run(self) -> None:
        """Calls the target; also a SystemExit, of which Python says nothing, is told to the owner."""
        try:
            super().run()
        except BaseException as error:
            if os.environ.get("CAPSLOG_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            self._ends(error if isinstance(error, CapslogError) else self._defect(error))

    def _defect(self, error: BaseException) -> CapslogError:
        return CapslogError(
            f"the thread {self.name} failed with {type(error).__name__}: {error}; this is a defect: CAPSLOG_DEBUG=1 "
            "shows where"
        )
