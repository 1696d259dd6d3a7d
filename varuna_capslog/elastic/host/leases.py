"""How hosts know of each other's end: each puts a sign of life into the store, each looks at the others'.

No clocks are compared: what counts is how long a watcher itself has not seen a sign change. A thread of its own, so
that a supervisor that waits for something is not taken for dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone

__all__ = ["Leases"]


class Leases:
    """The leases of one host.

    Args:
        others: hosts to be watched now.
        silent: called with a host that gave no sign for `seconds`, again and again while it stays silent and watched.
        store_answers: called with whether it does, each time.
    """

    def __init__(
        self,
        store: MembershipStore,
        host: str,
        seconds: float,
        others: Callable[[], Iterable[str]],
        silent: Callable[[str], None],
        store_answers: Callable[[bool], None],
    ) -> None:
        self._store = store
        self._host = host
        self._seconds = seconds
        self._others = others
        self._silent = silent
        self._store_answers = store_answers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Give the first sign, then go on in the thread. Raises StoreGone."""
        self._store.put(f"lease/{self._host}", "0")
        self._thread.start()

    def stop(self) -> None:
        """Give no further sign."""
        self._ended.set()

    def _run(self) -> None:
        signs: dict[str, str | None] = {}
        changed: dict[str, float] = {}
        looked = time.monotonic()
        answers, beat = True, 0
        while not self._ended.wait(self._seconds / 4):
            beat += 1
            try:
                self._store.put(f"lease/{self._host}", str(beat))
                found = {other: self._store.get(f"lease/{other}") for other in self._others()}
            except StoreGone:
                answers = False
                self._store_answers(False)
                continue
            now = time.monotonic()
            # A host that did not look for long (stopped, swapped out, cut off) has missed signs, and counts anew.
            away = not answers or now - looked > self._seconds / 2
            looked = now
            for other, sign in found.items():
                if away or other not in changed or sign != signs[other]:
                    signs[other], changed[other] = sign, now
                elif now - changed[other] > self._seconds:
                    self._silent(other)
            for gone in set(changed) - set(found):
                del signs[gone], changed[gone]
            answers = True
            self._store_answers(True)
