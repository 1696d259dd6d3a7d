"""Notices of AWS: the interruption of a spot instance and the rebalance recommendation, through IMDSv2.

`PUT /latest/api/token` gives a session token; `spot/instance-action` answers 404 until the instance is to go, two
minutes ahead (hibernation: none); `events/recommendations/rebalance` answers 404 until the instance is at risk. Both
"best effort". Sources: EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations".
The guide advises to ask every 5 s; we ask every half second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice, Round, Unavailable
from varuna_capslog.elastic.notices.metadata import Answer, HttpOpener, MetadataListener, json_object

__all__ = ["AwsListener"]

TOKEN_SECONDS = 21600  # the longest life that the server gives
TOKEN = "/latest/api/token"
LIFE = "X-aws-ec2-metadata-token-ttl-seconds"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(eq=False)
class AwsListener(MetadataListener):
    """Asks the instance metadata service of EC2.

    Attributes:
        lead: seconds from the interruption notice to the interruption; never more is promised.
    """

    source: ClassVar[str] = "aws"

    lead: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = threading.Lock()  # of the token
        self._token = ""
        self._renew_at = 0.0

    @staticmethod
    def answers(ask: HttpOpener, endpoint: str, timeout: float) -> bool:
        answer = ask("PUT", endpoint + TOKEN, {LIFE: "60"}, timeout=timeout)
        return answer.status == 200 and bool(answer.body.strip())

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask_action, self.ask_rebalance)  # apart: trouble with one must not slow the other

    def ask_action(self) -> Round:
        """Asks once whether the instance is to be interrupted."""
        answer = self._get(ACTION)
        if answer is None:
            return Round((), self.interval)
        value = json_object(answer, ACTION)
        action, when = value.get("action"), str(value.get("time", ""))
        if not isinstance(action, str) or not action:
            raise Unavailable(f"{ACTION} named no action: {answer.body[:60]!r}")
        kind, deadline = Kind.LEAVE, self.announced(answer, when, self.lead, f"{action} at ", self.lead)
        if action == "hibernate":  # begins together with its notice
            kind, deadline = Kind.NOW, Deadline(self.clock.monotonic(), "hibernation gives no time")
        notice = Notice(kind, self.source, f"{action}@{when}", (self.host,), deadline, detail=f"spot {action}")
        return Round((notice,), self.interval)

    def ask_rebalance(self) -> Round:
        """Asks once whether the instance is at risk."""
        answer = self._get(REBALANCE)
        if answer is None:
            return Round((), self.interval)
        when = str(json_object(answer, REBALANCE).get("noticeTime", ""))
        name = f"rebalance@{when}"
        notice = Notice(Kind.HINT, self.source, name, (self.host,), detail="rebalance recommendation")
        return Round((notice,), self.interval)

    def _get(self, path: str) -> Answer | None:
        """The answer, or None for "nothing there" (404). A token that is refused is replaced once."""
        for _attempt in range(2):
            token = self._fresh_token()
            answer = self.opener("GET", self.endpoint + path, {"X-aws-ec2-metadata-token": token})
            if answer.status == 401:
                with self._lock:
                    if self._token == token:  # else the other thread has replaced it already
                        self._token = ""
                continue
            if answer.status == 404:
                return None
            if answer.status != 200:
                raise Unavailable(f"{path} answered {answer.status}")
            return answer
        raise Unavailable(f"{path} refuses a token that was just given (401)")

    def _fresh_token(self) -> str:
        """The token; fetched where there is none or half its life is over."""
        with self._lock:
            if not self._token or self.clock.monotonic() >= self._renew_at:
                answer = self.opener("PUT", self.endpoint + TOKEN, {LIFE: str(TOKEN_SECONDS)})
                token = answer.body.strip()
                if answer.status != 200 or not (token and token.isascii() and token.isprintable()):
                    raise Unavailable(f"{TOKEN} gave no token ({answer.status}); a container needs a hop limit of 2")
                self._token = token
                self._renew_at = self.clock.monotonic() + TOKEN_SECONDS / 2
            return self._token
