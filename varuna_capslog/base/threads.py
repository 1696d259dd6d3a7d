"""The threads of this package: an unexpected error in a thread ends its owner with a sentence, never in silence.

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
"""Ends the owner of the thread with this error; called in the thread."""


def logged(error: CapslogError) -> None:
    """Log the error; for a thread whose owner goes on without it."""
    _log.warning("%s", error)


class OwnedThread(threading.Thread):
    """A daemon thread of one owner.

    Args:
        target: called with `arguments`.
        ends: called with the error that the target raised, in one sentence.
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
        """Call the target. The owner also learns of a SystemExit, which Python does not print."""
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
