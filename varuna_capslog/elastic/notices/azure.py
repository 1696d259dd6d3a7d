"""Notices of Azure: Scheduled Events, and their acknowledgement.

The first question turns the service on for the machine (answers may take two minutes then), so a listener is started
with the job, not when trouble is near; after a day without questions it is off again. The document's incarnation grows
with every change. An event names all machines that it concerns, and machines of one scale set may see each other's.
Saying "StartRequests" approves an event for *all* of them and may start it at once; hence only `host_left` says it.
Source: Azure documentation, "Scheduled Events for Linux VMs", API version 2020-07-01.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice, Round, Unavailable
from varuna_capslog.elastic.notices.metadata import Answer, HttpOpener, MetadataListener, json_object

__all__ = ["AzureListener"]

_log = logging.getLogger(__name__)

COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
FIRST_ANSWER_SECONDS = 130.0
ACKNOWLEDGE_TRIES = 3

KINDS = {
    "Preempt": Kind.LEAVE,
    "Terminate": Kind.LEAVE,
    "Reboot": Kind.LEAVE,
    "Redeploy": Kind.LEAVE,
    "Freeze": Kind.HINT,  # the machine stands still for some seconds and keeps its memory
}


@dataclass(eq=False)
class AzureListener(MetadataListener):
    """Asks the instance metadata service of Azure.

    Attributes:
        machine: the machine's name in Azure; default: the service is asked. As long as it is not known, events are only
            hints: they may be meant for a neighbour.
        lead: seconds that a preemption leaves at least, where its time is missing or cannot be read.
    """

    source: ClassVar[str] = "azure"

    machine: str | None = None
    lead: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = threading.Lock()  # of the events that host_left reads, from another thread
        self._pending: dict[str, tuple[str, ...]] = {}  # not yet begun: event id -> machines
        self._incarnation: object = None
        self._answered = False

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("GET", endpoint + COMPUTE, HEADERS, timeout=timeout)
        return answer.status == 200 and json_object(answer, "compute") is not None

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask,)

    def ask(self) -> Round:
        """Asks once for the document; if it is another one than before, returns its events."""
        timeout = 2.0 if self._answered else FIRST_ANSWER_SECONDS
        answer = self.opener("GET", self.endpoint + EVENTS, HEADERS, timeout=timeout)
        if answer.status != 200:
            raise Unavailable(f"scheduled events answered {answer.status}: {answer.body[:80]!r}")
        document = json_object(answer, "scheduled events")
        events = document.get("Events")
        if not isinstance(events, list):
            raise Unavailable("scheduled events answered a document without a list of Events")
        self._answered = True
        if self.machine is None:
            self.machine = self._own_name()
        incarnation = (document.get("DocumentIncarnation"), self.machine)
        if incarnation == self._incarnation:
            return Round((), self.interval)
        notices, pending = [], {}
        for event in events:
            try:
                notice = self._notice(event, answer)
            except (KeyError, TypeError, AttributeError):
                _log.warning("azure: an event that cannot be read is passed over: %.200r", event)
                continue
            if notice is None:
                continue
            notices.append(notice)
            if notice.kind is Kind.LEAVE and self.machine is not None:
                pending[notice.id] = notice.resources
        with self._lock:
            for gone in self._pending.keys() - {notice.id for notice in notices}:
                _log.warning("azure: event %s was withdrawn or is over", gone)
            self._pending = pending
        self._incarnation = incarnation
        return Round(tuple(notices), self.interval)

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Approve the events that were announced for this machine, whose ranks have all left.

        An event that concerns further machines is approved only when all of them are in `resources_left`. Takes at most
        some seconds; an event that could not be approved begins at its own time.
        """
        with self._lock:
            pending = dict(self._pending)
        left_machines = {self.machine, *resources_left}
        ready = []
        for event, machines in pending.items():
            if waiting := [name for name in machines if name not in left_machines]:
                _log.warning("azure: event %s is not approved: %s may still have ranks", event, ", ".join(waiting))
            else:
                ready.append(event)
        return tuple(event for event in ready if self._approve(event))

    def _approve(self, event: str) -> bool:
        body = json.dumps({"StartRequests": [{"EventId": event}]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        why: object = ""
        for _attempt in range(ACKNOWLEDGE_TRIES):
            try:
                answer = self.opener("POST", self.endpoint + EVENTS, headers, body)
            except Unavailable as error:
                why = error
                continue
            if answer.status == 200:
                with self._lock:
                    self._pending.pop(event, None)
                return True
            why = f"it answered {answer.status}"
        _log.warning("azure: event %s could not be approved and begins at its own time: %s", event, why)
        return False

    def _own_name(self) -> str | None:
        try:
            answer = self.opener("GET", self.endpoint + NAME, HEADERS)
        except Unavailable:
            return None
        return answer.body.strip() or None if answer.status == 200 else None

    def _notice(self, event: Mapping[str, Any], answer: Answer) -> Notice | None:
        """An event's notice; None if it is not for this machine or of no known type."""
        name, kind = str(event["EventId"]), KINDS.get(event["EventType"])
        if not isinstance(event["Resources"], list):
            raise TypeError("Resources is no list")
        machines = tuple(str(machine) for machine in event["Resources"])
        for_us = self.machine is None or self.machine in machines
        if kind is None or not for_us or event["EventStatus"] not in ("Scheduled", "Started"):
            return None
        begun = event["EventStatus"] == "Started"
        if kind is Kind.LEAVE and begun:
            kind = Kind.NOW
        detail = f"{event['EventType']} {str(event['EventStatus']).lower()}"
        if self.machine is None:
            kind, detail = Kind.HINT, f"{detail} for {', '.join(machines)}; this machine's name is not known yet"
        deadline = Deadline(self.clock.monotonic(), "it has begun")
        if not begun:
            deadline = self.announced(answer, str(event.get("NotBefore") or ""), self.lead)
        return Notice(kind, self.source, name, (self.host,), deadline, machines, detail)
