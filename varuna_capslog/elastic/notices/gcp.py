"""Notices of Google Cloud: preemption and host maintenance, by questions that hang until the value changes.

`instance/preempted` turns from FALSE to TRUE; the machine is switched off up to 30 s later (120 s where it was created
with that preemption notice). `instance/maintenance-event` leaves NONE 60 s ahead (machines with GPUs: longer), and only
for machines that ask for it: a listener that is started has asked. Sources: Compute Engine documentation, "Spot VMs",
"Query metadata server for maintenance event notices", "wait_for_change". A server in maintenance answers 503.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice, Round, Unavailable
from varuna_capslog.elastic.notices.metadata import Answer, HttpOpener, MetadataListener

__all__ = ["GcpListener"]

_log = logging.getLogger(__name__)

ROOT = "/computeMetadata/v1/"
INSTANCE = ROOT + "instance/"
FLAVOR = {"Metadata-Flavor": "Google"}


@dataclass(slots=True)
class _Key:
    """A value that is watched, by one thread."""

    name: str
    idle: str
    kinds: dict[str, Kind]
    lead: float
    value: str = ""
    etag: str = ""  # empty: ask without waiting
    episode: int = 0
    heard_at: float | None = None


@dataclass(eq=False)
class GcpListener(MetadataListener):
    """Asks the metadata server of Compute Engine; one thread each for preemption and maintenance.

    Attributes:
        preemption_seconds: from TRUE to the switch-off.
        maintenance_seconds: from the announcement of a maintenance to its beginning.
        hold: seconds that a question may hang. A server that vanished without a word is noticed after so long.
    """

    source: ClassVar[str] = "gcp"

    preemption_seconds: float = 30.0
    maintenance_seconds: float = 60.0
    hold: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        maintenance = {"TERMINATE_ON_HOST_MAINTENANCE": Kind.LEAVE, "MIGRATE_ON_HOST_MAINTENANCE": Kind.HINT}
        self._keys = (
            _Key("preempted", "FALSE", {"TRUE": Kind.LEAVE}, self.preemption_seconds),
            _Key("maintenance-event", "NONE", maintenance, self.maintenance_seconds),
        )

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("GET", endpoint + ROOT, FLAVOR, timeout=timeout)
        return answer.status == 200 and _is_google(answer)

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return tuple(functools.partial(self.ask, key) for key in self._keys)

    def ask(self, key: _Key) -> Round:
        """Asks for one value: answered at once for the first time and after a failure, else when the value changes."""
        waits = bool(key.etag)
        query = f"?wait_for_change=true&timeout_sec={self.hold:.0f}&last_etag={quote(key.etag)}" if waits else ""
        sent = self.clock.monotonic()
        try:
            answer = self.opener("GET", self.endpoint + INSTANCE + key.name + query, FLAVOR, timeout=self.hold + 2.0)
            value = self._value(key, answer)
        except Unavailable:
            key.etag = ""
            raise
        now = self.clock.monotonic()
        changed = value != key.value
        notices = self._notices(key, value, now, waits) if changed else ()
        key.value, key.heard_at = value, now
        key.etag = answer.headers.get("etag", "")
        hung = waits and now - sent >= min(1.0, self.hold / 2)
        # A server that does not hang is not asked more than twice a second.
        pause = 0.0 if changed or hung or (key.etag and not waits) else self.interval
        return Round(notices, pause)

    def _value(self, key: _Key, answer: Answer) -> str:
        if answer.status != 200:
            raise Unavailable(f"{key.name} answered {answer.status}")
        if not _is_google(answer):
            raise Unavailable(f"{key.name} was answered by something else than Google's metadata server")
        value = answer.body.strip()
        if value != key.idle and value not in key.kinds and value != key.value:
            _log.warning("gcp: %s has a value that is not known, %r; it is passed over", key.name, value[:60])
        return value

    def _notices(self, key: _Key, value: str, now: float, waited: bool) -> tuple[Notice, ...]:
        if value == key.idle:
            key.episode += 1  # the next value begins another episode
        kind = key.kinds.get(value)
        if kind is None:
            return ()
        if waited or key.heard_at is None:
            deadline = Deadline(now + key.lead, f"{key.lead:g} s from when it was read")
        else:  # it may have changed at any time since the last answer
            deadline = Deadline(max(now, key.heard_at + key.lead), f"{key.lead:g} s from the last answer before it")
        name = f"{key.name}-{key.episode}-{value}"
        return (Notice(kind, self.source, name, (self.host,), deadline, detail=f"{key.name} {value}"),)


def _is_google(answer: Answer) -> bool:
    return answer.headers.get("metadata-flavor") == "Google"
